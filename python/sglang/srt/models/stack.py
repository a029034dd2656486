"""A model as a layer stack and a head.

The stack, including the embedding, works on tokens one by one and can be replayed as a
graph; the head reads the real rows of a batch. Knows neither layers nor graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from sglang.srt.layers.module import Module

if TYPE_CHECKING:
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput


class StackOutput(NamedTuple):
    """Output of the layer stack.

    `hidden` [T, H] is the input of the head. `aux` holds the captured layer inputs, one
    or several beside each other in each tensor [T, n * H]; if there are any, the caller
    gets them instead of `hidden`.
    """

    hidden: Tensor
    aux: list[Tensor]


# (input_ids [T], positions [T], batch) -> the stack's output.
Stack: TypeAlias = "Callable[[Tensor, Tensor, ForwardBatch], StackOutput]"


class StackedModel(Module):
    """A model as a layer stack and a head.

    Attributes:
        takes_input_embeds: whether the stack honours `ForwardBatch.input_embeds`.
        has_experts: whether layers have the experts of `ModelConfig.moe`.
        keeps_latents: whether its KV consists of the latents of `ModelConfig.latent`.
        state_type: type of the layers that keep a state, or None if all layers attend.
        is_shallow: whether it is in a `shallow` scope.
    """

    takes_input_embeds = False
    has_experts = False
    keeps_latents = False
    state_type: str | None = None
    is_shallow = False

    @property
    def aux_layers(self) -> frozenset[int]:
        """The layers whose inputs `StackOutput.aux` holds."""
        return frozenset()

    @contextmanager
    def shallow(self) -> Iterator[None]:
        """Scope where the stack runs few layers, at least one of each kind. It launches
        all kernels, but its results are useless."""
        before, self.is_shallow = self.is_shallow, True
        try:
            yield
        finally:
            self.is_shallow = before

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        *,
        stack: Stack | None = None,
    ) -> LogitsProcessorOutput:
        """Run stack and head; `stack` replaces `forward_stack`."""
        run = self.forward_stack if stack is None else stack
        return self.forward_head(
            run(input_ids, positions, forward_batch), forward_batch
        )

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        raise NotImplementedError

    def forward_head(
        self, output: StackOutput, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        raise NotImplementedError

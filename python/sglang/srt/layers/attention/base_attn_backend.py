"""Interface of attention backends: prepare a forward, show what it reads, run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sglang.srt.configs.attention_backends import (
    ATTENTION_BACKENDS,
    AttentionBackendCapabilities,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_canary.attended import AttendedBytes
    from kv_canary.view import KVReadView
    from sglang.srt.configs.draft_layout import BranchLayout
    from sglang.srt.configs.latent_config import LatentConfig
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.layers.ops.decoder_stack import StackInput, StackPlan, StackRun
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.ops.branch_slots.op import BranchPaths, SlotRows

CallWrapper = Callable[[Callable[..., None]], Callable[..., None]]
"""Takes an op and returns one with the same arguments."""

StackWrapper = Callable[[Callable[..., "StackRun"]], Callable[..., "StackRun"]]
"""Like `CallWrapper`, for the op that runs a whole stack."""


class DraftDecodeBackend(Protocol):
    """Attention of one draft phase: one forward of requests x branches per step."""

    def plan(self, seq_lens: Sequence[int] | None, *, graph_rows: int = 0) -> None:
        """Do a phase's host work, outside any graph: before the phase runs, and before
        a graph of it is captured or replayed.

        Args:
            seq_lens: KV lengths of the requests, if `needs_cpu_seq_lens`.
            graph_rows: requests in the graph; those after `seq_lens` are padding
                without KV. 0 outside graphs.
        """

    def prepare(self, rows: SlotRows) -> None:
        """Set the metadata of all steps, before the first of them. Where the backend
        supports CUDA graphs the work is enqueued, so that it can be captured."""

    def follow(self, step: int, paths: BranchPaths) -> None:
        """Let the branches of a step after the first read the slots of their ancestors,
        in layouts that are exact (`BranchLayout.is_exact`). Enqueued like `prepare`,
        before the forward of this step and after those before it."""

    def step(self, index: int) -> AttentionBackend:
        """Return the backend for the forward of step `index`."""


class AttentionBackend(ABC):
    """Attention of a model over its KV pool.

    One of three methods sets the metadata once per forward: `init_eager` outside CUDA
    graphs, `init_capture` and `init_replay` around them. `forward` then reads it in
    every layer.
    """

    name: str

    @property
    def capabilities(self) -> AttentionBackendCapabilities:
        return ATTENTION_BACKENDS[self.name]

    @abstractmethod
    def init_eager(self, forward_batch: ForwardBatch) -> None:
        """Prepare the metadata of a forward that runs outside graphs."""

    def init_capture(self, forward_batch: ForwardBatch, rows: int) -> None:
        """Prepare static metadata to capture a graph of `rows` rows. Its inputs are the
        static tensors of `forward_batch`.

        Raises:
            RuntimeError: the backend does not declare `supports_cuda_graph`.
        """
        raise RuntimeError(f"attention backend {self.name} does not support graphs")

    def init_replay(self, forward_batch: ForwardBatch) -> None:
        """Fill the static metadata for a replay over the padded `forward_batch`.

        Raises:
            RuntimeError: the backend does not declare `supports_cuda_graph`.
        """
        raise RuntimeError(f"attention backend {self.name} does not support graphs")

    def draft_decode(
        self, layout: BranchLayout, *, max_requests: int
    ) -> DraftDecodeBackend:
        """Return the attention of the draft steps of up to `max_requests` requests.

        Raises:
            ValueError: the backend cannot serve this layout; the message names the
                flag.
        """
        raise ValueError(
            f"--attention-backend {self.name} does not serve speculative decoding"
        )

    def wrap_calls(
        self, on_store: CallWrapper, on_attend: CallWrapper, on_stack: StackWrapper
    ) -> bool:
        """Wrap the ops with which this backend, and any later copy of it, stores K and
        V, attends, and runs a whole stack. Return whether it has such ops."""
        return False

    def run_stack(
        self, plan: StackPlan, given: StackInput, forward_batch: ForwardBatch
    ) -> StackRun | None:
        """Run a layer stack as one operator that does what `forward` does in each
        layer, or return None and leave the stream alone if the layers of this forward
        have to run one by one."""
        return None

    def compare_bytes(self, groups: Mapping[str, AttendedBytes]) -> None:
        """From now on, compare the bytes that decodes load.

        Args:
            groups: checksums of each group of the pool, by group name.

        Raises:
            RuntimeError: the backend does not declare `compares_bytes`.
        """
        raise RuntimeError(f"attention backend {self.name} does not compare bytes")

    def expands(self, latent: LatentConfig, forward_batch: ForwardBatch) -> bool:
        """Return whether attention over these latents takes its expanded form
        (`ExpandedAttention`) in this forward, not the absorbed one. Decided on the
        host."""
        return False

    @abstractmethod
    def read_view(self, forward_batch: ForwardBatch) -> Sequence[KVReadView]:
        """Return views of the slots that `forward` is about to read, made from the
        tables it reads.

        One view per metadata group; the KV canary verifies them.
        """

    def group_forwards(self, forward_batch: ForwardBatch) -> dict[str, WindowForward]:
        """Return, by group name, what `forward` is about to read and write in the
        secondary groups that it attends over. It uses the same tensors.

        Call it once per forward, before the first layer.
        """
        return {}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        out: Tensor,
    ) -> None:
        """Norm and rotate q and k, write k and v to the pool, attend into `out`.

        Args:
            q: [T, Hq, D]; overwritten. k, v: [T, Hkv, D]; k may be overwritten. With
                latents, v is the first channels of k; if `layer` is an
                `ExpandedAttention`, q and k have different numbers of channels.
            out: [T, Hq, v_head_dim]; the backend allocates nothing.
        """
        self.store(q, k, v, layer, forward_batch)
        self.attend(q, k, v, layer, forward_batch, out=out)

    @abstractmethod
    def store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        """The first half of `forward`: norm, rotation and the write to the pool.

        Of the batch it reads only `positions`, `out_cache_loc` and what never changes
        between forwards, so a graph of any number of rows may contain it.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        out: Tensor,
    ) -> None:
        """The second half of `forward`: attention over the pool, after `store`."""

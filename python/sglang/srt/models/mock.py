"""The mock model: its next token is an exact function of the KV that attention reads.

It has no trained weights and runs through the real backends, pools, scheduler and
graphs. One wrong, stale or missing KV slot changes its output, and the tests' oracle
computes the right one. `docs/mock_model.md` describes the construction, and why sparse
signs survive bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sglang.srt.configs.layer_types import LINEAR
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.distributed.partition import divide, divide_kv_heads
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.module import Module
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
from sglang.srt.models import mock_math, mock_ops
from sglang.srt.models.llama import check_captured_layers
from sglang.srt.models.mock_state import MockFold, check_state
from sglang.srt.models.stack import StackedModel, StackOutput

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch


def load_codes(module: VocabEmbedding | LMHead, codes: Tensor) -> None:
    """Fill a table [vocab, 512] with `codes` [vocab, 12], padded with zeros."""
    table = torch.zeros(len(codes), mock_math.HIDDEN_SIZE)
    table[:, : mock_math.TOKEN_BITS] = codes
    assert module.weight is not None
    module.weight.load("codes", table, None)


class MockAttention(Module):
    """Layers of attention with a uniform softmax over all written keys.

    `windows` are the layers' sliding windows, or None for layers that read everything.
    """

    def __init__(
        self, *, windows: Sequence[int | None] = (None,) * mock_math.NUM_LAYERS
    ) -> None:
        super().__init__()
        self._group = get_tp_group()
        self._heads = divide(
            mock_math.NUM_HEADS, self._group, what="num_attention_heads"
        )
        self._kv_heads = divide_kv_heads(mock_math.NUM_KV_HEADS, self._group)
        self.layers = nn.ModuleList(
            RadixAttention(
                num_heads=self._heads.size,
                num_kv_heads=self._kv_heads.size,
                head_dim=mock_math.HEAD_DIM,
                layer_id=layer,
                scaling=mock_math.SM_SCALE,
                sliding_window=windows[layer],
            )
            for layer in range(len(windows))
        )

    def forward(
        self, x: Tensor, layer: int, dtype: torch.dtype, forward_batch: ForwardBatch
    ) -> Tensor:
        """Write the signatures of x [T] int64; return the mean read, [T, 8 * 64]."""
        qkv = self._local_heads(mock_ops.qkv(x, layer, dtype))
        return self._group.all_gather_last_dim(self.layers[layer](qkv, forward_batch))

    def _local_heads(self, qkv: Tensor) -> Tensor:
        """Select this rank's heads: [T, all q, k, v channels] -> [T, its channels]."""
        if self._group.size == 1:
            return qkv
        sizes = (mock_math.NUM_HEADS, *(mock_math.NUM_KV_HEADS,) * 2)
        heads = qkv.view(len(qkv), sum(sizes), mock_math.HEAD_DIM).split(sizes, dim=1)
        parts = (self._heads, self._kv_heads, self._kv_heads)
        kept = [h.narrow(1, p.start, p.size) for h, p in zip(heads, parts, strict=True)]
        return torch.cat(kept, dim=1).view(len(qkv), -1)


class MockForCausalLM(StackedModel):
    """The mock model: 2 layers, 8 query and 2 KV heads of 64 channels, no rotation.

    config.json: vocab_size up to 4,096, optional `sliding_window` and `layer_types`. If
    layer 1 is of a type with a state, it keeps the same sums there.
    """

    state_type = LINEAR

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__()
        mock_math.check_shape(config)
        self.state_layer: MockFold | None = None
        if config.state is not None:
            check_state(config)
            self.state_layer = MockFold()
        self.config = config
        self.vocab_size = config.vocab_size
        self.windows = [config.layer_window(i) for i in range(mock_math.NUM_LAYERS)]
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size)
        attending = len(config.attention_layers)
        self.attn = MockAttention(windows=self.windows[:attending])
        self.captured_layers: tuple[int, ...] = ()
        self.logits_processor = LogitsProcessor()

    def embed_and_head(self) -> tuple[VocabEmbedding, LMHead]:
        """Return the modules that a draft head may share."""
        return self.embed_tokens, self.lm_head

    def fill_weights(self) -> None:
        """Fill embedding and head with the bits of each token id as +1 / -1."""
        codes = mock_math.token_codes(self.vocab_size)
        for module in (self.embed_tokens, self.lm_head):
            load_codes(module, codes)

    @property
    def aux_layers(self) -> frozenset[int]:
        return frozenset(self.captured_layers)

    def capture_layers(self, layers: Sequence[int]) -> None:
        """Return these of the three `mock_math.aux_states` as hidden states.

        Raises:
            ValueError: `layers` do not ascend, or are not within 0 to 2.
        """
        check_captured_layers(layers, self.config)
        self.captured_layers = tuple(layers)

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        embedded = self.embed_tokens(input_ids)
        dtype, count = embedded.dtype, positions + 1
        x = mock_ops.embedded_keys(embedded, positions)
        folds: list[Tensor] = []
        for layer, window in enumerate(self.windows):
            if layer:
                x = mock_ops.next_keys(folds[0], positions)
            if layer and self.state_layer is not None:
                folds.append(self.state_layer.run(x, dtype, forward_batch))
                continue
            mean = self.attn(x, layer, dtype, forward_batch)
            read = count if window is None else count.clamp(max=window)
            folds.append(mock_ops.fold(mean, read, layer))
        fold0, fold1 = folds
        hidden = mock_ops.hidden_state(fold0, fold1, positions, self.vocab_size, dtype)
        states = mock_ops.aux_states(hidden) if self.captured_layers else []
        return StackOutput(hidden, [states[layer] for layer in self.captured_layers])

    def forward_head(
        self, output: StackOutput, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        return self.logits_processor(
            output.hidden, self.lm_head, forward_batch, aux_hidden=output.aux or None
        )

"""Heads for multi-token prediction that a target's own checkpoint holds.

A head has one of its target's decoder layers, between a projection of the next token
and the target's hidden state, and a norm (DeepSeek-V3, 2024, section 2.2).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sglang.srt.layers.rotary_embedding import shared_cos_sin_cache
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM, split_rotated_halves
from sglang.srt.models.draft import DraftModel, StateProjection, target_hidden_states
from sglang.srt.models.llama import DecoderLayer, LlamaForCausalLM
from sglang.srt.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM
from sglang.srt.models.stack import StackOutput

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch

logger = logging.getLogger(__name__)

NEXTN = "NEXTN"
PARTS = ("embed_norm.weight", "hidden_norm.weight", "fc.weight", "norm.weight")
"""Tensors of every head, by their names here."""
_MAX_LAYERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTensors:
    """How the checkpoints of a family name the tensors of a head.

    In the prefixes, {first} is the number of the first layer that predicts a further
    token.

    Fields:
        follows_target: numbers of these layers follow the target's. Otherwise they
            start at 0.
        layers: prefix of these layers, before their number.
        root: prefix of all tensors of the head.
        parts: prefix in the checkpoint -> prefix here. The first that fits decides.
        copies: prefixes of copies of the target's modules.
    """

    follows_target: bool
    layers: str
    root: str
    parts: dict[str, str]
    copies: tuple[str, ...] = ()

    def names(self, config: ModelConfig) -> HeadNames:
        """Return the names in the checkpoint that `config` was read from."""
        first = config.values.get("num_hidden_layers") if self.follows_target else 0
        further = range(first + 1, first + _MAX_LAYERS)
        return HeadNames(
            root=self.root.format(first=first),
            parts={name.format(first=first): own for name, own in self.parts.items()},
            copies=tuple(name.format(first=first) for name in self.copies),
            further=tuple(f"{self.layers}{number}." for number in further),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """`HeadTensors` of one checkpoint; `further` has the prefixes of further layers."""

    root: str
    parts: dict[str, str]
    copies: tuple[str, ...]
    further: tuple[str, ...]

    def own(self, name: str) -> str | None:
        """Return the head's name for a tensor, or None if it belongs to others."""
        if not name.startswith(self.root) or name.startswith(self.copies):
            return None
        for stored, own in self.parts.items():
            if name.startswith(stored):
                return own + name.removeprefix(stored)
        return None if name.startswith(self.further) else name

    def stored(self, own_name: str) -> str:
        """Invert `own`."""
        for stored, own in self.parts.items():
            if own_name.startswith(own):
                return stored + own_name.removeprefix(own)
        return own_name


QWEN = HeadTensors(
    follows_target=False,
    layers="mtp.layers.",
    root="mtp.",
    parts={
        "mtp.pre_fc_norm_embedding.": "embed_norm.",
        "mtp.pre_fc_norm_hidden.": "hidden_norm.",
        "mtp.fc.": "fc.",
        "mtp.layers.{first}.": "layer.",
        "mtp.norm.": "norm.",
    },
)
DEEPSEEK = HeadTensors(
    follows_target=True,
    layers="model.layers.",
    root="model.layers.{first}.",
    parts={
        "model.layers.{first}.enorm.": "embed_norm.",
        "model.layers.{first}.hnorm.": "hidden_norm.",
        "model.layers.{first}.eh_proj.": "fc.",
        "model.layers.{first}.shared_head.norm.": "norm.",
        "model.layers.{first}.": "layer.",
    },
    copies=(
        "model.layers.{first}.embed_tokens.",
        "model.layers.{first}.shared_head.head.",
    ),
)


class NextnHead(DraftModel):
    """A head for multi-token prediction.

    The forward maps token p + 1 and the target's normalised hidden state [T, H] at
    position p (`forward_batch.spec_info`) to the logits of token p + 2. The next step
    reads this head's normalised state.

    Attributes:
        target: the model whose decoder layer it has.
        tensors: how checkpoints name its tensors.
    """

    algorithm = NEXTN
    target: ClassVar[type[LlamaForCausalLM]]
    tensors: ClassVar[HeadTensors]

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__(config)
        self.packed_modules = self.target.packed_modules
        self._names = self.tensors.names(config)
        traits, size = self.target.traits, config.hidden_size
        self.embed_norm = traits.norm(size, config)
        self.hidden_norm = traits.norm(size, config)
        self.fc = StateProjection(2 * size, size)
        self.layer = DecoderLayer(
            config,
            traits,
            layer_id=0,
            cos_sin_cache=shared_cos_sin_cache(
                config.rope, head_dim=config.rotated_head_dim, rows=rope_rows
            ),
        )
        self.norm = traits.norm(size, config)

    @property
    def wanted_by(self) -> str:
        return f"--speculative-algorithm {NEXTN}"

    def add_optional_parts(self, names: Iterable[str]) -> None:
        if any(name.startswith(self._names.further) for name in names):
            logger.info(
                "%s has several layers for multi-token prediction; the first one "
                "drafts every token",
                self.config.path,
            )

    def own_name(self, name: str) -> str | None:
        return self._names.own(name)

    def stored_name(self, own_name: str) -> str:
        return self._names.stored(own_name)

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        embedded = self.embed_norm(self.embed(input_ids, forward_batch))
        states = self.hidden_norm(target_hidden_states(forward_batch))
        x = self.fc(torch.cat((embedded, states), dim=-1))
        pending, stream = self.layer(x, None, forward_batch)
        return StackOutput(self.norm.add_and_norm(pending, stream), [])


class Qwen3NextForCausalLMMTP(NextnHead):
    target = Qwen3NextForCausalLM
    tensors = QWEN
    has_experts = True


class Qwen3_5ForCausalLMMTP(NextnHead):
    target = Qwen3_5ForCausalLM
    tensors = QWEN


class Qwen3_5MoeForCausalLMMTP(NextnHead):
    target = Qwen3_5MoeForCausalLM
    tensors = QWEN
    has_experts = True


class DeepseekV3ForCausalLMNextN(NextnHead):
    target = DeepseekV3ForCausalLM
    tensors = DEEPSEEK
    has_experts = True
    keeps_latents = True

    def finish_loading(self, source: str) -> None:
        if self.config.values.get("rope_interleave"):
            split_rotated_halves(self)


# A target's class may have subclasses for other checkpoints of the same layers.
HEADS: tuple[type[NextnHead], ...] = (
    Qwen3NextForCausalLMMTP,
    Qwen3_5MoeForCausalLMMTP,
    Qwen3_5ForCausalLMMTP,
    DeepseekV3ForCausalLMNextN,
)


def find_head(target: type) -> type[NextnHead] | None:
    """Return the head in checkpoints of a model, or None if they have none."""
    return next((head for head in HEADS if issubclass(target, head.target)), None)

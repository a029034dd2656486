"""Llama, and the decoder that Qwen2 and Qwen3 share with it.

A model has three parts that a draft model or a graph uses separately: embedding, layer
stack, head. The differences between the families are data (`DecoderTraits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from sglang.srt.distributed.parallel_state import Addend, get_tp_group, summed
from sglang.srt.distributed.partition import divide
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    GateUpLinear,
    LoadableParameter,
    QKVLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.module import Module
from sglang.srt.layers.ops.activation.op import GATED
from sglang.srt.layers.ops.decoder_stack import StackInput
from sglang.srt.layers.radix_attention import RadixAttention, run_stack
from sglang.srt.layers.rotary_embedding import shared_cos_sin_cache
from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
from sglang.srt.models.layer_kinds import one_of_each_kind
from sglang.srt.models.stack import StackedModel, StackOutput
from sglang.srt.models.whole_stack import PlainLayer, plan_stack

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.ops.decoder_stack import StackPlan, StackRun


class DecoderMLP(Module):
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = GateUpLinear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(
            inner, hidden, bias=config.mlp_bias, what="intermediate_size"
        )
        self.activation = config.hidden_act

    def forward(self, x: Tensor, residual: Tensor | None) -> Addend | None:
        """As `RowParallelLinear.forward_into`."""
        inner = self.gate_up_proj.forward_gated(x, self.activation)
        return self.down_proj.forward_into(inner, residual)


def dense_feed_forward(config: ModelConfig, layer_id: int) -> DecoderMLP:
    return DecoderMLP(config)


def grouped_attention(
    config: ModelConfig, traits: DecoderTraits, **place: Any
) -> DecoderAttention:
    return DecoderAttention(config, traits, **place)


class StateMixer(NamedTuple):
    """What layers with a state have in place of attention.

    Fields:
        name: its name in checkpoints.
        make: makes it, from the configuration and the layer's number; called like
            `DecoderAttention`.
    """

    name: str
    make: Callable[[ModelConfig, int], Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """Properties of a family that config.json does not contain.

    Fields:
        qkv_bias: biases of q, k, v. Defaults to config.attention_bias, also for o_proj.
        qk_norm: q and k have per-head norms.
        sinks: attention has a sink per head.
        norm_offset: offset of all norms (see `RMSNorm`).
        scales_embedding: embeddings are multiplied by sqrt(hidden_size).
        attention: makes the attention, called like `DecoderAttention`.
        state_mixer: of the layers with a state, if the family has any.
        feed_forward: makes the block after attention, called like `DecoderMLP`.
        layer: makes a layer, called like and defaulting to `DecoderLayer`.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    sinks: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    attention: Callable[..., Module] = grouped_attention
    state_mixer: StateMixer | None = None
    feed_forward: Callable[[ModelConfig, int], Module] = dense_feed_forward
    layer: Callable[..., Module] | None = None

    def norm(self, size: int, config: ModelConfig) -> RMSNorm:
        return RMSNorm(size, config.rms_norm_eps, offset=self.norm_offset)


class DecoderAttention(Module):
    """Grouped-query attention.

    Attributes:
        projection: makes `qkv_proj`, called like `QKVLinear`.
    """

    projection: Callable[..., Any] = QKVLinear

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        *,
        layer_id: int,
        cos_sin_cache: Tensor,
        input_size: int,
    ) -> None:
        super().__init__()
        bias = config.attention_bias if traits.qkv_bias is None else traits.qkv_bias
        self.qkv_proj = self.projection(
            input_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias and traits.qkv_bias is None,
            what="num_attention_heads * head_dim",
        )
        if traits.qk_norm:
            self.q_norm = traits.norm(config.head_dim, config)
            self.k_norm = traits.norm(config.head_dim, config)
        if traits.sinks:
            self.sinks = _head_vector(config.num_heads)
        self.attn = RadixAttention(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=config.head_dim,
            layer_id=layer_id,
            scaling=config.attention_scale,
            sliding_window=config.layer_window(layer_id),
            logit_cap=config.attention_logit_cap,
            sinks=self.sinks if traits.sinks else None,
            cos_sin_cache=cos_sin_cache,
            q_norm=self.q_norm if traits.qk_norm else None,
            k_norm=self.k_norm if traits.qk_norm else None,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> Addend | None:
        """As `RowParallelLinear.forward_into`."""
        out = self.attn.qkv_buffer(x.shape[0])
        heads = self.attn(self.qkv_proj(x, out=out), forward_batch)
        return self.o_proj.forward_into(heads, residual)


def _head_vector(num_heads: int) -> LoadableParameter:
    """Create a parameter with one number per head; a rank holds those of its own
    heads."""
    part = divide(num_heads, get_tp_group(), what="num_attention_heads")
    return LoadableParameter.create(torch.empty(part.size), {None: part})


class DecoderBlock(Module):
    """A mixer of tokens, and MLP. The mixer is attention, or a fold into a state.

    The layer determines the input of attention, which has `input_size` channels
    (hidden_size by default).

    Args:
        cos_sin_cache: None if the layer does not attend.
    """

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        *,
        layer_id: int,
        cos_sin_cache: Tensor | None,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self._mixer_name = "self_attn"
        if cos_sin_cache is not None:
            self.self_attn = traits.attention(
                config,
                traits,
                layer_id=layer_id,
                cos_sin_cache=cos_sin_cache,
                input_size=input_size or config.hidden_size,
            )
        else:
            assert traits.state_mixer is not None
            self._mixer_name, make = traits.state_mixer
            self.add_module(self._mixer_name, make(config, layer_id))
        self.mlp = traits.feed_forward(config, layer_id)
        self.post_attention_layernorm = traits.norm(config.hidden_size, config)

    @property
    def mixer(self) -> Module:
        mixer: Module = getattr(self, self._mixer_name)
        return mixer

    def run(
        self, x: Tensor, residual: Tensor, forward_batch: ForwardBatch
    ) -> tuple[Addend | None, Tensor]:
        """Apply the mixer to x [T, input_size], then the MLP.

        `residual` [T, H] is the residual stream and is changed in place. Returns the
        same as `DecoderLayer.forward`.
        """
        out = self.mixer(x, residual, forward_batch)
        x = self.post_attention_layernorm.add_and_norm(out, residual)
        return self.mlp(x, residual), residual


class DecoderLayer(DecoderBlock):
    """A block that reads the normalised residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        *,
        layer_id: int,
        cos_sin_cache: Tensor | None,
    ) -> None:
        super().__init__(config, traits, layer_id=layer_id, cos_sin_cache=cos_sin_cache)
        self.input_layernorm = traits.norm(config.hidden_size, config)

    @property
    def closing_norm(self) -> RMSNorm | None:
        """Norm applied to the result of `forward` before it is added to the stream, or
        None."""
        return None

    def forward(
        self,
        x: Addend | None,
        residual: Tensor | None,
        forward_batch: ForwardBatch,
        closing: RMSNorm | None = None,
    ) -> tuple[Addend | None, Tensor]:
        """Return (x, residual) [T, H], whose sum is the stream after this layer.

        If `x` is None, `residual` is the stream. If `residual` is None, as in the first
        layer, `x` is. `closing` is the previous layer's `closing_norm`, if any.
        """
        if residual is None:
            assert isinstance(x, Tensor)
            stream, normed = x, self.input_layernorm(x)
        else:
            stream = residual
            normed = self.input_layernorm.add_and_norm(x, residual, closing)
        return self.run(normed, stream, forward_batch)


class DecoderModel(Module):
    """Embedding and layer stack.

    `layers_to_capture` holds the layers whose inputs are returned as auxiliary hidden
    states (EAGLE3); the number of layers means the output of the last one.
    """

    def __init__(
        self, config: ModelConfig, traits: DecoderTraits, *, rope_rows: int
    ) -> None:
        super().__init__()
        rotary = {
            layer_type: shared_cos_sin_cache(
                rope, head_dim=config.rotated_head_dim, rows=rope_rows
            )
            for layer_type, rope in config.ropes.items()
        }
        self.embed_tokens = VocabEmbedding(
            config.vocab_size,
            config.hidden_size,
            scale=config.hidden_size**0.5 if traits.scales_embedding else 1.0,
        )
        make_layer = traits.layer or DecoderLayer
        layers: list[Any] = [
            make_layer(config, traits, layer_id=i, cos_sin_cache=rotary.get(layer_type))
            for i, layer_type in enumerate(config.layer_types)
        ]
        self.layers = nn.ModuleList(layers)
        # Entry i is the closing norm of layer i's input, the last entry of the final
        # norm's input.
        self._closing: list[RMSNorm | None] = [None]
        self._closing += [layer.closing_norm for layer in layers]
        self.norm = traits.norm(config.hidden_size, config)
        self.layers_to_capture: frozenset[int] = frozenset()

    @cached_property
    def _like_others(self) -> frozenset[int]:
        """Return the layers that a shallow stack leaves out."""
        every = frozenset(range(len(self.layers)))
        return every - one_of_each_kind(list(self.layers))

    def forward(
        self,
        input_ids: Tensor,
        forward_batch: ForwardBatch,
        *,
        is_shallow: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return normalised hidden states [T, H] and the captured inputs; see
        `StackedModel.shallow`."""
        given = forward_batch.input_embeds
        if given is None:
            x = self.embed_tokens(input_ids)
        else:
            x = given.embed(self.embed_tokens, input_ids)
        return self.forward_layers(x, forward_batch, is_shallow=is_shallow)

    def forward_layers(
        self, x: Tensor, forward_batch: ForwardBatch, *, is_shallow: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Run only the layer stack, on embeddings [T, H], which are overwritten."""
        whole = self._run_whole(x, forward_batch)
        if whole is not None:
            return whole
        pending: Addend | None = x
        residual: Tensor | None = None
        aux: list[Tensor] = []
        left_out = self._like_others if is_shallow else ()
        for i, layer in enumerate(self.layers):
            closing = self._closing[i]
            if i in self.layers_to_capture:
                pending = None if pending is None else summed(pending)
                aux.append(_stream(pending, residual, closing))
            if i in left_out:
                continue
            pending, residual = layer(pending, residual, forward_batch, closing)
        assert residual is not None
        closing = self._closing[-1]
        if len(self.layers) in self.layers_to_capture:
            pending = None if pending is None else summed(pending)
            aux.append(_stream(pending, residual, closing))
        return self.norm.add_and_norm(pending, residual, closing), aux

    @cached_property
    def _plan(self) -> StackPlan | None:
        """Plan the one-operator form of the stack. Made at the first forward, once
        weights are loaded and packed."""
        layers: list[Any] = list(self.layers)
        plain = [
            PlainLayer(layer, layer.mixer, layer.mlp, layer.input_layernorm)
            for layer in layers
            if type(layer) is DecoderLayer
            and type(layer.mixer) is DecoderAttention
            and type(layer.mlp) is DecoderMLP
        ]
        return plan_stack(plain, self.norm) if len(plain) == len(layers) else None

    def _run_whole(self, x: Tensor, forward_batch: ForwardBatch) -> StackRun | None:
        """Run `forward_layers` as one operator, or return None if the backend, the
        model or this forward needs the layers one by one."""
        plan, captured = self._plan, tuple(sorted(self.layers_to_capture))
        if plan is None:
            return None
        return run_stack(plan, StackInput(x, captured=captured), forward_batch)


def _stream(
    pending: Tensor | None, residual: Tensor | None, closing: RMSNorm | None
) -> Tensor:
    """Return a copy of the stream that a layer is about to read."""
    if residual is None or pending is None:
        whole = pending if residual is None else residual
        assert whole is not None
        return whole.clone()
    return (pending if closing is None else closing(pending)) + residual


class LoadableModel(StackedModel):
    """A model whose weights come from a checkpoint, as the loader needs it.

    Attributes:
        is_text_part: checkpoints hold other parts besides this language model.
    """

    config: ModelConfig
    is_text_part = False
    # Checkpoint name of a part -> (its name here, shard if it is packed with others).
    packed_modules: dict[str, tuple[str, str | None]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    @property
    def wanted_by(self) -> str:
        """Who needs these weights, for errors."""
        return type(self).__name__

    def add_optional_parts(self, names: Iterable[str]) -> None:
        """Build modules that only some checkpoints have; `names` are this
        checkpoint's."""

    def own_name(self, name: str) -> str | None:
        """Return the model's name for a checkpoint tensor, or None if it is not
        needed."""
        return name

    def stored_name(self, own_name: str) -> str:
        """Return the checkpoint's name for a tensor of the model, for errors."""
        return own_name

    def finish_loading(self, source: str) -> None:
        """Check the weights and derive values from them.

        Raises:
            ValueError: the weights contradict the configuration. The message names
                `source`.
        """


def check_activation(
    config: ModelConfig, implemented: Iterable[str] = tuple(GATED)
) -> None:
    """Check that the activation is implemented.

    Raises:
        ValueError: it is not. The message names the file and the implemented ones.
    """
    if config.hidden_act not in implemented:
        raise ValueError(
            f"{config.file}: hidden_act {config.hidden_act!r} is "
            f"not supported; supported: {', '.join(implemented)}"
        )


def check_captured_layers(layers: Sequence[int], target: ModelConfig) -> None:
    """Check the layers whose hidden states are captured.

    Raises:
        ValueError: `layers` do not ascend, or exceed the number of layers.
    """
    count = target.num_layers
    ascending = sorted(set(layers))
    if list(layers) != ascending or not set(layers) <= set(range(count + 1)):
        raise ValueError(
            f"hidden states of the layers {list(layers)} cannot be captured: "
            f"{target.path} has {count} layers, and the ids must ascend from 0 to at "
            f"most {count}; set eagle_aux_hidden_state_layer_ids in the eagle_config "
            "of the draft's config.json"
        )


class LlamaForCausalLM(LoadableModel):
    """Llama-type decoder with a language-model head (Touvron et al., 2023).

    `model.embed_tokens` and `lm_head` may be replaced after construction (a draft model
    uses the target's). Positions up to `rope_rows` have rotary tables.
    """

    traits = DecoderTraits()
    takes_input_embeds = True

    def __init__(self, config: ModelConfig, *, rope_rows: int) -> None:
        super().__init__()
        check_activation(config)
        self.config = config
        self.model = DecoderModel(config, self.traits, rope_rows=rope_rows)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(logit_cap=config.final_logit_cap)

    def own_name(self, name: str) -> str | None:
        is_copy = name == "lm_head.weight" and self.config.tie_word_embeddings
        return None if is_copy else name

    def embed_and_head(self) -> tuple[VocabEmbedding, LMHead]:
        """Return the modules that a draft head may share."""
        return self.model.embed_tokens, self.lm_head

    @property
    def aux_layers(self) -> frozenset[int]:
        return self.model.layers_to_capture

    def capture_layers(self, layers: Sequence[int]) -> None:
        """Return the inputs of these layers as hidden states, in ascending order.
        Call it before graphs are captured, because a graph keeps the layers it was
        captured with.

        Raises:
            ValueError: `layers` do not ascend, or exceed the number of layers.
        """
        check_captured_layers(layers, self.config)
        self.model.layers_to_capture = frozenset(layers)

    def forward_stack(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch
    ) -> StackOutput:
        stack = self.model(input_ids, forward_batch, is_shallow=self.is_shallow)
        return StackOutput(*stack)

    def forward_head(
        self, output: StackOutput, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        return self.logits_processor(
            output.hidden, self.lm_head, forward_batch, aux_hidden=output.aux or None
        )

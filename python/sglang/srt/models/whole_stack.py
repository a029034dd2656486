"""Which layer stacks the one-operator form supports, and the plan of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kv_canary.op import native_available
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.ops.decoder_stack import StackLayer, StackPlan, StackSizes
from sglang.srt.layers.ops.linear.quantized import PANEL

if TYPE_CHECKING:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import Linear
    from sglang.srt.layers.ops.linear.op import PackedWeight


class PlainLayer(NamedTuple):
    """A layer with the usual attention and MLP."""

    block: Any  # a DecoderBlock, DecoderAttention and DecoderMLP of `llama`
    attention: Any
    mlp: Any
    input_norm: RMSNorm | None


def plan_stack(
    layers: Sequence[PlainLayer], final_norm: RMSNorm | None, *, first: int = 0
) -> StackPlan | None:
    """Plan a stack of plain decoder layers, or return None if the operator lacks
    something they need and they have to run one by one.

    Supported are whole models (no tensor parallelism) in float32 on the CPU, with full
    attention and a plain softmax.

    Args:
        first: as in `StackSizes`.
    """
    if get_tp_group().size > 1 or not native_available() or not layers:
        return None
    if not all(_is_covered(i, layer) for i, layer in enumerate(layers)):
        return None
    block, attention, mlp, _ = layers[0]
    post_norm = block.post_attention_layernorm
    sizes = StackSizes(
        num_heads=attention.attn.num_heads,
        num_kv_heads=attention.attn.num_kv_heads,
        head_dim=attention.attn.head_dim,
        hidden=post_norm.weight.shape[0],
        inner=_packed(mlp.down_proj).k,
        activation=mlp.activation,
        eps=post_norm.eps,
        scale=attention.attn.scaling,
        first=first,
    )
    return StackPlan([_weights(layer) for layer in layers], _weight(final_norm), sizes)


def _is_covered(place: int, layer: PlainLayer) -> bool:
    attn = layer.attention.attn
    plain = attn.window <= 0 and attn.logit_cap == 0.0 and attn.sinks is None
    packed = all(
        part.packed is not None and part.packed.panel == PANEL for part in _parts(layer)
    )
    return plain and packed and attn.layer_id == place


def _parts(plain: PlainLayer) -> tuple[Linear, Linear, Linear, Linear]:
    attention, mlp = plain.attention, plain.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _packed(linear: Linear) -> PackedWeight:
    assert linear.packed is not None
    return linear.packed


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _weights(plain: PlainLayer) -> StackLayer:
    qkv, o, gate_up, down = _parts(plain)
    attn = plain.attention.attn
    return StackLayer(
        input_norm=_weight(plain.input_norm),
        qkv=_packed(qkv),
        qkv_bias=qkv.bias,
        cos_sin_cache=attn.cos_sin_cache,
        q_norm=_weight(attn.q_norm),
        k_norm=_weight(attn.k_norm),
        o=_packed(o),
        o_bias=o.bias,
        post_norm=plain.block.post_attention_layernorm.weight,
        gate_up=_packed(gate_up),
        gate_up_bias=gate_up.bias,
        down=_packed(down),
        down_bias=down.bias,
    )

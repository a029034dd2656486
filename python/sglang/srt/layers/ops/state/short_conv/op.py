"""The ops of the short convolution; `reference.py` describes them."""

from __future__ import annotations

from sglang.srt.layers.ops.state.short_conv import reference
from sglang.srt.utils.dispatch import Op

_HERE = "sglang.srt.layers.ops.state.short_conv."

short_conv_decode = Op(
    reference=reference.short_conv_decode_ref,
    native=_HERE + "gathered:short_conv_decode",
    triton=_HERE + "triton:short_conv_decode",
)
short_conv_prefill = Op(
    reference=reference.short_conv_prefill_ref,
    native=_HERE + "gathered:short_conv_prefill",
    triton=_HERE + "triton:short_conv_prefill",
)
short_conv_tree = Op(
    reference=reference.short_conv_tree_ref,
    native=_HERE + "gathered:short_conv_tree",
    triton=_HERE + "triton:short_conv_tree",
)
short_conv_commit = Op(
    reference=reference.short_conv_commit_ref,
    native=_HERE + "gathered:short_conv_commit",
    triton=_HERE + "triton:short_conv_commit",
)

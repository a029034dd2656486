"""The ops of the gated delta rule; `reference.py` describes them."""

from __future__ import annotations

from sglang.srt.layers.ops.state.gated_delta import reference
from sglang.srt.utils.dispatch import Op

_HERE = "sglang.srt.layers.ops.state.gated_delta."

gated_delta_decode = Op(
    reference=reference.gated_delta_decode_ref,
    native=_HERE + "chunked:gated_delta_decode",
    triton=_HERE + "triton:gated_delta_decode",
    place="inputs.v",
)
gated_delta_prefill = Op(
    reference=reference.gated_delta_prefill_ref,
    native=_HERE + "chunked:gated_delta_prefill",
    triton=_HERE + "triton:gated_delta_prefill",
    place="inputs.v",
)
gated_delta_tree = Op(
    reference=reference.gated_delta_tree_ref,
    native=_HERE + "chunked:gated_delta_tree",
    triton=_HERE + "triton:gated_delta_tree",
    place="inputs.v",
)
gated_delta_commit = Op(
    reference=reference.gated_delta_commit_ref,
    native=_HERE + "chunked:gated_delta_commit",
    triton=_HERE + "triton:gated_delta_commit",
    place="state",
)

"""The op that draws a token per row from what filters leave of probabilities."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.sampling.ops import row_ops
from sglang.srt.sampling.ops.keep_prefix.op import Filters, keep_prefix_ref
from sglang.srt.sampling.ops.noise import uniform
from sglang.srt.utils.dispatch import Op


def draw_ref(
    probs: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return [R] int64, the first id whose cumulative probability exceeds
    `noise.uniform(seeds, positions)` times what `filters` leave of its row, and that:
    `keep_prefix`. May overwrite `probs`. Without `rows` nothing waits for the device.

    Never an id of probability 0, unless the row holds NaN or only zeros; then some id.

    Args:
        probs: [R, V] float32, contiguous, at least 0, not necessarily normalised unless
            its row is filtered.
        filters, seeds: of all rows; with `rows` of these.
        positions: [R] int64.
        rows: [P] int64, the rows to draw from, each once; negative for none. None for
            all.
        out: the ids; required with `rows`, and not written elsewhere.
    """
    if rows is None or out is None:
        row_ops.require_together(rows, out)
        kept = keep_prefix_ref(probs, filters)
        return row_ops.inverse_cdf(kept, uniform(seeds, positions)), kept
    taken = (rows >= 0).nonzero()[:, 0]
    at = rows[taken]
    if len(at) == 0:
        return out, probs
    out[at], probs[at] = draw_ref(
        probs[at], filters.select(taken), seeds=seeds[taken], positions=positions[at]
    )
    return out, probs


draw = Op(reference=draw_ref, triton="sglang.srt.sampling.ops.draw.triton:draw")

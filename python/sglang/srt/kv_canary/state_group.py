"""Recurrent states under the canary: one slot per row, overwritten by every forward.

```
row's slot     restored from a checkpoint | checked | folded on | noted
checkpoint              ... and noted inside a prefill, or copied after a decode step
```
The lineages are those of the primary group: a state is the fold of the tokens whose KV
lies there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.evidence import Owner
from kv_canary.layout import (
    NO_FINGERPRINT,
    LayerGroup,
    PoolLayout,
    create_fingerprint,
)
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import (
    KIND_MASK,
    SERIAL_BITS,
    Record,
    WriterKind,
    lineage_terms,
)
from kv_canary.runtime.uploads import upload
from kv_canary.state import CanaryState, create_state
from kv_canary.state_rows import StateRows
from kv_canary.state_sums import StateCells
from kv_canary.violation import pool_number
from sglang.srt.forward.context import get_forward_context
from sglang.srt.kv_canary.groups import EngineGroup
from sglang.srt.kv_canary.pool_patcher.api import FINGERPRINTS
from sglang.srt.kv_canary.runner.slot_pattern import PoolPattern
from sglang.srt.mem_cache.groups.state_slots import StateSlots
from sglang.srt.utils.vectors import padded_vectors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kv_canary.accepted import AcceptedPath
    from kv_canary.layout import Fingerprint
    from kv_canary.reporter import OwnerOf
    from kv_canary.view import ForwardView
    from sglang.srt.forward.state_plan import DueCheckpoints
    from sglang.srt.kv_canary.config import CanaryConfig
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.layers.state.forward import StateForward
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.state_pool import StatePool

_KIND = KIND_MASK << SERIAL_BITS
FREED = -(1 << 30)
"""Tokens folded into a state that was freed or never written: fewer than any request
can make up for."""


class StateCommits:
    """Comparison of the nodes that are folded into states with those that a
    verification accepted: rows, paths and lengths, by the memory they lie in.

    What a state holds cannot be told from its bytes, and the path of another row may be
    as long.
    """

    def __init__(self) -> None:
        self._folded: tuple[Tensor, ...] | None = None
        self._due: DueCheckpoints | None = None

    def begin(
        self, folded: tuple[Tensor, ...], due: DueCheckpoints | None = None
    ) -> None:
        """Note what is folded, and the checkpoints that are due."""
        self._folded, self._due = folded, due

    def end(self, accepted: tuple[Tensor, ...]) -> DueCheckpoints | None:
        """Compare it with what was accepted. Returns the checkpoints that were due.

        Raises:
            RuntimeError: something else was folded, or nothing.
        """
        folded, self._folded = self._folded, None
        if folded is None:
            raise RuntimeError(
                "KV canary: accepted nodes were not folded into recurrent states"
            )
        if any(map(_is_elsewhere, folded, accepted)):
            raise RuntimeError(
                "KV canary: other rows, paths or lengths were folded into recurrent "
                "states than the verification accepted"
            )
        return self._due


def _is_elsewhere(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are not the same elements of memory."""
    return (
        one.data_ptr() != other.data_ptr()
        or one.shape != other.shape
        or one.stride() != other.stride()
    )


def _check_trees(view: ForwardView, states: StateForward) -> None:
    """Compare the trees that states are read along with attention's, by their memory.

    Raises:
        RuntimeError: they are others, or chains.
    """
    if view.parent_index is None or view.tree_mask is None:
        return
    trees = states.trees
    if (
        trees is None
        or trees.parent_index.data_ptr() != view.parent_index.data_ptr()
        or trees.mask.data_ptr() != view.tree_mask.data_ptr()
    ):
        raise RuntimeError(
            "KV canary: recurrent states are read along other trees than attention's"
        )


class StateGroup(EngineGroup):
    """The state slots of one pool.

    Args:
        pool: the states.
        source: all of their bytes, for copies.
        primary: state of the group whose lineages the rows have.

    Attributes:
        commits: the nodes of verifications that are folded into them.
        slots: host records of checkpoints, or None if there are none.
    """

    name = StateSlots.name

    def __init__(
        self,
        *,
        state: CanaryState,
        checks: PoolChecks,
        pool: StatePool,
        source: Fingerprint,
        primary: CanaryState,
    ) -> None:
        super().__init__(state=state, checks=checks)
        self.pool = pool
        self.branch_checks = self.decode_checks = checks
        self._source = checks.fingerprint
        self._bytes = source
        self._primary = primary
        self._lineages = primary.expected_lineage
        self._num_rows = 0
        self.slots: StateSlots | None = None
        self.commits = StateCommits()
        self._rows: StateRows | None = None
        self._tracked: StateRows | None = None

    def listen(self, rows: ReqToTokenPool, slots: StateSlots | None) -> None:
        """Hear of slots that are freed."""
        self._num_rows, self.slots = rows.size, slots
        rows.register_on_free(self.free)
        if slots is not None:
            slots.register_on_free(self.free)

    def poison(self, slots: Tensor) -> None:
        super().poison(slots)
        if self.pool.marks is not None:
            self.pool.marks.index_fill_(0, slots, 0)
        # The last owner may have folded as many tokens as the next one will, and would
        # hide that the next one's are missing, or are folded onto its state.
        self.pool.folded.index_fill_(0, slots, FREED)

    def on_copy(self, dst: Tensor, src: Tensor) -> None:
        """Copy the records of slots `src` to `dst`, after the bytes. Whoever holds a
        copy need not have written it. If any of its bytes differ, its fingerprint is
        spoilt, and whoever reads it reports it."""
        self.move(dst, src)
        launches.mark_copied(self.state, dst)
        unlike = self._differs(dst, src)
        for records in (self.state.head, self.state.tail):
            records[dst, Record.FINGERPRINT] ^= unlike

    def _differs(self, dst: Tensor, src: Tensor) -> Tensor:
        """Return 1 for each slot of `dst` with other bytes than its source, else 0."""
        unlike = torch.zeros_like(dst)
        for words in self._bytes.strided_words():
            if words is not None:
                differs = words[:, dst] != words[:, src]
                unlike |= differs.any(dim=2).any(dim=0).long()
        return unlike

    # -- forwards ------------------------------------------------------------------

    def view(
        self, view: ForwardView, forwards: Mapping[str, WindowForward]
    ) -> ForwardView:
        states = get_forward_context().state
        assert states is not None, "a model with states runs without them"
        _check_trees(view, states)
        self._rows = StateRows(
            slots=states.slots,
            due_slots=view.req_rows,
            req_rows=view.req_rows,
            serials=view.serials,
            lengths=view.prefix_lens,
            lineages=self._lineages,
            folded=self.pool.folded,
            marks=self.pool.marks,
        )
        self._tracked = self._checkpoints(view, states)
        return view

    def before(
        self,
        view: ForwardView,
        checks: PoolChecks,
        *,
        verified: ForwardView | None = None,
        num_read: Sequence[int] | None = None,
    ) -> None:
        assert self._rows is not None
        assert verified is None, "a sample of requests is for stock engines"
        launches.check_states(self.state, self._rows, self._source)

    def after(
        self, view: ForwardView, *, advance: bool, findings: Tensor | None = None
    ) -> None:
        # They stay until the next forward: this may be the side stream, and the memory
        # of freed tensors goes to the model's stream at once.
        rows, tracked = self._rows, self._tracked
        assert rows is not None
        if view.writer_kind is WriterKind.VERIFY:
            # Nothing was written: the accepted nodes are folded later.
            launches.check_states(self.state, rows, self._source)
            nobody = dataclasses.replace(rows, lengths=torch.zeros_like(rows.lengths))
            self._note(nobody, view.writer_kind, ends_forward=True)
            return
        if tracked is not None:
            self._note(tracked, view.writer_kind, ends_forward=False)
        # By now the lineages are those of the prefixes with the new tokens.
        lengths = view.prefix_lens + view.extend_lens
        rows = dataclasses.replace(rows, lengths=lengths)
        self._note(rows, view.writer_kind, ends_forward=True)
        if findings is not None:
            launches.gather_into(self.state, view.req_rows, findings)

    def note_accepted(self, path: AcceptedPath, salts: Tensor) -> Tensor:
        """Record that the accepted nodes were folded, once the lineages have advanced
        over them; returns the findings, int64 [STATUS_WORDS + b].

        Raises:
            RuntimeError: other nodes were folded, or none.
        """
        due = self.commits.end((path.req_rows, path.accept_index, path.accept_lens))
        rows = StateRows(
            slots=path.req_rows,
            due_slots=path.req_rows,
            req_rows=path.req_rows,
            serials=path.serials,
            lengths=path.prefix_lens + path.accept_lens,
            lineages=self._lineages,
            folded=self.pool.folded,
            marks=self.pool.marks,
        )
        self._note(rows, WriterKind.VERIFY, ends_forward=False)
        if due is not None:
            reached = self._reached(due, path, salts)
            self._note(reached, WriterKind.VERIFY, ends_forward=False)
        return launches.gather_findings(self.state, path.req_rows)

    def _reached(
        self, due: DueCheckpoints, path: AcceptedPath, salts: Tensor
    ) -> StateRows:
        """Return the checkpoints that accepted paths reach, with their lineages: those
        of the rows without the tokens after them."""
        lens = due.path_lens(path.prefix_lens, path.accept_lens)
        view, width = path.rows(salts), path.width
        terms = lineage_terms(
            view.input_ids, view.positions, salts.repeat_interleave(width)
        )
        steps = torch.arange(width, device=lens.device)
        is_later = (steps >= lens[:, None]) & (steps < path.accept_lens[due.rows, None])
        later = terms.view(-1, width)[due.rows] * is_later
        is_reached = lens > 0
        slots, req_rows = due.slots.where(is_reached, 0), path.req_rows[due.rows]
        return StateRows(
            slots=slots,
            due_slots=slots,
            req_rows=req_rows.where(is_reached, 0),
            serials=path.serials[due.rows],
            lengths=due.ends,
            lineages=self._lineages[req_rows] - later.sum(1),
            folded=self.pool.folded,
            lineage_rows=torch.arange(len(slots), device=slots.device),
        )

    def _note(self, rows: StateRows, kind: WriterKind, *, ends_forward: bool) -> None:
        launches.note_states(
            self.state, rows, self._source, kind=kind, ends_forward=ends_forward
        )

    def _checkpoints(self, view: ForwardView, states: StateForward) -> StateRows | None:
        """Return the checkpoints that the model takes inside a prefill, with their
        lineages."""
        tracks = states.tracks
        if tracks is None:
            return None
        assert view.qo_indptr is not None
        begins, ends = view.qo_indptr[:-1], view.qo_indptr[1:]
        index = torch.arange(view.num_tokens, device=ends.device)
        row = torch.searchsorted(ends, index, right=True).clamp_(max=view.num_rows - 1)
        terms = lineage_terms(view.input_ids, view.positions, view.salts[row])
        sums = torch.cat((torch.zeros_like(terms[:1]), terms.cumsum(0)))
        known = self._lineages[view.req_rows]
        base = known.where(view.prefix_lens > 0, 0) - sums[begins]
        lineages = base[:, None] + sums[begins[:, None] + tracks.lens]
        slots = tracks.slots.where(tracks.lens > 0, 0).flatten()
        each = tracks.lens.shape[1]
        return StateRows(
            slots=slots,
            due_slots=slots,
            req_rows=view.req_rows.repeat_interleave(each),
            serials=view.serials.repeat_interleave(each),
            lengths=(view.prefix_lens[:, None] + tracks.lens).flatten(),
            lineages=lineages.flatten(),
            folded=self.pool.folded,
            lineage_rows=torch.arange(len(slots), device=slots.device),
        )

    # -- checkpoints of the prefix cache -------------------------------------------

    def sweep(self, checkpoints: npt.NDArray[np.int64]) -> None:
        """Compare checkpoints with the ends of their runs, on the current stream.

        Args:
            checkpoints: [3, N] on the host: their slots, the tokens before them, and
                the primary slot of the last of these.
        """
        words = torch.from_numpy(padded_vectors(checkpoints))
        count = checkpoints.shape[1]
        slots, lengths, last = upload(words, self.pool.conv.device)[:, :count].unbind()
        # Any rows but 0: they belong to no request.
        rows = torch.arange(1, count + 1, device=slots.device)
        lineages = self._primary.tail[last, Record.LINEAGE]
        for states, kept in self.pool.with_sums():
            assert self.pool.marks is not None
            launches.compare_states(states, kept, self.pool.marks, slots)
        launches.sweep_states(
            self.state,
            StateRows(
                slots=slots,
                due_slots=slots,
                req_rows=rows,
                serials=torch.zeros_like(slots),
                lengths=lengths,
                lineages=torch.cat((lineages[:1], lineages)),
                # Not compared, but other arguments would be another kernel.
                folded=self.pool.folded,
                marks=self.pool.marks,
            ),
            self._source,
        )

    def checkpoint(self, slot: int) -> int:
        """Return a slot that is a checkpoint's, or 0 for a row's."""
        return slot if slot > self._num_rows else 0

    def pattern(self) -> PoolPattern:
        """Return a pattern for slots that nobody holds."""
        return PoolPattern(
            self.state, [own.transpose(0, 1) for own in self.pool.bytes()]
        )

    # -- reports -------------------------------------------------------------------

    def where_not_finite(self, req_row: int) -> dict[str, int]:
        """The first layer with a NaN or infinity in the row's state; the head, too, if
        the convolution before it holds none."""
        for layer_id in self.pool.shape.layers:
            layer = self.pool.layer(layer_id)
            if not layer.conv[req_row].isfinite().all():
                return {"state_layer": layer_id}
            if layer.matrix is not None:
                bad = ~layer.matrix[req_row].isfinite().flatten(1).all(dim=1)
                for head in bad.nonzero().flatten().tolist():
                    return {"state_layer": layer_id, "state_head": head}
        return {}

    def primary_slot(self, slot: int) -> int:
        return -1

    def owner_of(self, primary: OwnerOf) -> OwnerOf:
        def owner(slot: int) -> Owner:
            is_row = slot <= self._num_rows
            return Owner(f"request row {slot}" if is_row else "a checkpoint")

        return owner


def create_state_group(
    pool: StatePool,
    config: CanaryConfig,
    *,
    req_rows: int,
    primary: CanaryState,
) -> StateGroup:
    """Make records for every slot of `pool`; from now on they are copied with it.

    Raises:
        ValueError: bytes that cannot be fingerprinted.
    """
    layout = _layout_of(pool)
    try:
        source = create_fingerprint(FINGERPRINTS[config.real_data], layout)
    except ValueError as error:
        raise ValueError(f"{error}. Use --kv-canary-real-data none") from error
    state = create_state(
        num_slots=layout.num_slots,
        req_rows=req_rows,
        ring_capacity=config.ring_capacity,
        num_managers=1,
        device=layout.device,
        pool=pool_number(is_draft=False, group=StateSlots.name),
    )
    group = StateGroup(
        state=state,
        checks=PoolChecks(
            fingerprint=NO_FINGERPRINT if config.covers_all_bytes else source
        ),
        pool=pool,
        source=source,
        primary=primary,
    )
    pool.register_on_copy(group.on_copy)
    pool.folded.fill_(FREED)
    if config.covers_all_bytes:
        matrix = pool.matrix
        pool.keep_sums(
            conv_cells=StateCells.of(pool.conv[:, 0]).number,
            matrix_cells=0 if matrix is None else StateCells.of(matrix[:, 0]).number,
        )
    return group


def _layout_of(pool: StatePool) -> PoolLayout:
    """Return layers before slots: the inputs of convolutions and, as the other half,
    the matrices."""
    conv = pool.conv.transpose(0, 1).flatten(2)
    matrix = None if pool.matrix is None else pool.matrix.transpose(0, 1).flatten(2)
    layers = LayerGroup(name=StateSlots.name, k=conv, v=matrix)
    return PoolLayout(groups=(layers,), page_size=1)

"""A batch of requests as the scheduler keeps it: lengths on the host, tensors on the
device.

`prepare_for_extend` and `prepare_for_decode` take slots and write the rows;
`forward_batch` then describes the forward. Knows nothing about queues or policies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.forward.adapter_tiles import AdapterTiles, plan_tiles
from sglang.srt.forward.batch import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    HostLens,
    InputEmbeds,
    InputLogprobSpan,
)
from sglang.srt.forward.state_plan import StatePlan
from sglang.srt.managers.batch.state_plans import PrefillSpan
from sglang.srt.mem_cache.common import extend_rows, release_unread
from sglang.srt.sampling.logprobs import LogprobRequest
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.salt_chain import Namespace, lineage_salt
from sglang.srt.utils.vectors import padded_vectors

if TYPE_CHECKING:
    from sglang.srt.configs.draft_layout import TreeShape
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.managers.batch.state_plans import StatePlanner
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.page_ledger import IntArray


class AdapterSlots(Protocol):
    """Where the adapters of requests lie while they run: `lora.pool.AdapterPool`.

    Attributes:
        num_slots: adapters of one batch, at most.
    """

    num_slots: int

    def hold(self, revisions: Collection[str]) -> None:
        """Put these adapters into slots, where they stay until the next call."""

    def slots_of(self, revisions: Sequence[str | None]) -> IntArray:
        """Return the slot of each adapter, 0 for None."""

    def revisions_in(self, slots: IntArray) -> list[str | None]:
        """Return the adapter in each slot, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEnvironment:
    """Constants that every batch of a scheduler shares.

    Fields:
        decode_reserve: KV slots that a speculative iteration needs beyond the known
            ones, or 0 if each decode step takes one slot. decode_spare: of these, the
            ones that it can do without.
        drafts_on_host: whether drafts are made from the tokens that the host has.
        max_ahead: tokens by which a decode step on the device may be ahead of the host,
            those that it gains included; 0 without speculation.
        draft_lead: as `DraftKind.lead`.
        max_behind: tokens that the draft's KV of a request may lack, beyond which it
            must catch up; 0 without plain steps, or if drafts have no KV.
        drafts_lapse: whether it then lapses instead, and the request must be prefilled
            again before it drafts.
        shape: shape of drafts, unless something else is chosen for an iteration. None
            without speculation.
        states: plans the checkpoints of recurrent state, if the cache keeps any.
        adapters: slots of adapters, or None without adapters.
    """

    cache: BasePrefixCache
    vocab_size: int
    needs_host_lens: bool
    decode_reserve: int = 0
    decode_spare: int = 0
    drafts_on_host: bool = False
    max_ahead: int = 0
    draft_lead: int = 0
    max_behind: int = 0
    drafts_lapse: bool = False
    shape: TreeShape | None = None
    states: StatePlanner | None = None
    adapters: AdapterSlots | None = None

    def needs_results(self, shape: TreeShape | None) -> bool:
        """Whether a decode step with drafts of this shape depends on the results before
        it: its metadata on the lengths that a verification decides, or its drafts on
        the tokens."""
        if self.decode_reserve and self.needs_host_lens:
            return True
        return self.drafts_on_host and shape is not None

    def has_lapsed(self, req: Req) -> bool:
        """Whether the states that the draft would need to catch up are gone."""
        return req.behind > self.max_behind > 0

    @property
    def device(self) -> torch.device:
        return self.cache.req_to_token_pool.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """A snapshot of a launched batch; the batch itself keeps changing.

    Fields:
        reqs: rows of the forward.
        is_speculative: whether this is a decode step whose result decides the lengths.
        shape: shape of the drafts that it verifies, or None without any.
        is_chunked: rows whose prompt continues after this forward; they sampled
            nothing.
        logprob_reqs: requests whose logprobs the result holds, in order.
        starts, ends: int64 [R] on the host; tokens with KV before and after the
            forward.
        caught_up: tokens of all rows that the draft computes before the forward.
        dropped: serials of requests that no longer use this forward's result.
    """

    reqs: tuple[Req, ...]
    is_decode: bool
    is_speculative: bool
    shape: TreeShape | None
    is_chunked: tuple[bool, ...]
    has_grammar: bool
    logprob_reqs: tuple[Req, ...]
    starts: IntArray
    ends: IntArray
    caught_up: int = 0
    dropped: set[int] = field(default_factory=set)

    def live_rows(self) -> list[int]:
        """Rows whose requests still use the result."""
        dropped = self.dropped
        return [
            row
            for row, req in enumerate(self.reqs)
            if not (req.is_finished or (dropped and req.serial in dropped))
        ]

    def before_result(self) -> StepStart:
        """Return the state of the requests before the result is processed."""
        return StepStart(
            live=frozenset(self.live_rows()),
            lengths=[len(req.tokens) for req in self.reqs],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """The requests of a step before its result is processed.

    Fields:
        live: rows whose requests use the result.
        lengths: number of tokens of each request.
    """

    live: frozenset[int]
    lengths: list[int]


class ScheduleBatch:
    """Requests that run together.

    Attributes:
        reqs: the requests in row order.
        seq_lens_cpu: int64 [R], tokens with KV once the prepared forward has run.
        req_pool_indices_cpu: int64 [R], rows of `req_to_token`.
        serials: int64 [R] on the host; replaced, never changed.
        salts: under which a forward writes, one per row.
        seq_lens, req_pool_indices: the same on the device.
        sampling_info: sampling parameters of the requests, without grammar masks.
        state_plan: copies and checkpoints of recurrent state in the prepared forward.
        shape: shape of the drafts of the next decode step, or None for plain decoding.
        catch_up: int64 [R], tokens of each row that the draft's KV lacks and that are
            computed before this step drafts, or after this prefill; None if nothing is.
    """

    def __init__(self, reqs: list[Req], env: BatchEnvironment) -> None:
        self.env = env
        self.forward_mode = ForwardMode.DECODE
        self.reqs = reqs
        self.req_pool_indices_cpu: IntArray = np.fromiter(
            (r.req_pool_idx for r in reqs), np.int64
        )
        self.seq_lens_cpu: IntArray = np.fromiter(
            (r.committed_len for r in reqs), np.int64
        )
        self._rebuild_device_state()
        # Filled by prepare_for_*, for `forward_batch`.
        self._out_cache_loc = torch.empty(0, dtype=torch.int64)
        self._prefix_lens: IntArray = self.seq_lens_cpu
        self._num_decodes = 0
        self.shape = env.shape
        self.catch_up: IntArray | None = None
        self._prefix_lens_device = self.seq_lens
        self.state_plan: StatePlan | None = None

    def __len__(self) -> int:
        return len(self.reqs)

    def _rebuild_device_state(self) -> None:
        env = self.env
        self.req_pool_indices = self.upload(self.req_pool_indices_cpu)
        self.seq_lens = self.upload(self.seq_lens_cpu)
        self._adapter_slots = self._find_adapter_slots()
        self.salts = self._find_salts()
        identity = np.array(
            [
                [r.serial for r in self.reqs],
                self.salts,
                [r.rid_hash for r in self.reqs],
            ],
            dtype=np.int64,
        )
        self.serials: IntArray = identity[0]
        self._identity = self._upload_vectors(identity)
        self.sampling_info = SamplingBatchInfo.from_rows(
            [r.sampling_row for r in self.reqs],
            vocab_size=env.vocab_size,
            device=env.device,
        )
        self._decode_tiles = self.adapter_tiles(1)
        asking = [i for i, r in enumerate(self.reqs) if r.logprobs.is_wanted]
        self.logprob_request: LogprobRequest | None = None
        self.logprob_reqs = tuple(self.reqs[i] for i in asking)
        if asking:
            self.logprob_request = LogprobRequest.build(
                asking,
                [req.logprobs.top_num for req in self.logprob_reqs],
                named=[req.logprobs.token_ids for req in self.logprob_reqs],
                device=env.device,
            )
        self.has_grammar = any(r.grammar is not None for r in self.reqs)
        self.wants_hidden_states = any(r.hidden.are_wanted for r in self.reqs)

    def _find_adapter_slots(self) -> IntArray | None:
        """int64 [R], the slot of each row's adapter, or None if no row has one."""
        adapters = [r.running_adapter for r in self.reqs]
        slots = self.env.adapters
        return slots.slots_of(adapters) if slots is not None and any(adapters) else None

    def _find_salts(self) -> list[int]:
        """The salt of each row's lineages. A forward records what it computes with: a
        row whose slot holds another adapter does not get its own salt."""
        slots = self.env.adapters
        if slots is None or self._adapter_slots is None:
            return [r.salt for r in self.reqs]
        held = slots.revisions_in(self._adapter_slots)
        return [
            r.salt
            if revision == r.running_adapter
            else lineage_salt(Namespace(None, "", revision or "").name)
            for r, revision in zip(self.reqs, held, strict=True)
        ]

    def adapter_tiles(self, lens: IntArray | int) -> AdapterTiles | None:
        """The tiles of a forward with `lens` new tokens per row, or None if no row has
        an adapter."""
        if self._adapter_slots is None:
            return None
        words = plan_tiles(self._adapter_slots, lens)
        if words is None:
            return None
        if self.env.device.type == "cpu":
            return AdapterTiles.on_cpu(words)
        slots = frozenset(self._adapter_slots.tolist()) - {0}
        return AdapterTiles(words=self.upload(words), slots_read=slots)

    def upload(
        self, array: IntArray | npt.NDArray[np.float32] | npt.NDArray[np.int32]
    ) -> torch.Tensor:
        """Copy an array to the device, without waiting."""
        host = torch.from_numpy(array.copy())
        if self.env.device.type == "cpu":
            return host
        return host.pin_memory().to(self.env.device, non_blocking=True)

    def _upload_vectors(self, vectors: IntArray) -> torch.Tensor:
        """Upload int64 [n, length] at once, padded as in `padded_vectors`."""
        return self.upload(padded_vectors(vectors))[:, : vectors.shape[1]]

    # -- composition ---------------------------------------------------------------

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the requests at these indices, in this order."""
        if list(keep) != list(range(len(self.reqs))):
            self._take(keep)

    def filter_decoding(self) -> None:
        """Keep the requests that continue to decode.

        A request that ends by length in a forward still in flight is already known to
        end.
        """
        self.filter([i for i, r in enumerate(self.reqs) if r.decodes_on])

    def sort_for_decode(self) -> None:
        """Sort longest first: a GPU starts thread blocks in row order, so with short
        rows last no multiprocessor is left alone with a long one.
        """
        self.filter(self._longest_first())

    def merge(self, other: ScheduleBatch) -> None:
        """Add the requests of `other`; all of them then decode, longest first."""
        self.reqs = self.reqs + other.reqs
        self.req_pool_indices_cpu = np.concatenate(
            [self.req_pool_indices_cpu, other.req_pool_indices_cpu]
        )
        self.seq_lens_cpu = np.concatenate([self.seq_lens_cpu, other.seq_lens_cpu])
        self._take(self._longest_first())

    def _longest_first(self) -> list[int]:
        order: list[int] = np.argsort(-self.seq_lens_cpu, kind="stable").tolist()
        return order

    def _take(self, indices: Sequence[int]) -> None:
        self.reqs = [self.reqs[i] for i in indices]
        self.req_pool_indices_cpu, self.seq_lens_cpu = (
            self.req_pool_indices_cpu[list(indices)],
            self.seq_lens_cpu[list(indices)],
        )
        self._rebuild_device_state()

    # -- memory --------------------------------------------------------------------

    @classmethod
    def prepare_for_extend(
        cls, reqs: list[Req], extend_lens: Sequence[int], env: BatchEnvironment
    ) -> ScheduleBatch | None:
        """Return a batch that prefills the next `extend_lens` tokens of each request.

        New requests (row 0) get a row, with their cached prefix and all their tokens.

        Returns:
            None if there are not enough slots; nothing is taken then.

        Raises:
            RuntimeError: a request has no token to prefill, so nothing would yield its
                next token.
        """
        for req, length in zip(reqs, extend_lens, strict=True):
            if length < 1:
                raise RuntimeError(
                    f"request {req.rid} was scheduled to prefill {length} tokens after "
                    f"{req.committed_len} of {len(req.tokens)}"
                )
        cache, pool = env.cache, env.cache.req_to_token_pool
        new = [r for r in reqs if r.req_pool_idx == 0]
        rows = pool.alloc(len(new))
        if rows is None:
            return None
        for req, row in zip(new, rows, strict=True):
            req.req_pool_idx = row
            req.committed_len = req.allocated_len = req.cache_protected_len
        pool.write_rows(rows, [req.prefix_slots.numpy() for req in new])
        release_unread(cache, reqs)
        batch = cls(reqs, env)
        batch.forward_mode = ForwardMode.EXTEND
        ends = batch.seq_lens_cpu + np.asarray(extend_lens, dtype=np.int64)
        slots = extend_rows(
            cache,
            rows=batch.req_pool_indices_cpu,
            prefix_lens=batch.seq_lens_cpu,
            seq_lens=ends,
        )
        if slots is None:
            pool.free(rows)
            for req in new:
                req.req_pool_idx = 0
            return None
        pool.write_token_rows(
            rows, [req.device_tokens(0, len(req.tokens)) for req in new]
        )
        batch._advance(slots, ends)
        batch._plan_prefill(new)
        return batch

    @classmethod
    def prepare_for_refill(
        cls, reqs: list[Req], extend_lens: Sequence[int], env: BatchEnvironment
    ) -> ScheduleBatch:
        """Return a batch that prefills the next `extend_lens` tokens of each request
        into the slots already in its row; takes no slots.
        """
        batch = cls(reqs, env)
        batch.forward_mode = ForwardMode.EXTEND
        starts = batch.seq_lens_cpu
        ends = starts + np.asarray(extend_lens, dtype=np.int64)
        pool = env.cache.req_to_token_pool
        slots = [
            pool.row_slots(req.req_pool_idx, int(start), int(end))
            for req, start, end in zip(reqs, starts, ends, strict=True)
        ]
        allocated = [req.allocated_len for req in reqs]
        batch._advance(torch.cat(slots).to(env.device), ends)
        for req, length in zip(reqs, allocated, strict=True):
            req.allocated_len = length
        batch.plan_catch_up()
        return batch

    def prepare_for_decode(self) -> bool:
        """Take the slots for one decode step. Returns False and takes nothing if there
        are not enough even after eviction.
        """
        self.forward_mode = ForwardMode.DECODE
        self._update_groups()
        if self.env.decode_reserve:
            return self._prepare_for_speculation()
        ends = self.seq_lens_cpu + 1
        slots = extend_rows(
            self.env.cache,
            rows=self.req_pool_indices_cpu,
            prefix_lens=self.seq_lens_cpu,
            seq_lens=ends,
        )
        if slots is None:
            return False
        self._advance(slots, ends)
        states = self.env.states
        if states is not None:
            self.state_plan = states.for_decode(self.reqs, ends, self.upload)
        return True

    def _plan_prefill(self, new: Sequence[Req]) -> None:
        """Decide the checkpoints of a prefill; the rows of `new` requests hold no state
        yet."""
        states = self.env.states
        if states is None:
            return
        first = {req.serial for req in new}
        starts, ends = self._prefix_lens.tolist(), self.seq_lens_cpu.tolist()
        self.state_plan = states.for_prefill(
            [
                PrefillSpan(
                    req=req,
                    start=start,
                    end=end,
                    is_new=req.serial in first,
                    is_last=not req.is_chunked,
                )
                for req, start, end in zip(self.reqs, starts, ends, strict=True)
            ],
            self.upload,
        )

    def _update_groups(self) -> None:
        """Periodically free secondary-group slots that no token reads any more, and
        publish what changed.
        """
        groups = self.env.cache.allocator.secondary
        if not groups:
            return
        self._num_decodes += 1
        release_unread(self.env.cache, self.reqs, step=self._num_decodes)
        for group in groups:
            group.sync()

    def _prepare_for_speculation(self) -> bool:
        """Take the slots for a speculative step. Only the device knows its length;
        `seq_lens_cpu` counts the known tokens.
        """
        reqs = self.reqs
        committed = np.fromiter((r.committed_len for r in reqs), np.int64)
        held = np.fromiter((r.allocated_len for r in reqs), np.int64)
        allocated = EagleDraftInput.prepare_for_decode(
            self.env.cache,
            req_pool_indices=self.req_pool_indices_cpu,
            committed=committed,
            allocated=held,
            reserve=self.env.decode_reserve,
            spare=self.env.decode_spare,
        )
        if allocated is None:
            return False
        self.seq_lens_cpu = self._prefix_lens = committed
        for req, end in zip(reqs, allocated.tolist(), strict=True):
            req.allocated_len = end
        states = self.env.states
        if states is not None:
            upload = self._upload_vectors
            self.state_plan = states.for_verification(reqs, committed, upload)
        self.catch_up = None
        env, is_plain = self.env, self.shape is None
        if not is_plain or (
            not env.drafts_lapse and max(r.behind for r in reqs) >= env.max_behind
        ):
            self.plan_catch_up()
        if is_plain and env.max_behind:
            for req in reqs:
                req.set_behind(req.behind + 1, lead=env.draft_lead)
        return True

    def plan_catch_up(self) -> None:
        """Let the draft compute what its KV lacks of rows that hold the slots for it: a
        prefill takes slots for its own tokens only."""
        behind = [
            0 if r.is_chunked or r.allocated_len <= r.committed_len else r.behind
            for r in self.reqs
        ]
        self.catch_up = np.array(behind, dtype=np.int64) if any(behind) else None
        for req, tokens in zip(self.reqs, behind, strict=True):
            req.set_behind(req.behind - tokens, lead=self.env.draft_lead)

    def identity(self) -> torch.Tensor:
        """int64 [4, R] on the device, the fields of `RowIdentity`."""
        return torch.cat((self.req_pool_indices[None], self._identity))

    def gather_identity(self, rows: IntArray) -> torch.Tensor:
        """The identity of these rows, [4, len(rows)]."""
        return self.identity().index_select(1, self.upload(rows))

    def known_lens(self) -> list[int] | None:
        """Tokens with KV, if attention needs them on the host; exact only while no
        result is in flight.
        """
        return self.seq_lens_cpu.tolist() if self.env.needs_host_lens else None

    def _advance(self, slots: torch.Tensor, ends: IntArray) -> None:
        self._out_cache_loc = slots
        self._prefix_lens, self.seq_lens_cpu = self.seq_lens_cpu, ends
        self._prefix_lens_device = self.seq_lens
        if self.forward_mode.is_decode:
            self.seq_lens = self.seq_lens + 1
        else:
            self.seq_lens = self.upload(ends)
        lead = self.env.draft_lead
        for req, end in zip(self.reqs, ends.tolist(), strict=True):
            req.committed_len = req.allocated_len = end
            req.set_behind(lead, lead=lead)

    # -- the forward ---------------------------------------------------------------

    def forward_batch(
        self,
        sampling_info: SamplingBatchInfo,
        *,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    ) -> ForwardBatch:
        """The prepared forward.

        Args:
            sampling_info: the batch's sampling info, possibly with this step's grammar
                masks.
            capture_hidden_mode: hidden states that the worker needs even if no request
                asks for them.
        """
        if self.forward_mode.is_decode:
            return self._decode_forward_batch(sampling_info, capture_hidden_mode)
        return self._extend_forward_batch(sampling_info, capture_hidden_mode)

    @property
    def ahead(self) -> int:
        """Tokens that the device may have beyond `seq_lens_cpu`, at most."""
        return self.env.max_ahead if self.forward_mode.is_decode else 0

    def token_history(self) -> TokenHistory | None:
        """Tokens of each row, if a penalty needs them."""
        if not self.sampling_info.has_penalty:
            return None
        return TokenHistory(
            token_table=self.env.cache.req_to_token_pool.token_table,
            req_pool_indices=self.req_pool_indices,
            lens=self.seq_lens,
            max_len=int(self.seq_lens_cpu.max()) + self.ahead,
        )

    def place_on_device(self, lens: torch.Tensor) -> None:
        """Place a plain step where only the device knows the lengths, in slots that the
        rows hold already.

        Args:
            lens: int64, tokens with KV of each request row.
        """
        rows, pool = self.req_pool_indices, self.env.cache.req_to_token_pool
        if lens.device.type == "cpu":
            # The same in fewer and smaller calls.
            host_rows = self.req_pool_indices_cpu
            ends = lens.numpy()[host_rows] + 1
            starts, self.seq_lens = torch.from_numpy(ends - 1), torch.from_numpy(ends)
            self._out_cache_loc = pool.last_locs(host_rows, ends)
        else:
            starts = lens.index_select(0, rows)
            self.seq_lens = starts + 1
            self._out_cache_loc = pool.req_to_token[rows, starts].long()
        self._prefix_lens_device = starts
        if self.state_plan is not None and self.state_plan.due is not None:
            due, one = self.state_plan.due, torch.ones_like(starts)
            save = due.copies(rows, due.path_lens(starts, one))
            self.state_plan = StatePlan(save=save)

    def _decode_forward_batch(
        self, sampling_info: SamplingBatchInfo, hidden_mode: CaptureHiddenMode
    ) -> ForwardBatch:
        positions = self._prefix_lens_device
        table = self.env.cache.req_to_token_pool.token_table
        serial, salt, rids_int = self._identity.unbind()
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=table[self.req_pool_indices, positions].long(),
            positions=positions,
            out_cache_loc=self._out_cache_loc,
            req_pool_indices=self.req_pool_indices,
            prefix_lens=positions,
            extend_lens=_ones(len(self.reqs), self.env.device),
            seq_lens=self.seq_lens,
            req_serial=serial,
            salt=salt,
            rids_int=rids_int,
            lens_cpu=self._host_lens(),
            state_plan=self.state_plan,
            adapters=self._decode_tiles,
            capture_hidden_mode=hidden_mode
            or self._capture_mode(CaptureHiddenMode.LAST),
            sampling_info=sampling_info,
        )

    def _extend_forward_batch(
        self, sampling_info: SamplingBatchInfo, hidden_mode: CaptureHiddenMode
    ) -> ForwardBatch:
        starts, ends = self._prefix_lens.tolist(), self.seq_lens_cpu.tolist()
        spans = list(zip(self.reqs, starts, ends, strict=True))
        # [input ids | positions] in one upload.
        tokens = np.concatenate(
            [req.device_tokens(start, end) for req, start, end in spans]
            + [np.arange(start, end, dtype=np.int64) for _, start, end in spans]
        )
        ids, positions = self._upload_vectors(tokens.reshape(2, -1)).unbind()
        extend_lens = self.seq_lens_cpu - self._prefix_lens
        qo_indptr = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum(extend_lens, out=qo_indptr[1:])
        serial, salt, rids_int = self._identity.unbind()
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=ids,
            positions=positions,
            out_cache_loc=self._out_cache_loc,
            req_pool_indices=self.req_pool_indices,
            prefix_lens=self._prefix_lens_device,
            extend_lens=self.upload(extend_lens),
            seq_lens=self.seq_lens,
            req_serial=serial,
            salt=salt,
            rids_int=rids_int,
            qo_indptr=self.upload(qo_indptr),
            lens_cpu=HostLens(prefix_lens=starts, extend_lens=extend_lens.tolist()),
            logits_rows=self.upload(qo_indptr[1:] - 1),
            input_logprobs=_input_logprob_spans(spans),
            input_embeds=self.input_embeds(),
            state_plan=self.state_plan,
            adapters=self.adapter_tiles(extend_lens),
            capture_hidden_mode=hidden_mode
            or self._capture_mode(CaptureHiddenMode.FULL),
            sampling_info=sampling_info,
        )

    def input_embeds(self, *, ahead: int = 0) -> InputEmbeds | None:
        """Return the embeddings that requests supplied for the prepared prefill, or
        None. A retracted request's output is also new, but consists of tokens.

        Args:
            ahead: 1 for a head, which reads the token after each position.
        """
        rows, values, offset = [], [], 0
        starts, ends = self._prefix_lens.tolist(), self.seq_lens_cpu.tolist()
        for req, start, end in zip(self.reqs, starts, ends, strict=True):
            embeds = req.input_embeds
            if embeds is not None and start + ahead < len(embeds.values):
                given = embeds.values[start + ahead : end + ahead]
                values.append(given)
                rows.append(np.arange(offset, offset + len(given), dtype=np.int64))
            offset += end - start
        if not rows:
            return None
        return InputEmbeds(
            rows=self.upload(np.concatenate(rows)),
            values=self.upload(np.concatenate(values)),
        )

    def prefix_lens(self) -> list[int]:
        """Number of tokens per request that have KV before the prepared prefill."""
        lens: list[int] = self._prefix_lens.tolist()
        return lens

    def _host_lens(self) -> HostLens | None:
        if not self.env.needs_host_lens:
            return None
        return HostLens(
            prefix_lens=self._prefix_lens.tolist(),
            extend_lens=(self.seq_lens_cpu - self._prefix_lens).tolist(),
        )

    def _capture_mode(self, wanted: CaptureHiddenMode) -> CaptureHiddenMode:
        return wanted if self.wants_hidden_states else CaptureHiddenMode.NULL

    def record(self) -> LaunchRecord:
        """Return a snapshot of the prepared batch for processing its result."""
        return LaunchRecord(
            reqs=tuple(self.reqs),
            is_decode=self.forward_mode.is_decode,
            is_speculative=self.forward_mode.is_decode
            and bool(self.env.decode_reserve),
            shape=self.shape if self.forward_mode.is_decode else None,
            is_chunked=tuple(r.is_chunked for r in self.reqs),
            has_grammar=self.has_grammar,
            logprob_reqs=self.logprob_reqs,
            starts=self._prefix_lens,
            ends=self.seq_lens_cpu,
            caught_up=0 if self.catch_up is None else int(self.catch_up.sum()),
        )

    def sampled_rows(self) -> torch.Tensor | None:
        """Indices of the rows whose sampled token counts, or None if all do.

        A chunk that does not reach the end of its prompt samples nothing.
        """
        if not any(r.is_chunked for r in self.reqs):
            return None
        rows = [i for i, r in enumerate(self.reqs) if not r.is_chunked]
        return self.upload(np.array(rows, dtype=np.int64))


def _input_logprob_spans(
    spans: Sequence[tuple[Req, int, int]],
) -> tuple[InputLogprobSpan, ...]:
    """Prompt positions of this forward whose logits score the next prompt token."""
    found = []
    for row, (req, start, end) in enumerate(spans):
        if req.logprobs.score_from is None:
            continue
        first, last = max(req.logprobs.score_from, start), min(end, req.prompt_len - 1)
        if first < last:
            found.append(
                InputLogprobSpan(
                    row=row,
                    start=first - start,
                    stop=last - start,
                    next_tokens=list(req.tokens[first + 1 : last + 1]),
                    top_k=req.logprobs.top_num,
                    named=req.logprobs.token_ids,
                )
            )
    return tuple(found)


@lru_cache(maxsize=512)
def _ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, dtype=torch.int64, device=device)

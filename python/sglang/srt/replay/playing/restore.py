"""Puts an unused scheduler into the state where a record begins.

Restores queues, rows, pages and prefix tree; recomputes KV and records by prefilling
the same tokens into the same slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.forward.state_plan import StateCopies, StatePlan
from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.batch.req_parts import PromptEmbeds
from sglang.srt.managers.batch.saved_req import SavedReq, load_req
from sglang.srt.managers.batch.schedule_batch import ScheduleBatch
from sglang.srt.managers.messages.io_struct import GenerateReq, LoraRef
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.salt_chain import FIRST_CONTENT_ID, Namespace

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.mem_cache.tree_node import TreeNode
    from sglang.srt.replay.recording.record_file import Checkpoint

_TOKEN_BITS = 32
_SCRATCH_ROW = 1


def restore(
    scheduler: Scheduler, checkpoint: Checkpoint, create: Callable[[int], Req]
) -> None:
    """Let `scheduler` continue from `checkpoint`.

    Args:
        create: creates the request with a saved serial, with its prompt and all of its
            output, known to the scheduler but not queued.

    Raises:
        ValueError: the checkpoint does not fit this scheduler.
        RuntimeError: the canary found violations in the recomputed KV.
    """
    cache, managers = scheduler.cache, scheduler.worker.canary_managers()
    if len(checkpoint.canaries) != len(managers):
        raise ValueError(
            f"{len(checkpoint.canaries)} pools recorded, {len(managers)} here"
        )
    cache.allocator.load(checkpoint.free_pages)
    cache.req_to_token_pool.load_rows(checkpoint.free_rows)
    nodes = cache.load(checkpoint.tree)
    if (cache.checkpoints is None) != (checkpoint.states is None):
        raise ValueError("checkpoints of recurrent state are recorded, or here, alone")
    if cache.checkpoints is not None and checkpoint.states is not None:
        cache.checkpoints.load(checkpoint.states, nodes)
    refill = _Refill(scheduler)
    reqs: dict[int, Req] = {}
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager.setting_up())
        refill.paths(nodes)
        for saved in checkpoint.reqs:
            req = create(saved.serial)
            del req.tokens[saved.num_tokens :]
            if req.stop_matcher is not None:
                req.stop_matcher = req.stop_matcher.at(req.output_tokens())
            req.sampling_row = replace(req.sampling_row, seed=saved.seed)
            if saved.row:
                refill.request(req, saved)
            node = cache.root if saved.run < 0 else nodes[saved.run]
            load_req(req, saved, node=node)
            if cache.checkpoints is not None and saved.states is not None:
                slots = [group.slots for group in cache.groups]
                req.holds = tuple(own.hold(saved.protected) for own in slots)
                cache.checkpoints.hold_of(req.holds).load(saved.states)
            reqs[saved.serial] = req
    for manager, canary in zip(managers, checkpoint.canaries, strict=True):
        manager.load(canary)
    scheduler.restore(checkpoint, reqs)


class _Refill:
    """Prefills into already assigned slots, a chunk at a time.

    A recurrent state is the fold of everything before it, so with such states every
    prefill begins at position 0, and what it shares is written again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rows = scheduler.cache.req_to_token_pool
        self._bigram = scheduler.cache.bigram
        self._checkpoints = scheduler.cache.checkpoints
        self._has_states = scheduler.worker.model_runner.state_pool is not None
        size = scheduler.server_args.chunked_prefill_size or 0
        self._chunk = size if size > 0 else self._rows.context_len

    def paths(self, nodes: Sequence[TreeNode]) -> None:
        """Refill everything in the tree, each run once."""
        done: set[int] = set()
        for node in nodes:
            if node.children:
                continue
            path = [node]
            while path[-1].start:
                above = path[-1].parent
                assert above is not None
                path.append(above)
            path.reverse()
            begin = next((n.start for n in path if id(n) not in done), None)
            assert begin is not None
            saves = {
                n.end: slot
                for n in path
                if id(n) not in done and (slot := self._slot_of(n))
            }
            done.update(map(id, path))
            elements = np.concatenate([n.elements for n in path])
            slots = np.concatenate([n.slots for n in path])
            self._path(elements, slots, begin, node.namespace, saves)
        if self._has_states:
            self._forget_row(_SCRATCH_ROW)

    def _slot_of(self, node: TreeNode) -> int:
        """Return the slot of the checkpoint at the end of a run, or 0."""
        runs = self._checkpoints
        if runs is None or not runs.has_checkpoint(node):
            return 0
        return runs.slot_at(node)

    def _path(
        self,
        elements: IntArray,
        slots: IntArray,
        begin: int,
        namespace: str | None,
        saves: Mapping[int, int],
    ) -> None:
        tokens = elements.tolist()
        if self._bigram:
            # An element is a token paired with the next one.
            tokens = (elements >> _TOKEN_BITS).tolist()
            tokens.append(int(elements[-1]) & ((1 << _TOKEN_BITS) - 1))
        parts = Namespace.of(namespace)
        message = GenerateReq(
            rid="cached",
            input_ids=tokens,
            sampling_params=SamplingParams(temperature=0.0),
            extra_key=parts.tenant,
            lora=None
            if parts.adapter is None
            else LoraRef(name=parts.adapter, path="", revision=parts.revision),
        )
        req = Req(
            message,
            tokens=array("q", tokens),
            stop_ids=frozenset(),
            seed=0,
            max_total_len=len(tokens) + 1,
            stop_matcher=None,
            input_embeds=self._lost_embeds(elements),
        )
        self._place(req, _SCRATCH_ROW, slots)
        begin = self._first(begin, slots)
        self._run(req, begin, len(slots), is_last_chunk=False, saves=saves)

    def _lost_embeds(self, elements: IntArray) -> PromptEmbeds | None:
        """Return zeros in place of embeddings, which only running requests keep. What
        is sampled after them is forced."""
        count = 0 if self._bigram else int((elements >= FIRST_CONTENT_ID).sum())
        if not count:
            return None
        width = self._scheduler.model_config.hidden_size
        return PromptEmbeds.of(
            elements[:count].tolist(), np.zeros((count, width), dtype=np.float32)
        )

    def request(self, req: Req, saved: SavedReq) -> None:
        """Refill the row of a request, whose beginning may be in the tree.

        Its last token is always computed, because the next step starts from its result.
        """
        self._place(req, saved.row, saved.slots)
        begin = min(saved.protected, saved.committed - 1)
        if begin < saved.protected:
            # The slot already holds this token.
            self._forget(saved.slots[begin : begin + 1])
        begin = self._first(begin, saved.slots)
        saves = {} if saved.states is None else saved.states.slots()
        is_last = not saved.is_chunked
        self._run(req, begin, saved.committed, is_last_chunk=is_last, saves=saves)

    def _first(self, begin: int, slots: IntArray) -> int:
        """Return where a prefill begins that is due from `begin` on."""
        if not (self._has_states and begin):
            return begin
        self._forget(slots[:begin])
        return 0

    def _place(self, req: Req, row: int, slots: IntArray) -> None:
        req.req_pool_idx, req.allocated_len = row, len(slots)
        self._rows.write(row, 0, torch.from_numpy(slots))
        tokens = torch.from_numpy(req.device_tokens(0, len(req.tokens)))
        self._rows.write_tokens([row], [0], [len(tokens)], tokens)

    def _forget(self, slots: IntArray) -> None:
        for manager in self._scheduler.worker.canary_managers():
            manager.target.groups[0].free(torch.from_numpy(slots.copy()))

    def _forget_row(self, row: int) -> None:
        """Let a row hold no state, as one that nobody uses."""
        for manager in self._scheduler.worker.canary_managers():
            if manager.target.states is not None:
                manager.target.states.free(torch.tensor([row]))

    def _run(
        self,
        req: Req,
        begin: int,
        end: int,
        *,
        is_last_chunk: bool,
        saves: Mapping[int, int],
    ) -> None:
        """Prefill positions [begin, end); after the last chunk a token is sampled.

        Args:
            saves: slots that get the state at a position.
        """
        scored, req.logprobs.score_from = req.logprobs.score_from, None
        req.committed_len = begin
        while req.committed_len < end:
            stops = [stop for stop in (*saves, end) if stop > req.committed_len]
            length = min(self._chunk, min(stops) - req.committed_len)
            is_last = req.committed_len + length == end
            req.is_chunked = not (is_last and is_last_chunk)
            batch = ScheduleBatch.prepare_for_refill(
                [req], [length], self._scheduler.env
            )
            slot = saves.get(req.committed_len)
            if slot is not None:
                copies = torch.tensor([[slot], [req.req_pool_idx]])
                dst, src = copies.to(self._rows.device)
                batch.state_plan = StatePlan(save=StateCopies(dst=dst, src=src))
            self._scheduler.worker.forward_batch_generation(batch, None).wait()
        req.logprobs.score_from = scored

"""A scheduler and a runner with the methods and fields of SGLang that the plugin wraps
and reads, over a paged pool and a prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kv_canary.engines.settings import Settings
from kv_canary.engines.sglang import attachment, hooks_of, wrappers
from kv_canary.engines.sglang.runner_canary import RunnerCanary

ROWS, COLUMNS, LAYERS, WIDTH, VOCABULARY = 8, 128, 3, 16, 256
DRAFTS = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Req:
    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    prefix_indices: Tensor = field(default_factory=lambda: torch.zeros(0).long())
    req_pool_idx: int | None = None
    lora_id: str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.origin_input_ids + self.output_ids


@dataclass
class Batch:
    """A `ForwardBatch`."""

    forward_mode: Any
    batch_size: int
    input_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    positions: Tensor
    rids: list[str]
    extend_prefix_lens: Tensor | None = None
    extend_seq_lens: Tensor | None = None
    extend_start_loc: Tensor | None = None
    spec_info: Any = None


class Allocator:
    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size = size, page_size
        self.clear()

    def clear(self) -> None:
        pages = self.size // self.page_size
        self.free_pages = torch.arange(1, pages + 1, device=DEVICE)

    def free(self, free_index: Tensor) -> None:
        pages = torch.unique(free_index // self.page_size)
        self.free_pages = torch.cat((self.free_pages, pages))

    def alloc(self, pages: int) -> Tensor:
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        assert len(taken) == pages
        offsets = torch.arange(self.page_size, device=DEVICE)
        return (taken[:, None] * self.page_size + offsets).view(-1)


class PagedAllocator(Allocator):
    pass


class Pool:
    """Layers in one allocation, or in allocations at any distance."""

    def __init__(self, size: int, page_size: int, *, kind: str) -> None:
        self.size, self.page_size = size, page_size
        slots = size + page_size
        shape = (slots, 2, WIDTH)
        names = ("kv_buffer",) if kind == "latent" else ("k_buffer", "v_buffer")
        for name in names:
            whole = torch.zeros(LAYERS, *shape, device=DEVICE)
            layers = list(whole)
            if kind == "scattered":
                apart = torch.zeros(9, *shape, device=DEVICE)
                layers = [whole[0], torch.zeros(shape, device=DEVICE), apart[4]]
            setattr(self, name, layers)

    @property
    def layers(self) -> list[Tensor]:
        latent: list[Tensor] = getattr(self, "kv_buffer", [])
        return latent or [*self.k_buffer, *self.v_buffer]

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        for layer in self.layers:
            layer[tgt_loc] = layer[src_loc]


class Model:
    """Stores the hash of a token and its position in every layer."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.skips: set[int] = set()

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        value = torch.sin(input_ids * 3.7 + positions * 0.31).view(-1, 1, 1)
        for number, layer in enumerate(self.pool.layers):
            if number not in self.skips:
                layer[forward_batch.out_cache_loc] = value + number
        return SimpleNamespace(logits=input_ids)


class Runner:
    """A `ModelRunner`; that of a draft model has the slots and the table of its
    target."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        kind: str,
        args: Any,
        target: Runner | None = None,
    ) -> None:
        self.server_args, self.is_draft_worker = args, target is not None
        self._shape = (pages * page_size, page_size, kind)
        self._target = target

    def alloc_memory_pool(self, memory_pool_config: Any = None) -> None:
        size, page_size, kind = self._shape
        self.token_to_kv_pool = Pool(size, page_size, kind=kind)
        self.model = Model(self.token_to_kv_pool)
        if self._target is not None:
            self.token_to_kv_pool_allocator = self._target.token_to_kv_pool_allocator
            self.req_to_token_pool = self._target.req_to_token_pool
            return
        make = Allocator if page_size == 1 else PagedAllocator
        self.token_to_kv_pool_allocator = make(size, page_size)
        table = torch.zeros(ROWS + 1, COLUMNS, dtype=torch.int32, device=DEVICE)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)

    def forward(self, forward_batch: Batch) -> Any:
        padded = pad(forward_batch)
        return self.model.forward(padded.input_ids, padded.positions, padded)

    def sample(self, logits_output: Any, forward_batch: Batch) -> Tensor:
        n = forward_batch.batch_size
        return (forward_batch.seq_lens[:n] * 31 + 7) % VOCABULARY


class EagleDraftWorker:
    def __init__(self, runner: Runner) -> None:
        self.draft_runner = runner

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
        """A graph's replay: past the runner."""
        place = torch.arange(DRAFTS, device=DEVICE)
        positions = (batch.seq_lens[:, None] + place).view(-1)
        self.draft_runner.model.forward(batch_result.next_token_ids, positions, batch)


def pad(batch: Batch) -> Batch:
    """As a runner of graphs does to a decode: rows of an earlier batch stay after the
    last, and write to slot 0. The mask of a captured verification is never filled."""
    if batch.forward_mode.name == "TARGET_VERIFY":
        mask = torch.ones_like(batch.spec_info.custom_mask)
        spec = SimpleNamespace(draft_token_num=DRAFTS, custom_mask=mask)
        return replace(batch, spec_info=spec)
    if batch.forward_mode.name != "DECODE":
        return batch
    spare = torch.ones(2, dtype=torch.int64, device=DEVICE)
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    for name in ("input_ids", "req_pool_indices", "seq_lens"):
        values[name] = torch.cat((values[name], spare))
    for name in ("out_cache_loc", "positions"):
        values[name] = torch.cat((values[name], spare * 0))
    return Batch(**values)


class ScheduleBatch:
    def __init__(self, world: World, reqs: list[Req]) -> None:
        self.world, self.reqs = world, reqs
        self.req_to_token_pool = world.runner.req_to_token_pool

    def prepare_for_extend(self) -> None:
        for req in self.reqs:
            self.world.give_row(req)


class Scheduler:
    def run_batch(self, batch: Any) -> Any:
        return SimpleNamespace(tokens=batch.run())

    def process_batch_result(self, batch: Any, result: Any) -> None:
        batch.done(result.tokens)


def path_in(parents: list[int], node: int) -> list[int]:
    """From the root of a tree to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def upload(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


class World:
    """Requests that begin, decode, speculate and end.

    Args:
        drafts: whether there is a draft model: each decode is a verification then.
        options: of `ServerArgs`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        page_size: int = 1,
        pages: int = 1000,
        kind: str = "whole",
        drafts: bool = False,
        **options: Any,
    ) -> None:
        args = SimpleNamespace(speculative_num_draft_tokens=DRAFTS, **options)
        self.runner = Runner(pages, page_size, kind, args)
        self.runner.alloc_memory_pool()
        self.drafter: EagleDraftWorker | None = None
        if drafts:
            runner = Runner(pages, page_size, kind, args, self.runner)
            runner.alloc_memory_pool()
            self.drafter = EagleDraftWorker(runner)
        self.scheduler = Scheduler()
        self.page_size = page_size
        self.running: dict[str, Req] = {}
        self.cache: list[tuple[list[int], Tensor]] = []
        self._rows = list(range(1, ROWS + 1))
        self._allocated: dict[str, int] = {}

    @property
    def table(self) -> Tensor:
        table: Tensor = self.runner.req_to_token_pool.req_to_token
        return table

    @property
    def canary(self) -> RunnerCanary:
        canary = attachment.get_canary(self.runner)
        assert canary is not None
        return canary

    def settle(self) -> None:
        """Report what all forwards have found; on a GPU it is on its way."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for canary in (self.canary, self.canary.draft):
            if canary is not None:
                canary.poll()

    def give_row(self, req: Req) -> None:
        if req.req_pool_idx is None:
            req.req_pool_idx = self._rows.pop(0)
        self.table[req.req_pool_idx, : len(req.prefix_indices)] = (
            req.prefix_indices.int()
        )
        self._allocated.setdefault(req.rid, len(req.prefix_indices))

    def reserve(self, req: Req, length: int) -> None:
        """Columns up to `length` get slots."""
        have = self._allocated[req.rid]
        pages = -(-max(length - have, 0) // self.page_size)
        new = self.runner.token_to_kv_pool_allocator.alloc(pages)
        self.table[req.req_pool_idx, have : have + len(new)] = new.int()
        self._allocated[req.rid] = have + len(new)

    def match(self, req: Req) -> None:
        """Take the longest cached prefix, of whole pages."""
        best = upload([])
        for tokens, slots in self.cache:
            both = zip(tokens, req.tokens[:-1], strict=False)
            same = next((i for i, (a, b) in enumerate(both) if a != b), None)
            n = min(len(tokens), len(req.tokens) - 1) if same is None else same
            if self.drafter is not None:
                # Prefixes are told apart by the token after them.
                n = max(n - 1, 0)
            n -= n % self.page_size
            if n > len(best):
                best = slots[:n]
        req.prefix_indices = best

    def begin(self, *reqs: Req, upto: int | None = None) -> None:
        """Prefill requests, or their first tokens."""
        for req in reqs:
            if req.req_pool_idx is None:
                self.match(req)
            self.running[req.rid] = req
        batch = ScheduleBatch(self, list(reqs))
        batch.prepare_for_extend()
        prefix = [len(req.prefix_indices) for req in reqs]
        ends = [
            min(max(upto or COLUMNS, begin + 1), len(req.tokens))
            for req, begin in zip(reqs, prefix, strict=True)
        ]
        for req, end in zip(reqs, ends, strict=True):
            self.reserve(req, end)
        rows = zip(reqs, prefix, ends, strict=True)
        columns = [(req, i) for req, begin, end in rows for i in range(begin, end)]
        lens = [end - begin for begin, end in zip(prefix, ends, strict=True)]
        forward = Batch(
            forward_mode=SimpleNamespace(name="EXTEND"),
            batch_size=len(reqs),
            input_ids=upload([req.tokens[i] for req, i in columns]),
            req_pool_indices=upload([req.req_pool_idx or 0 for req in reqs]),
            seq_lens=upload(ends),
            out_cache_loc=upload(
                [int(self.table[req.req_pool_idx, i]) for req, i in columns]
            ),
            positions=upload([i for _, i in columns]),
            rids=[req.rid for req in reqs],
            extend_prefix_lens=upload(prefix).int(),
            extend_seq_lens=upload(lens).int(),
            extend_start_loc=upload([sum(lens[:i]) for i in range(len(lens))]).int(),
        )
        tokens = self.run(forward)
        if self.drafter is not None:
            after = zip(reqs, ends, tokens.tolist(), strict=True)
            tails = {r.rid: (*r.tokens, token)[end] for r, end, token in after}
            follows = [(*req.tokens, tails[req.rid]) for req, _ in columns]
            pairs = zip(follows, columns, strict=True)
            shifted = upload([tokens[i + 1] for tokens, (_, i) in pairs])
            self.drafter.draft_runner.forward(replace(forward, input_ids=shifted))
        for req, end, token in zip(reqs, ends, tokens.tolist(), strict=True):
            line = self.table[req.req_pool_idx, :end].clone()
            req.prefix_indices = line.long()
            if end == len(req.tokens):
                req.output_ids.append(token)

    def decode_batch(self) -> Batch:
        reqs = list(self.running.values())
        lens = [len(req.tokens) for req in reqs]
        for req, length in zip(reqs, lens, strict=True):
            self.reserve(req, length)
        return Batch(
            forward_mode=SimpleNamespace(name="DECODE"),
            batch_size=len(reqs),
            input_ids=upload([req.tokens[-1] for req in reqs]),
            req_pool_indices=upload([req.req_pool_idx or 0 for req in reqs]),
            seq_lens=upload(lens),
            out_cache_loc=upload(
                [
                    int(self.table[req.req_pool_idx, n - 1])
                    for req, n in zip(reqs, lens, strict=True)
                ]
            ),
            positions=upload(lens) - 1,
            rids=[req.rid for req in reqs],
        )

    def decode(self, batch: Batch | None = None) -> None:
        tokens = self.run(batch or self.decode_batch())
        for req, token in zip(self.running.values(), tokens.tolist(), strict=True):
            req.output_ids.append(token)

    def verify_batch(self, rng: random.Random) -> tuple[Batch, list[list[int]]]:
        """A verification, and the parents of each tree's nodes."""
        reqs = list(self.running.values())
        lens = [len(req.tokens) - 1 for req in reqs]
        for req, length in zip(reqs, lens, strict=True):
            self.reserve(req, length + DRAFTS)
        trees = [[-1] + [rng.randrange(i) for i in range(1, DRAFTS)] for _ in reqs]
        depths, masks, tokens = [], [], []
        for req, length, parents in zip(reqs, lens, trees, strict=True):
            mask = torch.eye(DRAFTS, dtype=torch.bool)
            for node, parent in enumerate(parents[1:], 1):
                mask[node] |= mask[parent]
            depths.append((mask.sum(dim=1) - 1).tolist())
            whole = torch.ones(DRAFTS, length, dtype=torch.bool)
            masks.append(torch.cat((whole, mask), dim=1).view(-1))
            tokens += [req.tokens[-1]]
            tokens += [rng.randrange(VOCABULARY) for _ in range(DRAFTS - 1)]
        rows = list(zip(reqs, lens, depths, strict=True))
        batch = Batch(
            forward_mode=SimpleNamespace(name="TARGET_VERIFY"),
            batch_size=len(reqs),
            input_ids=upload(tokens),
            req_pool_indices=upload([req.req_pool_idx or 0 for req in reqs]),
            seq_lens=upload(lens),
            out_cache_loc=upload(
                [
                    int(self.table[req.req_pool_idx, n + j])
                    for req, n, _ in rows
                    for j in range(DRAFTS)
                ]
            ),
            positions=upload([n + d for _, n, depth in rows for d in depth]),
            rids=[req.rid for req in reqs],
            spec_info=SimpleNamespace(
                draft_token_num=DRAFTS, custom_mask=torch.cat(masks).to(DEVICE)
            ),
        )
        return batch, trees

    def speculate(self, rng: random.Random) -> None:
        """Verify trees; a path of each is accepted and moves to the front."""
        batch, trees = self.verify_batch(rng)
        self.run(batch)
        self.accept(batch, [path_in(tree, rng.randrange(DRAFTS)) for tree in trees])

    def accept(self, batch: Batch, paths: list[list[int]]) -> None:
        dst: list[int] = []
        src: list[int] = []
        gained: list[int] = []
        tokens, slots = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        pairs = zip(self.running.values(), paths, strict=True)
        for row, (req, path) in enumerate(pairs):
            dst += slots[row * DRAFTS :][: len(path)]
            src += [slots[row * DRAFTS + node] for node in path]
            new = [tokens[row * DRAFTS + node] for node in path[1:]]
            new.append(sum(req.tokens + new) % VOCABULARY)
            req.output_ids += new
            gained += (new + [7] * DRAFTS)[:DRAFTS]
        self.runner.token_to_kv_pool.move_kv_cache(upload(dst), upload(src))
        if self.drafter is not None:
            self.drafter._draft_extend_for_decode(
                SimpleNamespace(
                    forward_mode=batch.forward_mode,
                    reqs=list(self.running.values()),
                    seq_lens=batch.seq_lens,
                    req_pool_indices=batch.req_pool_indices,
                    out_cache_loc=batch.out_cache_loc,
                ),
                SimpleNamespace(next_token_ids=upload(gained).int()),
            )

    def run(self, forward: Batch) -> Tensor:
        """Through the scheduler, as a result that leaves it."""
        kept: list[Tensor] = []

        def compute() -> Tensor:
            logits = self.runner.forward(forward)
            if forward.forward_mode.name == "TARGET_VERIFY":
                return torch.zeros(0)
            return self.runner.sample(logits, forward)

        batch = SimpleNamespace(
            run=compute,
            done=kept.append,
            req_to_token_pool=self.runner.req_to_token_pool,
        )
        result = self.scheduler.run_batch(batch)
        self.scheduler.process_batch_result(batch, result)
        return kept[0]

    def end(self, rid: str, *, caches: bool = True) -> None:
        """A request ends: whole pages stay cached, the rest is given back."""
        req = self.running.pop(rid)
        assert req.req_pool_idx is not None
        line = self.table[req.req_pool_idx]
        length = len(req.tokens) - 1
        kept = length - length % self.page_size
        known = {int(slot) for _, slots in self.cache for slot in slots}
        slots = line[:kept].long().clone()
        free = line[kept : self._allocated.pop(rid)].long()
        if caches:
            self.cache.append((req.tokens[:kept], slots))
        else:
            mine = [slot for slot in slots.tolist() if slot not in known]
            free = torch.cat((upload(mine), free))
        if len(free):
            self.runner.token_to_kv_pool_allocator.free(free)
        self._rows.append(req.req_pool_idx)
        line.zero_()


OWNERS: dict[str, Any] = {
    hooks_of.RUNNER: Runner,
    hooks_of.EXTEND.owner: ScheduleBatch,
    hooks_of.RESULT.owner: Scheduler,
    hooks_of.FREES[0].owner: Allocator,
    hooks_of.FREES[1].owner: PagedAllocator,
    hooks_of.MOVES[0].owner: Pool,
    hooks_of.BATCH.owner: Batch,
    hooks_of.DRAFT_EXTEND.owner: EagleDraftWorker,
}
"""Classes that the hooks find in place of SGLang's."""


@contextmanager
def plugged(settings: Settings) -> Iterator[None]:
    """With the plugin's wrappers in place."""
    undo = wrappers.wrap_engine(settings)
    try:
        yield
    finally:
        while undo:
            undo.pop()()

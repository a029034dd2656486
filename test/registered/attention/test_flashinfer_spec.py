"""FlashInfer under speculation: verification, draft extend and draft steps against
torch_native, eager and replayed, and whole engines by the mock's oracle.

On a GPU the first run compiles FlashInfer's kernels, which takes minutes; without one a
stand-in runs in their place, and graphs are recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_world import (
    HEAD_DIM,
    PAGE_SIZES,
    Problem,
    assert_close,
    make_problem,
)
from flashinfer_stand_in import stand_in
from torch import Tensor

from kv_canary.reporter import CanaryViolation
from sglang.faults.fault_points import (
    SHORT_BRANCH_TABLE,
    SMALL_INDEX_BUFFER,
)
from sglang.srt.configs.draft_layout import BranchLayout
from sglang.srt.draft_trees.draft_input import duplicate_prefix_tail_to_draft_branches
from sglang.srt.environ import envs
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.forward.graph_capture import BreakableGraph, capture_graph
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    DraftDecodeBackend,
)
from sglang.srt.layers.attention.cpu_backends import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.ops.branch_slots.op import (
    BranchPaths,
    SlotRows,
    draft_out_cache_loc,
)
from sglang.srt.model_executor.cuda_graph_runner import cuda_graph_backend
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.mock_traffic import Traffic, check
from sglang.test.recording_backend import RecordingBackend
from sglang.test.scale import count, is_full
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=60, suite="cpu", full_time=70)
register_cuda_ci(est_time=240, suite="cuda")

ON_GPU = torch.cuda.is_available()
if ON_GPU:
    pytest.importorskip("flashinfer")
DEVICE = "cuda" if ON_GPU else "cpu"
MAKE_BACKEND = cuda_graph_backend if ON_GPU else RecordingBackend
VOCAB = 1000
LONGEST = 300 if ON_GPU else 40
OTHER = "triton" if ON_GPU else "cpu_native"
CONTEXT = 512
LONG, SHORT = [130, 300, 17, 64], [3, 0, 16, 63]
HEADS = [(8, 2), (2, 2)]


@pytest.fixture(autouse=True, scope="module")
def library():
    with nullcontext() if ON_GPU else stand_in():
        yield


def flashinfer_backend(**pools: Any) -> AttentionBackend:
    # Imports FlashInfer, which is in sys.modules from the fixture on.
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return FlashInferAttnBackend(**pools)


def capture(function: Callable[[], None]) -> BreakableGraph:
    """The forward that it runs, after the warm-ups in which plans are made."""
    with torch.inference_mode():
        for _ in range(2):
            function()
        with capture_graph(MAKE_BACKEND()) as graph:
            function()
    return graph


# -- verification and draft extend -----------------------------------------------------


def fixed_problem(kind: str, *, page_size: int, heads: tuple[int, int]) -> Problem:
    options: dict[str, Any] = {
        "tree": {"tree_nodes": 9},
        "chain": {"new_lens": [4] * 4, "mode": ForwardMode.TARGET_VERIFY},
        "extend": {"new_lens": [6] * 4, "mode": ForwardMode.DRAFT_EXTEND_V2},
    }[kind]
    return make_problem(page_size=page_size, prefix_lens=LONG, heads=heads, **options)


@pytest.mark.parametrize("heads", HEADS if ON_GPU else HEADS[:1])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", ["tree", "chain", "extend"])
def test_eager_and_replayed(kind, page_size, heads):
    problem = fixed_problem(kind, page_size=page_size, heads=heads)
    q, k, v = problem.qkv.split((heads[0], heads[1], heads[1]), dim=1)
    queries = torch.empty_like(q, memory_format=torch.contiguous_format)
    out = torch.empty_like(queries)
    with torch.inference_mode():
        wanted = problem.expected()
        backend = problem.make(flashinfer_backend)
        assert_close(problem.outputs(backend), wanted)
        backend.init_capture(problem.batch, len(LONG))

        def forward() -> None:
            queries.copy_(q)
            args = queries, k.clone(), v.clone(), problem.layer, problem.batch
            backend.forward(*args, out=out)

        graph = capture(forward)
        for prefix_lens in (SHORT, LONG, [0] * 4):
            live = problem.shortened(prefix_lens)
            expected = live.expected()
            out.fill_(7.0)
            backend.init_replay(live.batch)
            graph.replay()
            assert_close(out, expected)
            # An eager forward between two replays disturbs neither.
            assert_close(live.outputs(backend), expected)
            (view,) = backend.read_view(live.batch)
            assert torch.equal(view.read_lens, live.batch.seq_lens)
            assert view.indptr is not None and view.page_indices is not None
            show_pages(live, view.indptr.tolist(), view.page_indices.cpu())


def show_pages(problem: Problem, bounds: list[int], pages: Tensor) -> None:
    size = problem.pool.page_size
    rows = problem.batch.req_pool_indices.tolist()
    lens = problem.batch.seq_lens.tolist()
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        element = torch.arange(length)
        page = pages[bounds[i] + element // size].long()
        slots = page * size + element % size
        assert torch.equal(slots, problem.rows.row_slots(row, 0, length).cpu())
        assert bounds[i + 1] - bounds[i] == -(-length // size)


@pytest.mark.parametrize("nodes", [2, 32, 64])
def test_trees_of_any_size(nodes):
    make_problem(page_size=16, prefix_lens=[200, 0, 64], tree_nodes=nodes).compare(
        flashinfer_backend
    )


@pytest.mark.skipif(not ON_GPU, reason="the stand-in has no workspace")
def test_many_rows_of_wide_trees():
    """The workspace holds the partial results of the largest batch."""
    problem = make_problem(
        page_size=16, prefix_lens=[30] * 48, tree_nodes=64, heads=(32, 8)
    )
    problem.compare(flashinfer_backend)


# -- draft steps -----------------------------------------------------------------------


class DraftPhase:
    """Random K and V, rows with prefix and branches, and what each step asks."""

    def __init__(self, layout: BranchLayout, lens: list[int]) -> None:
        self.layout, self.lens = layout, list(lens)
        rng = torch.Generator().manual_seed(layout.page_size)
        page, requests = layout.page_size, len(lens)
        ends = [layout.end_column(n) for n in range(max(lens) + 1)]
        pages = -(-max(ends) // page)
        self.rows = ReqToTokenPool(
            size=requests, row_width=pages * page, device=DEVICE, context_len=CONTEXT
        )
        order = 1 + torch.randperm(pages * requests, generator=rng)
        slots = (order.view(requests, pages, 1) * page) + torch.arange(page)
        indices = self.rows.alloc(requests)
        assert indices is not None
        for row, columns in zip(indices, slots.flatten(1), strict=True):
            self.rows.write(row, 0, columns)
        self.columns = slots.flatten(1)
        self.kv_pool = MHATokenToKVPool(
            size=(pages * requests + 1) * page,
            page_size=page,
            dtype=torch.bfloat16,
            layer_num=1,
            head_num=2,
            head_dim=HEAD_DIM,
            device=DEVICE,
        )
        for buffer in (self.kv_pool.k_buffer, self.kv_pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=rng))
        self.layer = RadixAttention(
            num_heads=8,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
            layer_id=0,
            scaling=0.17,
            sliding_window=None,
        )
        self.steps, branches = layout.num_steps - 1, requests * layout.topk
        shape = (self.steps, branches, 12, HEAD_DIM)
        self.qkv = torch.randn(shape, generator=rng).to(DEVICE, torch.bfloat16)
        self.row_index = torch.tensor(indices, device=DEVICE)
        self.seq_lens = torch.tensor(lens, device=DEVICE)
        self.slots = torch.zeros(
            layout.num_steps, branches, dtype=torch.int64, device=DEVICE
        )
        # The branches that each branch continues, at random, by step and request.
        chosen = torch.randint(
            layout.topk, (layout.num_steps, requests, layout.topk), generator=rng
        )
        self.parents = chosen.tolist()
        followed = torch.zeros(requests, 1 + layout.topk * self.steps)
        for step in range(1, self.steps):
            first = layout.topk + layout.topk**2 * (step - 1)
            at = slice(1 + layout.topk * step, 1 + layout.topk * (step + 1))
            followed[:, at] = first + chosen[step] * layout.topk
        self.followed = followed.long().to(DEVICE)
        self.out = torch.zeros(
            self.steps, branches, 8, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE
        )

    def slot_rows(self) -> SlotRows:
        return SlotRows(self.rows.req_to_token, self.row_index, self.seq_lens)

    def shorten(self, lens: list[int]) -> None:
        """Live requests with these lengths, padding after them, in the same
        tensors."""
        padding = len(self.row_index) - len(lens)
        self.row_index[len(lens) :] = 0
        self.seq_lens.copy_(torch.tensor(lens + [0] * padding))
        self.lens = list(lens)

    def batch(self, step: int) -> ForwardBatch:
        topk = self.layout.topk
        lens = self.seq_lens.repeat_interleave(topk) + step
        rows = self.row_index.repeat_interleave(topk)
        zeros = torch.zeros_like(lens)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=zeros,
            positions=lens,
            out_cache_loc=self.slots[step],
            req_pool_indices=rows,
            prefix_lens=lens,
            extend_lens=torch.ones_like(lens),
            seq_lens=lens + 1,
            req_serial=zeros,
            salt=zeros,
            rids_int=zeros,
        )

    def run(self, draft: DraftDecodeBackend, *, is_paged: bool) -> None:
        """The attention of all steps into `out`; no wait, so it can be captured."""
        draft_out_cache_loc(self.slot_rows(), layout=self.layout, out=self.slots)
        if is_paged:
            size = self.slots.shape[1] // self.layout.topk
            size *= self.layout.tail_moves
            src, dst = torch.zeros(2, size, dtype=torch.int64, device=DEVICE)
            duplicate_prefix_tail_to_draft_branches(
                self.kv_pool, self.slot_rows(), layout=self.layout, src=src, dst=dst
            )
        draft.prepare(self.slot_rows())
        for step in range(self.steps):
            if step and self.layout.is_exact:
                paths = BranchPaths(self.followed, self.slots, self.seq_lens)
                draft.follow(step, paths)
            q, k, v = self.qkv[step].clone().split((8, 2, 2), dim=1)
            q = q.contiguous()
            backend = draft.step(step)
            backend.forward(q, k, v, self.layer, self.batch(step), out=self.out[step])

    def draft(self, backend: Callable[..., AttentionBackend]) -> DraftDecodeBackend:
        attention = backend(req_to_token_pool=self.rows, kv_pool=self.kv_pool)
        return attention.draft_decode(self.layout, max_requests=len(self.row_index))

    def expected(self) -> Tensor:
        draft = self.draft(TorchNativeAttnBackend)
        draft.plan(self.lens)
        self.run(draft, is_paged=True)
        return self.out.clone()

    def check_views(self, draft: DraftDecodeBackend) -> None:
        topk = self.layout.topk
        for step in range(self.steps):
            (view,) = draft.step(step).read_view(self.batch(step))
            assert view.indptr is not None and view.slot_indices is not None
            bounds, slots = view.indptr.tolist(), view.slot_indices.tolist()
            for z in range(len(self.lens) * topk):
                length, columns = self.lens[z // topk], self.columns[z // topk]
                branches = [z % topk]
                for s in range(step, 0, -1):
                    parent = branches[0]
                    if self.layout.is_exact:
                        parent = self.parents[s][z // topk][parent]
                    branches.insert(0, parent)
                own = [
                    self.layout.draft_column(length, branch, s)
                    for s, branch in enumerate(branches)
                ]
                wanted = columns[[*range(length), *own]].tolist()
                assert slots[bounds[z] : bounds[z + 1]] == wanted
                assert int(view.read_lens[z]) == len(wanted)


LAYOUTS = [(1, 1, 3), (64, 1, 4), (1, 4, 3), (4, 2, 6), (16, 8, 4), (64, 8, 5)]


@pytest.mark.parametrize(
    ("numbers", "has_region"),
    # A chain has no region.
    [*((n, False) for n in LAYOUTS), *((n, True) for n in LAYOUTS if n[1] > 1)],
    ids=str,
)
def test_draft_steps(numbers, has_region):
    page, topk, steps = numbers
    region = 256 if has_region else None
    phase = DraftPhase(
        BranchLayout(page_size=page, topk=topk, num_steps=steps, region=region),
        [130, 70, 17, 200],
    )
    with torch.inference_mode():
        wanted = phase.expected()
        draft = phase.draft(flashinfer_backend)
        draft.plan(phase.lens)
        phase.run(draft, is_paged=False)
        assert_close(phase.out, wanted)
        phase.check_views(draft)
        draft.plan(phase.lens, graph_rows=4)
        graph = capture(lambda: phase.run(draft, is_paged=False))
        for lens in ([130, 70, 17, 200], [64, 1, 16, 33], [129, 63], [5]):
            phase.shorten(lens)
            wanted = phase.expected()
            phase.out.fill_(7.0)
            draft.plan(lens, graph_rows=4)
            graph.replay()
            live = len(lens) * topk
            assert_close(phase.out[:, :live], wanted[:, :live])
            assert bool(phase.out.isfinite().all())
            phase.check_views(draft)


def test_a_phase_must_be_planned_for_its_batch():
    phase = DraftPhase(BranchLayout(page_size=1, topk=2, num_steps=2), [5, 6])
    draft = phase.draft(flashinfer_backend)
    with pytest.raises(RuntimeError, match="needs_cpu_seq_lens"):
        draft.plan(None)
    draft.plan([5])
    with pytest.raises(RuntimeError, match="4 branches was planned for 2"):
        draft.prepare(phase.slot_rows())


# -- engines ---------------------------------------------------------------------------


def engine(tmp_path, backend: str, kind: str, source: str | None, **numbers: Any):
    if not (tmp_path / "target").exists():
        write_mock_model(
            tmp_path / "target", vocab_size=VOCAB, max_position_embeddings=CONTEXT
        )
        write_mock_draft(
            tmp_path / "draft",
            kind=kind,
            source=source,
            vocab_size=VOCAB,
            max_position_embeddings=CONTEXT,
        )
    options = {
        "device": DEVICE,
        "dtype": "bfloat16",
        "attention_backend": backend,
        "max_total_tokens": 32768,
        "chunked_prefill_size": 128,
        "max_running_requests": 12,
        "skip_tokenizer_init": True,
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "speculative_algorithm": kind,
        "speculative_draft_model_path": str(tmp_path / "draft"),
    }
    return EngineHarness(tmp_path / "target", **(options | numbers))


def tree(page: int, topk: int, steps: int, nodes: int) -> dict[str, int]:
    return {
        "page_size": page,
        "speculative_eagle_topk": topk,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": nodes,
    }


CONFIGURATIONS = [
    ("EAGLE", "attention", tree(1, 1, 3, 4), False),
    ("EAGLE", "attention", tree(64, 8, 5, 32), False),
    ("EAGLE", "attention", tree(4, 4, 3, 16), True),
    ("EAGLE3", "hidden", tree(16, 2, 6, 9), False),
    ("EAGLE3", "attention", tree(64, 8, 5, 64), False),
    ("STANDALONE", None, tree(1, 4, 2, 8), False),
    ("STANDALONE", None, tree(16, 1, 1, 2), True),
]


@pytest.mark.parametrize(
    ("kind", "source", "numbers", "eager"),
    CONFIGURATIONS if ON_GPU or is_full() else CONFIGURATIONS[3::2],
    ids=str,
)
def test_engines_say_what_the_oracle_says(tmp_path, kind, source, numbers, eager):
    options = {**numbers, "disable_cuda_graph": eager}
    harness = engine(tmp_path, "flashinfer", kind, source, **options)
    total = count(ci=60, full=1000) if ON_GPU else 2
    traffic = Traffic(harness, random.Random(str(numbers)), total)
    answers = {}
    while traffic.left:
        answers |= harness.run(on_step=traffic.on_step)
    check(traffic.expected, answers, vocab_size=VOCAB)
    slots = harness.scheduler.cache.allocator.size
    harness.scheduler.cache.reset()
    assert harness.scheduler.cache.allocator.available_size() == slots
    # Its drafts are accepted exactly where the other's are: a message per iteration.
    lengths = random.Random(1)
    prompts = [
        [lengths.randrange(VOCAB) for _ in range(lengths.randrange(1, LONGEST))]
        for _ in range(16 if ON_GPU else 3)
    ]
    new_tokens = 60 if ON_GPU or is_full() else 24
    counts = []
    other = engine(tmp_path, OTHER, kind, source, **options)
    for each in (harness, other):
        rids = [
            each.submit(prompt, stream=True, max_new_tokens=new_tokens, ignore_eos=True)
            for prompt in prompts
        ]
        done = each.run()
        counts.append([done[rid].messages for rid in rids])
    assert counts[0] == counts[1]
    assert sum(counts[0]) < 0.8 * new_tokens * len(prompts)


def test_27338_the_index_buffer_is_checked(tmp_path):
    """Re-opened, a batch that the buffer does not hold stops the engine on the host."""
    numbers = tree(4, 8, 3, 16) | {"max_running_requests": 2}
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(200)] for _ in range(2)]
    for name in ("", SMALL_INDEX_BUFFER.name):
        with envs.SGLANG_DEBUG_REVERT_PR.override(name):
            harness = engine(tmp_path, "flashinfer", "EAGLE", "attention", **numbers)
            for prompt in prompts:
                harness.submit(prompt, max_new_tokens=20, ignore_eos=True)
            if not name:
                done = harness.run()
                assert all(len(each.output_ids) == 20 for each in done.values())
                continue
            with pytest.raises(RuntimeError, match="sized with the factor top-k"):
                harness.run()


@pytest.mark.parametrize("eager", [False, True] if ON_GPU else [True])
@pytest.mark.parametrize("numbers", [tree(1, 4, 3, 8), tree(16, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("backend", [OTHER, "flashinfer"])
def test_27360_the_canary_sees_lists_of_one_slot_less(
    tmp_path, backend, numbers, eager
):
    """A view shows the slots that are read: a missing slot is the wrong one."""
    options = numbers | {"disable_cuda_graph": eager, "max_running_requests": 2}
    rng = random.Random(4)
    prompt = [rng.randrange(VOCAB) for _ in range(61)]
    for name in ("", SHORT_BRANCH_TABLE.name):
        with envs.SGLANG_DEBUG_REVERT_PR.override(name):
            harness = engine(tmp_path, backend, "EAGLE", "attention", **options)
        harness.submit(prompt, max_new_tokens=20, ignore_eos=True)
        if not name:
            (done,) = harness.run().values()
            assert len(done.output_ids) == 20
            continue
        with pytest.raises(CanaryViolation, match=r"launch_tag=draft.*read_set"):
            harness.run()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""Every branch of a draft attends to its ancestors and to nothing else: whole trees
equal those of a reference that recomputes each branch alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.srt.configs.draft_layout import TreeShape
from sglang.srt.draft_trees.buffers import DraftLevels, DraftTree
from sglang.srt.draft_trees.draft_input import EagleDraftInput
from sglang.srt.draft_trees.ops.tree.op import (
    build_tree_ref,
    select_top_k_ref,
    top_k_probs_ref,
)
from sglang.srt.draft_trees.workspace import WorkspaceRows
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.layers.attention.paged_backend import PagedAttnBackend
from sglang.srt.speculative.eagle_draft_worker import EagleDraftWorker
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.harness import EngineHarness
from sglang.test.head_models import add_head
from sglang.test.hybrid_models import write_text_model
from sglang.test.scale import count
from sglang.test.spec_adaptive import InTurn
from sglang.test.spec_canary_traffic import worker_of
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import CONTEXT
from sglang.test.spec_world import VOCAB_SIZES, ModelFolders, device, spec_engine

register_cpu_ci(est_time=20, suite="cpu", full_time=120)
register_cuda_ci(est_time=200, suite="cuda")

BACKENDS = {"cpu": ("cpu_native", "torch_native"), "cuda": ("triton", "triton")}
TREES, MOST_STEPS = count(ci=6, full=60), 80
# Scores closer than this, relative to their size, may swap order between two ways of
# adding up. The CPU has one.
CLOSE = {"cpu": 0.0, "cuda": 1e-3}
# Equal rows in which a branch is computed. cuBLAS adds up the products of one row in
# another order than those of several, and EAGLE's hidden states, which no norm bounds,
# make of that 1e-4 of a score: as much as one row and eight differ by themselves.
ROWS = {"cpu": 1, "cuda": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))


def config(
    model: str, algorithm: str, topk: int, steps: int, page: int, place: int
) -> SpecConfig:
    return SpecConfig(
        algorithm=algorithm,
        topk=topk,
        page_size=page,
        num_steps=steps,
        nodes="max",
        backend=BACKENDS[device()][place % 2],
        overlap=False,
        model=model,
        variant=None,
    ).canonical()


CONFIGURATIONS = [
    config(*numbers, place)
    for place, numbers in enumerate(
        [
            ("mock", "EAGLE", 8, 4, 1),
            ("llama", "EAGLE", 4, 4, 4),
            ("qwen3", "EAGLE3", 3, 5, 16),
            ("llama", "STANDALONE", 4, 3, 64),
            ("deepseek_v2", "EAGLE", 2, 4, 4),
            # Sliding windows, shorter than the paths.
            ("gemma3", "STANDALONE", 3, 6, 1),
            ("gpt_oss", "STANDALONE", 3, 4, 16),
            ("qwen3", "EAGLE", 4, 4, 64),
        ]
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A branch: its drafted tokens as target ids, and what it started from."""

    tokens: tuple[int, ...] = ()
    hidden: Tensor | None = None


class Alone:
    """Drafts the tree of one request, one branch at a time: each forward is one row, or
    `ROWS` equal ones, over the request's prefix and slots that no branch uses.

    A path is recomputed from its first token whenever it grows.
    """

    def __init__(self, draft: EagleDraftWorker, views: WorkspaceRows, row: int) -> None:
        self._draft, self._runner = draft, draft.draft_runner
        self._shape, self._views, self._row = draft.workspace.shape, views, row
        self._rows = ROWS[device()]
        pool = self._runner.req_to_token_pool
        self._length = int(views.draft_lens[row])
        # The pool's last slots are free, because few requests run: those of the last
        # row's region, if there is one.
        end = self._runner.token_to_kv_pool.size
        if pool.region is not None:
            end = int(pool.region.rows_to_slots([pool.size])[-1]) + 1
        steps = self._shape.num_steps
        self._free = torch.arange(end - steps, end, device=pool.device)
        table = torch.zeros(
            self._rows, self._length + steps, dtype=torch.int32, device=pool.device
        )
        table[:, : self._length] = pool.req_to_token[
            views.identity[0, row], : self._length
        ]
        table[:, self._length :] = self._free
        backend = self._runner.attn_backend
        assert isinstance(backend, PagedAttnBackend)
        self._backend = backend.with_table(table, page_size=1)

    def levels(self) -> DraftLevels:
        shape, k = self._shape, self._shape.topk
        levels = DraftLevels.allocate(1, shape, device=self._free.device)
        candidates, hidden = self._draft.relay.gather(
            self._views.identity[0, self._row : self._row + 1]
        )
        candidates = candidates.best(k)
        probs, ids = candidates.probs, candidates.ids
        paths = [Path(hidden=hidden)]
        for level in range(shape.num_steps):
            tokens = ids.new_empty(k)
            rows = ids.new_empty(k)
            select_top_k_ref(
                level,
                shape=shape,
                topk_p=probs,
                topk_index=ids,
                hot_token_id=self._draft._hot_token_ids,
                levels=levels,
                input_ids=tokens,
                hidden_rows=rows,
            )
            paths = [
                Path(tokens=(*paths[parent].tokens, token), hidden=hidden)
                for parent, token in zip(rows.tolist(), tokens.tolist(), strict=True)
            ]
            if level == shape.num_steps - 1:
                break
            logits = torch.cat([self._logits(path) for path in paths])
            probs, ids = probs.new_empty(k, k), ids.new_empty(k, k)
            top_k_probs_ref(logits, probs=probs, ids=ids)
        return levels

    def _logits(self, path: Path) -> Tensor:
        """Run the path token by token; return the logits after the last one."""
        hidden = path.hidden
        for step, token in enumerate(path.tokens):
            output = self._runner.run_model(
                self._batch(step, token, hidden), attn_backend=self._backend
            )
            hidden = output.hidden_states
        return output.next_token_logits[:1].clone()

    def _batch(self, step: int, token: int, hidden: Tensor | None) -> ForwardBatch:
        count, length = self._rows, self._length + step
        lens = torch.full((count,), length, device=self._free.device)
        identity = self._views.identity[:, self._row : self._row + 1]
        rows, serials, salts, rids = identity.expand(-1, count).contiguous().unbind()
        if hidden is not None:
            hidden = hidden[:1].expand(count, -1).contiguous()
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=torch.full_like(lens, token),
            positions=lens,
            out_cache_loc=self._free[step].expand(count).contiguous(),
            prefix_lens=lens,
            extend_lens=torch.ones_like(lens),
            seq_lens=lens + 1,
            lens_cpu=HostLens(prefix_lens=[length] * count, extend_lens=[1] * count),
            capture_hidden_mode=self._draft._hidden_mode,
            spec_info=EagleDraftInput(hidden_states=hidden),
            req_pool_indices=rows,
            req_serial=serials,
            salt=salts,
            rids_int=rids,
        )


def tree_of(levels: DraftLevels, shape: TreeShape, root: int, length: int) -> DraftTree:
    tree, device_ = DraftTree.allocate(1, shape, device="cpu"), "cpu"
    build_tree_ref(
        DraftLevels(
            scores=levels.scores.to(device_),
            tokens=levels.tokens.to(device_),
            parents=levels.parents.to(device_),
            beam_scores=levels.beam_scores.to(device_),
        ),
        shape=shape,
        root_tokens=torch.tensor([root]),
        seq_lens=torch.tensor([length]),
        tree=tree,
    )
    return tree


def is_close_call(levels: DraftLevels, shape: TreeShape) -> bool:
    """Whether two scores at a choice are too close to tell, within a level or at the
    cut of the tree."""
    k = shape.topk
    blocks = [(levels.scores[0], shape.num_draft_tokens - 1)]
    for level in range(1, shape.num_steps):
        begin = k + k * k * (level - 1)
        blocks.append((levels.scores[0, begin : begin + k * k], k))
    for scores, kept in blocks:
        best = scores.sort(descending=True).values[: kept + 1]
        gaps = best[:-1] - best[1:]
        if bool((gaps < CLOSE[device()] * best[:-1]).any()):
            return True
    return False


def compare_trees(
    engine: EngineHarness,
    patch: pytest.MonkeyPatch,
    compare: Callable[[DraftLevels, DraftLevels, DraftTree, DraftTree], None],
    *,
    trees: int = TREES,
) -> int:
    """Serve a while. Call `compare` with the levels and trees of each request, as they
    were drafted and as `Alone` drafts them. Return how many trees were compared."""
    draft = worker_of(engine).draft_worker
    assert isinstance(draft, EagleDraftWorker)
    whole, compared = draft.draft, 0

    def drafted(bs: int, **options: Any) -> None:
        nonlocal compared
        whole(bs, **options)
        views, shape = draft.workspace.rows(bs), draft.workspace.shape
        for row in range(bs):
            alone = Alone(draft, views, row).levels()
            if is_close_call(alone, shape):
                continue
            tree = views.tree.narrow(bs)
            own = DraftTree(
                **{
                    name: getattr(tree, name)[row : row + 1].cpu()
                    for name in DraftTree.__slots__
                }
            )
            found = DraftLevels(
                **{
                    name: getattr(views.levels, name)[row : row + 1]
                    for name in DraftLevels.__slots__
                }
            )
            root, length = int(own.tokens[0, 0]), int(views.seq_lens[row])
            compare(found, alone, own, tree_of(alone, shape, root, length))
            compared += 1

    with patch.context() as inside:
        inside.setattr(draft, "draft", drafted)
        for _ in range(MOST_STEPS):
            engine.scheduler.step()
            if compared >= trees:
                break
    return compared


def serve(
    folders: ModelFolders, configuration: SpecConfig, times: int = 1, **options: Any
) -> EngineHarness:
    """Create an engine with three requests that wait, or so many times three."""
    engine = spec_engine(folders, configuration, **options)
    submit(engine, VOCAB_SIZES[configuration.model], times)
    return engine


def submit(engine: EngineHarness, vocab: int, times: int = 1) -> None:
    rng = random.Random(vocab)
    for length in (23, 64, 9) * times:
        prompt = [rng.randrange(vocab) for _ in range(length)]
        engine.submit(prompt, max_new_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_trees_are_those_of_branches_alone(
    folders: ModelFolders, configuration: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"cuda_graph_bs": [1, 2, 4]} if device() == "cuda" else {}
    # Where drafts are good, a request has ten trees.
    engine = serve(folders, configuration, count(ci=1, full=3), **options)
    assert compare_trees(engine, monkeypatch, assert_same) >= TREES


def assert_same(
    found: DraftLevels, alone: DraftLevels, own: DraftTree, tree: DraftTree
) -> None:
    assert torch.equal(found.tokens, alone.tokens)
    assert torch.equal(found.parents, alone.parents)
    torch.testing.assert_close(found.scores, alone.scores, rtol=1e-4, atol=1e-7)
    for name in ("tokens", "positions", "next_token", "next_sibling", "mask"):
        assert torch.equal(getattr(own, name), getattr(tree, name)), name


@pytest.mark.parametrize(
    ("architecture", "page"),
    [("Qwen3_5ForCausalLM", 16), ("DeepseekV3ForCausalLM", 4)],
)
def test_trees_of_a_head_inside_the_checkpoint(
    tmp_path: FilePath,
    architecture: str,
    page: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_text_model(tmp_path, architecture, seed=11)
    add_head(folder, architecture)
    engine = EngineHarness(
        folder,
        device=device(),
        dtype="float32",
        context_length=CONTEXT,
        max_running_requests=12,
        page_size=page,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        speculative_algorithm="NEXTN",
        speculative_eagle_topk=3,
        speculative_num_steps=4,
        speculative_num_draft_tokens=12,
    )
    submit(engine, 264)
    assert compare_trees(engine, monkeypatch, assert_same) >= TREES


def test_trees_while_the_shape_changes(
    folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches of another shape begin at other columns of the same region."""
    shapes = {"shapes": [[2, 2, 5], [3, 4, 12], [4, 4, 16]]}
    engine = serve(
        folders,
        config("llama", "EAGLE3", 4, 4, 16, 0),
        speculative_adaptive=True,
        speculative_adaptive_config=json.dumps(shapes),
        skip_server_warmup=True,
    )
    engine.scheduler.shapes.policy = InTurn(engine.scheduler.shapes, 1)
    seen = set()

    def compare(
        found: DraftLevels, alone: DraftLevels, own: DraftTree, tree: DraftTree
    ) -> None:
        seen.add(own.tokens.shape[1])
        assert_same(found, alone, own, tree)

    compare_trees(engine, monkeypatch, compare, trees=12)
    assert seen == {5, 12, 16}


def test_whole_pages_per_branch_are_not_exact(
    folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can tell: branches of the paged layout read their columns."""
    engine = serve(folders, CONFIGURATIONS[0], speculative_draft_layout="paged")
    differing = []

    def compare(
        found: DraftLevels, alone: DraftLevels, own: DraftTree, tree: DraftTree
    ) -> None:
        differing.append(not torch.equal(found.tokens, alone.tokens))

    compare_trees(engine, monkeypatch, compare)
    assert any(differing)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

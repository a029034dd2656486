"""Hybrid models that verify drafts: each node of a tree sees what its path would have
decoded, and the accepted path alone reaches the states."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.srt.forward.context import ForwardContext, forward_context
from sglang.srt.forward.state_plan import DueCheckpoints
from sglang.srt.layers.state.forward import StateCommit, StateForward, StateTrees
from sglang.srt.layers.state.layer import StateLayer
from sglang.srt.layers.state.nodes import StateNodes
from sglang.srt.mem_cache.state_pool import StatePool
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness, Finished
from sglang.test.hybrid_models import write_hybrid_model
from sglang.test.scale import count
from sglang.test.spec_canary_traffic import speculating, worker_of
from sglang.test.spec_parity import (
    CONTEXT,
    Ask,
    Traffic,
    answer_all,
    assert_parity,
    check_no_leak,
    make_asks,
)
from sglang.test.spec_world import device, plain_engine
from sglang.test.state_problem import Draws
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=20, suite="cpu", full_time=200)
register_cuda_ci(est_time=60, suite="cuda")

LFM2, QWEN3_5 = "Lfm2ForCausalLM", "Qwen3_5ForCausalLM"
ROWS = 3
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def fold(layer: StateLayer, x: Tensor, state: StateForward) -> Tensor:
    with forward_context(ForwardContext(attn_backend=None, state=state)):
        return layer(x.clone(), None)


def decoded(
    layer: StateLayer, x: Tensor, pool: StatePool, slot: int, nodes: list[int]
) -> Tensor:
    """Decode some nodes one after the other; return the last one's result."""
    slots = torch.tensor([slot])
    state = StateForward(pool=pool, slots=slots)
    found = [fold(layer, x[node : node + 1], state)[0] for node in nodes]
    return found[-1]


@pytest.mark.parametrize("chains", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("architecture", [LFM2, QWEN3_5])
@torch.inference_mode()
def test_nodes_and_commits_equal_decoding(
    tmp_path: Path, architecture: str, chains: bool
) -> None:
    harness = ForwardHarness(write_hybrid_model(tmp_path, architecture), device="cpu")
    layer = next(
        module
        for module in harness.runner.model.modules()
        if isinstance(module, StateLayer)
    )
    shape, draws = harness.runner.state_pool.shape, Draws(seed=int(chains))
    pool, twin = (StatePool(shape, size=8, device="cpu") for _ in range(2))
    trees = draws.trees(ROWS, 7, chains=chains)
    slots = draws.slots(ROWS, 9)
    prompt = draws.normal(ROWS * 5, layer.width)
    for each in (pool, twin):
        begun = StateForward(
            pool=each,
            slots=slots,
            qo_indptr=draws.indptr([5] * ROWS),
            has_state=torch.zeros(ROWS, dtype=torch.bool),
        )
        fold(layer, prompt, begun)
    before = pool.conv.clone()
    # Room for more nodes than there are.
    nodes = StateNodes(pool, size=ROWS * 9)
    x = draws.normal(ROWS * 7, layer.width)
    verified = StateForward(
        pool=pool,
        slots=slots,
        trees=StateTrees(parent_index=trees.parent_index, mask=trees.mask, nodes=nodes),
    )
    found = fold(layer, x, verified)
    assert torch.equal(pool.conv, before)
    for node in range(len(x)):
        slot = int(slots[node // 7])
        scratch = StatePool(shape, size=8, device="cpu")
        for part, source in zip(scratch._tensors(), twin._tensors(), strict=True):
            part.copy_(source)
        path = trees.ancestors(node)
        expected = decoded(layer, x, scratch, slot, path)
        torch.testing.assert_close(found[node], expected, **TOLERANCE)
    layer.commit(
        StateCommit(
            pool=pool,
            nodes=nodes,
            slots=slots,
            path=trees.path,
            path_lens=trees.path_lens,
            num_nodes=len(x),
        )
    )
    assert trees.path_lens.any()
    for row, length in enumerate(trees.path_lens.tolist()):
        path = trees.path[row, :length].tolist()
        if path:
            decoded(layer, x, twin, int(slots[row]), path)
    states = (pool.layer(layer.layer_id), twin.layer(layer.layer_id))
    torch.testing.assert_close(*(state.conv[slots] for state in states), **TOLERANCE)
    if states[0].matrix is not None:
        matrices = (state.matrix[slots] for state in states)
        torch.testing.assert_close(*matrices, **TOLERANCE)


def write_repeating_models(folder: Path, architecture: str) -> tuple[Path, Path]:
    """Write a target that often repeats a token, and a draft that always does: in the
    residual stream the token outweighs what layers add to it."""
    target = write_hybrid_model(folder / "target", architecture)
    draft = write_tiny_model(
        folder / "draft", "LlamaForCausalLM", tie_word_embeddings=True
    )
    outweighs = {LFM2: 5.5, QWEN3_5: 7.0}[architecture]
    for path, factor in ((target, outweighs), (draft, 100.0)):
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"] *= factor
        save_file(tensors, file, metadata={"format": "pt"})
    return target, draft


@pytest.mark.parametrize(
    ("architecture", "tree", "page_size", "overlap"),
    [
        (LFM2, (1, 3, 4), 1, True),
        (LFM2, (3, 4, 12), 16, False),
        (QWEN3_5, (1, 4, 5), 4, False),
        (QWEN3_5, (3, 3, 10), 1, True),
    ],
)
def test_drafts_change_no_answer(
    tmp_path: Path,
    architecture: str,
    tree: tuple[int, int, int],
    page_size: int,
    overlap: bool,
) -> None:
    target, draft = write_repeating_models(tmp_path, architecture)
    asks = make_asks(
        random.Random(architecture),
        total=count(ci=12, full=200),
        vocab_size=264,
        new_tokens=30,
    )
    reference = plain_engine(target)
    expected = answer_all(reference, asks)
    engine = speculating(
        target,
        draft,
        tree=tree,
        device=device(),
        dtype="float32",
        speculative_algorithm="STANDALONE",
        context_length=CONTEXT,
        page_size=page_size,
        overlap=overlap,
        disable_overlap_schedule=not overlap,
        mamba_track_interval=16,
    )
    runner, lengths, folded = worker_of(engine).model_runner, [], []
    commit = runner.commit_states

    def commit_and_note(
        slots: Tensor,
        path: Tensor,
        path_lens: Tensor,
        *,
        num_nodes: int,
        prefix_lens: Tensor,
        due: DueCheckpoints | None,
    ) -> None:
        lengths.extend(path_lens.tolist())
        if due is not None:
            folded.extend(due.path_lens(prefix_lens, path_lens).tolist())
        commit(
            slots,
            path,
            path_lens,
            num_nodes=num_nodes,
            prefix_lens=prefix_lens,
            due=due,
        )

    runner.commit_states = commit_and_note
    traffic = Traffic(engine, asks, random.Random(page_size))
    found = traffic.run()
    assert_parity(asks, expected, found, aborted=traffic.aborted, reference=reference)
    # The root alone was folded, and whole paths.
    assert {1, 2, tree[1] + 1} <= set(lengths)
    # A checkpoint was taken in the middle of a path.
    assert any(0 < length <= tree[1] for length in folded)
    check_next_turns(engine, reference, asks, expected)
    check_no_leak(engine)


def check_next_turns(
    engine: EngineHarness,
    reference: EngineHarness,
    asks: Sequence[Ask],
    answers: Mapping[str, Finished],
) -> None:
    """Conversations that go on from checkpoints inside their answers."""
    turns = [
        replace(ask, prompt=[*ask.prompt, *answers[str(i)].output_ids, i])
        for i, ask in enumerate(asks)
        if len(answers[str(i)].output_ids) > 20 and ask.is_plain
        if len(ask.prompt) < CONTEXT - 70
    ]
    expected, found = answer_all(reference, turns), answer_all(engine, turns)
    assert_parity(turns, expected, found, aborted=set(), reference=reference)
    inside = [
        answer.cached_tokens
        for rid, answer in found.items()
        if answer.cached_tokens > len(turns[int(rid)].prompt) - 20
    ]
    assert inside and all(cached % 16 == 0 for cached in inside)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

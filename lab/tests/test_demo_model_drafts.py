"""The tools that train the drafts: attention of chains, the acceptance measure against
drafting for real, text that the target writes, and heads that the engine loads."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lab.demo_model import train_eagle3
from lab.demo_model.acceptance import (
    CHAIN_STEPS,
    HeldoutText,
    head_matcher,
    measure,
    model_matcher,
    walk,
)
from lab.demo_model.chain_attention import chain_attention, chain_attention_ref
from lab.demo_model.data import Split
from lab.demo_model.distill import DistillConfig, Lesson, learning_rate
from lab.demo_model.draft_heads import DraftHead, Eagle3Head, EagleHead
from lab.demo_model.draft_text import Writer, plan_training
from lab.demo_model.export_drafts import DRAFTS, Draft, export
from lab.demo_model.model import DemoConfig, DemoModel
from lab.demo_model.paths import IM_START_ID
from lab.demo_model.target_states import (
    AUX_LAYERS,
    TargetStates,
    target_logits,
    target_states,
)
from lab.demo_model.train_draft_lm import draft_lm_loss
from lab.demo_model.train_eagle import eagle_loss
from sglang.srt.configs.draft_config import layers_to_capture
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.layers.linear import LoadableParameter
from sglang.srt.layers.vocab_embedding import LMHead, VocabEmbedding
from sglang.srt.models.draft import DraftModel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness

register_cpu_ci(est_time=15, suite="lab")

SMALL = DemoConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
HEAD = dataclasses.replace(SMALL, num_hidden_layers=1)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Spec:
    hidden_states: Tensor | None


def make_target(seed: int = 0) -> DemoModel:
    torch.manual_seed(seed)
    model = DemoModel(SMALL)
    # Larger weights than for training, so that the greedy choice is not a tie.
    for weight in model.parameters():
        weight.data.mul_(4.0 if weight.dim() > 1 else 1.0)
    return model.eval().requires_grad_(False)


def choose(architecture: str, states: TargetStates) -> Tensor:
    return states.aux if architecture == "EAGLE3" else states.hidden


def make_head(architecture: str, target: DemoModel) -> tuple[DraftHead, Tensor | None]:
    torch.manual_seed(1)
    embedding = target.model.embed_tokens.weight
    if architecture == "EAGLE":
        return EagleHead(HEAD, embedding).eval(), None
    ids = torch.arange(0, 64, 2)
    norm = target.model.norm.weight
    head = Eagle3Head(HEAD, embedding, ids, final_norm=norm).eval()
    return head, ids


@pytest.mark.parametrize("steps", [1, 3])
def test_chain_attention_and_its_gradients(steps: int) -> None:
    torch.manual_seed(steps)
    leaves = [
        torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3 + 2 * steps)
    ]
    own = list(zip(leaves[3::2], leaves[4::2], strict=True))
    actual = chain_attention(*leaves[:3], own)
    expected = chain_attention_ref(*leaves[:3], own)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        rtol=1e-4,
        atol=1e-5,
    )


@given(
    accepted=st.lists(st.integers(0, 5), min_size=12, max_size=30),
    steps=st.integers(1, 5),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_walk_counts_what_a_loop_would_emit(accepted: list[int], steps: int) -> None:
    matches = np.array([[j < n for j in range(5)] for n in accepted])
    end = len(accepted)
    cycles, tokens = walk(matches, start=2, end=end, steps=steps)
    emitted, expected_cycles = [2], 0
    while emitted[-1] < end - 1:
        run = min(accepted[emitted[-1]], steps) + 1
        emitted += range(emitted[-1] + 1, min(emitted[-1] + run, end - 1) + 1)
        expected_cycles += 1
    assert (cycles, tokens) == (expected_cycles, len(emitted) - 1)


def own_text(
    target: DemoModel, *, rows: int, length: int, prompt: int, is_sampled: bool = False
) -> Tensor:
    torch.manual_seed(5)
    plan = torch.full((rows, length), -1)
    plan[:, :prompt] = torch.randint(3, 64, (rows, prompt))
    writer = Writer(target, rows=rows, length=length)
    return writer.write(plan, torch.full((rows,), is_sampled))


def test_the_writer_continues_as_the_model_would() -> None:
    target = make_target()
    ids = own_text(target, rows=3, length=24, prompt=5)
    best = target(ids).argmax(-1)
    assert torch.equal(ids[:, 5:], best[:, 4:-1])


def test_sampled_rows_differ_and_planned_tokens_stay() -> None:
    target = make_target()
    plan = torch.full((200, 6), -1)
    plan[:, :3] = torch.tensor([4, 5, 6])
    plan[:, 4] = 7
    ids = Writer(target, rows=200, length=6).write(plan, torch.arange(200) < 100)
    assert torch.equal(ids[:, [0, 1, 2, 4]], plan[:, [0, 1, 2, 4]])
    assert len(ids[:100, 3].unique()) > 1 and len(ids[100:, 3].unique()) == 1
    # 0.8 is the temperature of the draw.
    shares = (target(plan[:1, :3])[0, -1] / 0.8).softmax(-1)
    found = torch.bincount(ids[:100, 3], minlength=64) / 100
    assert (found - shares).abs().max() < 0.2


def real_chain(
    head: DraftHead, draft_ids: Tensor | None, ids: Tensor, states: Tensor, steps: int
) -> list[int]:
    """Drafts after the root ids[-1] by feeding the head its own tokens."""
    drafted: list[int] = []
    for _ in range(steps):
        fed = torch.cat((ids, torch.tensor([drafted], dtype=torch.int64)), 1)
        depth = len(drafted) + 1
        # The anchor of the root is the last of the window; its step reads fed tokens.
        *_, last = head.unroll(fed, states, steps=depth)
        token = int(last.logits[0, -1].argmax())
        drafted.append(token if draft_ids is None else int(draft_ids[token]))
    return drafted


@pytest.mark.parametrize("architecture", ["EAGLE", "EAGLE3"])
def test_the_measure_equals_drafting_for_real(architecture: str) -> None:
    """Chains that read their own tokens get as many accepted as the measure says."""
    target = make_target()
    head, draft_ids = make_head(architecture, target)
    # The measure holds for any text; sampled text repeats itself less.
    text = own_text(target, rows=2, length=24, prompt=6, is_sampled=True)
    train(head, draft_ids, target, text)
    matcher = head_matcher(
        head, target, lambda s: choose(architecture, s), draft_ids, device=CPU
    )
    found = matcher(text)
    states = choose(architecture, target_states(target, text))
    depths = set()
    with torch.no_grad():
        for row in range(2):
            for root in range(6, 24 - 1 - max(CHAIN_STEPS)):
                drafted = real_chain(
                    head,
                    draft_ids,
                    text[row : row + 1, : root + 1],
                    states[row : row + 1],
                    max(CHAIN_STEPS),
                )
                truth = text[row, root + 1 : root + 1 + len(drafted)].tolist()
                equal = [a == b for a, b in zip(drafted, truth, strict=True)]
                accepted = [*equal, False].index(False)
                measured = [*found[row, root].tolist(), False].index(False)
                assert measured == accepted
                depths.add(accepted)
    assert len(depths) > 1  # else the comparison says nothing


def train(
    head: DraftHead, draft_ids: Tensor | None, target: DemoModel, text: Tensor
) -> None:
    """A few steps towards the text itself, so that some chains are right and others
    are not."""
    logits = 20.0 * torch.nn.functional.one_hot(text.roll(-1, dims=1), 64).float()
    lesson = Lesson(ids=text, states=target_states(target, text), logits=logits)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        if isinstance(head, Eagle3Head):
            assert draft_ids is not None
            loss, _ = train_eagle3.eagle3_loss(head, draft_ids, lesson)
        else:
            assert isinstance(head, EagleHead)
            loss, _ = eagle_loss(head, lesson)
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_the_target_is_a_perfect_draft_of_itself() -> None:
    target = make_target()
    ids = own_text(target, rows=2, length=30, prompt=6)
    text = HeldoutText(ids=ids, prompt_lens=[6, 6], ends=[30, 30], new_tokens=24)
    report = measure(text, model_matcher(target, device=CPU), rows=1)
    lengths = report["accept_length"]
    assert isinstance(lengths, dict)
    # 23 tokens after the first: 5 whole runs of 4 and 3; 3 whole runs of 6 and 5.
    assert lengths == {"3": round(46 / 12, 4), "5": round(46 / 8, 4)}
    assert report["right_by_depth"] == [1.0] * 5


def test_draft_lm_loss_is_least_for_the_target_itself() -> None:
    target, other = make_target(0), make_target(1)
    ids = torch.randint(64, (2, 20))
    states = target_states(target, ids)
    lesson = Lesson(ids=ids, states=states, logits=target_logits(target, states))
    best, parts = draft_lm_loss(target, lesson)
    worse, _ = draft_lm_loss(other, lesson)
    assert best < worse and parts["right"] == 1.0


def test_states_are_those_of_the_model() -> None:
    target = make_target()
    ids = torch.randint(64, (1, 9))
    states = target_states(target, ids)
    torch.testing.assert_close(target_logits(target, states), target(ids))
    x = target.model.embed_tokens(ids)
    for layer in target.model.layers[: AUX_LAYERS[0]]:
        x = layer(x, target.cos[:9], target.sin[:9])
    torch.testing.assert_close(states.aux[..., :32], x)


def test_the_plan_alternates_between_documents_and_own_text() -> None:
    code = [np.arange(100, 600, dtype=np.uint16)]
    chat = [np.array([1, 50, 51, 2, IM_START_ID, 60, 61, 70, 71], dtype=np.uint16)]
    split = Split(code=code, chat=chat, code_bytes=0, chat_bytes=0)
    plan = plan_training(split, rows=40, length=600, chat_marker=3, seed=0)
    share = (plan < 0).mean()
    assert 0.3 < share < 0.7
    assert (plan[:, 0] == 0).all()
    answers = np.flatnonzero(plan.ravel() == 61)
    inner = answers[answers % 600 < 590]
    assert len(inner) > 5 and (plan.ravel()[inner + 1] == -1).all()
    assert not np.isin(plan, (70, 71)).sum() > np.isin(plan, (72, 73)).sum()


def test_vocabulary_maps_agree(tmp_path: Path) -> None:
    counts = torch.zeros(4096)
    counts[1::2] = 1 + torch.rand(2048)
    ids = train_eagle3.choose_draft_ids(counts)
    maps = train_eagle3.vocabulary_maps(ids, 4096)
    assert torch.equal(ids, torch.arange(1, 4096, 2))
    assert torch.equal(maps["d2t"] + torch.arange(2048), ids)
    assert torch.equal(maps["t2d"].nonzero()[:, 0], ids)
    save_file(maps, tmp_path / "draft.safetensors")
    assert torch.equal(train_eagle3.read_draft_ids(tmp_path / "draft.safetensors"), ids)


def test_the_schedule_warms_up_and_ends_low() -> None:
    config = DistillConfig(
        seconds=1.0,
        batch=2,
        length=8,
        lr=1.0,
        weight_decay=0.0,
        seed=0,
        unroll=1,
        max_steps=9,
    )
    assert learning_rate(config, step=0, progress=0.0) < 0.05
    assert learning_rate(config, step=999, progress=0.0) == pytest.approx(1.0)
    assert learning_rate(config, step=999, progress=1.0) == pytest.approx(0.02)


def write_head(folder: Path, architecture: str, head: DraftHead) -> None:
    """Write a head like export_drafts.py, at the sizes of the test."""
    state = dict(head.state_dict())
    config = HEAD.to_transformers() | {
        "architectures": [f"LlamaForCausalLM{architecture.capitalize()}"],
        "tie_word_embeddings": False,
    }
    if architecture == "EAGLE3":
        ids = torch.arange(0, 64, 2)
        state |= train_eagle3.vocabulary_maps(ids, 64)
        config["draft_vocab_size"] = 32
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "m.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", ["EAGLE", "EAGLE3"])
def test_the_engine_computes_what_was_trained(
    tmp_path: Path, architecture: str
) -> None:
    """A trained head's chain in the engine: prefix, then two steps on its own state."""
    target = make_target()
    head, _ = make_head(architecture, target)
    write_head(tmp_path, architecture, head)
    harness = ForwardHarness(tmp_path, is_draft_worker=True)
    model = harness.runner.model
    assert isinstance(model, DraftModel)
    embed, lm_head = VocabEmbedding(64, 32), LMHead(64, 32)
    for part in (embed, lm_head):
        part.weight = LoadableParameter.create(
            target.model.embed_tokens.weight.detach().clone()
        )
    model.set_embed_and_head(embed, lm_head)
    ids = torch.randint(64, (1, 14))
    states = choose(architecture, target_states(target, ids))
    with torch.no_grad():
        steps = list(head.unroll(ids, states, steps=3))
    last = ids.shape[1] - 3 - 1  # the anchor whose chain the engine follows
    row = harness.new_row(ids[0, 1 : last + 2].tolist())
    fed = states[0, : last + 1]
    for j, step in enumerate(steps):
        mode = ForwardMode.DECODE if j else ForwardMode.EXTEND
        if j:
            harness.append(row, int(ids[0, last + 1 + j]))
        batch = dataclasses.replace(
            harness.prepare(mode, [(row, None if j else last + 1)]),
            spec_info=Spec(hidden_states=fed),
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        output = harness.run(batch)
        torch.testing.assert_close(
            output.next_token_logits[-1], step.logits[0, last], rtol=1e-3, atol=1e-3
        )
        assert output.hidden_states is not None
        fed = output.hidden_states[-1:].clone()


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda d: d.run)
def test_export_writes_a_folder_that_the_engine_reads(
    tmp_path: Path, draft: Draft
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    save_file({"x": torch.zeros(1)}, run / "draft.safetensors")
    (run / "training.json").write_text(json.dumps(example_metrics()))
    export(draft, run, out)
    config = ModelConfig.from_path(out)
    assert config.vocab_size == 4096 and config.context_len == 2048
    if draft.algorithm == "EAGLE3":
        assert layers_to_capture(config, num_target_layers=8) == AUX_LAYERS
    assert (out / "tokenizer.json").is_file() == draft.has_tokenizer
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "| 5 | 2.5 |" in card and draft.algorithm in card


def example_metrics() -> dict[str, object]:
    return {
        "config": {"lr": 1e-3, "weight_decay": 0.1, "unroll": 5},
        "parameters": 2_600_000,
        "steps": 10,
        "tokens_seen": 1000,
        "own_text_share": 0.5,
        "seconds": 3.0,
        "machine": "CPU",
        "acceptance": {
            "accept_length": {"3": 2.0, "5": 2.5},
            "right_by_depth": [0.7, 0.6],
            "requests": 4,
            "new_tokens": 128,
            "tokens": 500,
        },
    }


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

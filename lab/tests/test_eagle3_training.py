"""The command that trains an EAGLE3 head for a served model: what it records is what
the model computes, and the engine drafts with what it writes."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.demo_model.draft_heads import Eagle3Head
from lab.demo_model.model import DemoConfig
from lab.demo_model.paths import ASSETS
from lab.demo_model.target_states import (
    AUX_LAYERS,
    load_target,
    target_logits,
    target_states,
)
from lab.demo_model.train_eagle3 import chain_loss
from lab.eagle3 import classes, corpus, data, prompts, train
from lab.eagle3.record import Document, Recorder, build_target, write_documents
from sglang.bench_utils.speed_bench import read_rows
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=12, suite="lab")

ROWS, LENGTH = 4, 48
CPU = torch.device("cpu")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """A few files of the standard library instead of all on this machine."""
    names = ("argparse", "json", "random", "heapq", "statistics", "string", "typing")
    files = [(f"{name}.py", Path(__import__(name).__file__ or "")) for name in names]
    monkeypatch.setattr(corpus, "source_files", lambda: files)
    monkeypatch.setattr(corpus, "is_heldout", lambda path: path < "b")
    return files


def some_prompts() -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(3)
    for i in range(9):
        yield torch.randint(3, 4096, (5 + 3 * i,), generator=generator).tolist()


def test_recorded_states_are_those_of_the_reference() -> None:
    scheduler, io = build_target(
        str(ASSETS), device="cpu", rows=ROWS, length=LENGTH, dtype="float32"
    )
    model: Any = scheduler.worker.model_runner.model
    model.capture_layers(AUX_LAYERS)
    stack = model.forward_stack
    recorder = Recorder(model, rows=ROWS, length=LENGTH, device="cpu")
    write_documents(
        scheduler,
        io,
        some_prompts(),
        recorder,
        rows=ROWS,
        length=LENGTH,
        seconds=600,
        max_tokens=100_000,
    )
    assert model.forward_stack == stack
    # Rows are used again; a document of few tokens is left out.
    assert ROWS < len(recorder.documents) <= 9
    starts = {tuple(prompt) for prompt in some_prompts()}
    target = load_target(ASSETS, CPU, torch.float32)
    for document in recorder.documents:
        ids = document.ids.tolist()
        assert any(tuple(ids[: len(start)]) == start for start in starts)
        states = target_states(target, document.ids[None])
        torch.testing.assert_close(
            document.aux.float(), states.aux[0], rtol=0.02, atol=0.02
        )
        torch.testing.assert_close(
            document.hidden.float(), states.hidden[0], rtol=0.02, atol=0.02
        )
        logits = target_logits(target, states)[0]
        chosen = logits.gather(1, document.best[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).abs().max() < 1e-3


def test_the_engine_drafts_with_a_trained_head(
    sources: list[tuple[str, Path]], tmp_path: Path
) -> None:
    head = tmp_path / "head"
    command = ["--model", str(ASSETS), "--minutes", "60", "--length", "96"]
    command += ["--max-tokens", "600", "--max-steps", "2", "--rows", "8"]
    command += ["--draft-vocab", "512", "--unroll", "3", "--intermediate-size", "64"]
    train.main([*command, "--out", str(head)])
    # A second run continues the first, with prompts that were written before.
    written = tmp_path / "prompts"
    prompts.main(["--model", str(ASSETS), "--count", "40", "--out", str(written)])
    further = tmp_path / "further"
    command += ["--resume", str(head), "--prompts", str(written)]
    train.main([*command, "--out", str(further)])
    assert (further / "heldout.jsonl").read_text() == (
        head / "heldout.jsonl"
    ).read_text()
    assert json.loads((further / "training.json").read_text())["steps"] == 2
    items = [json.loads(line) for line in (head / "heldout.jsonl").open()]
    assert {item["path"] for item in items} == {"argparse.py"}
    ids = items[0]["ids"][:40]
    options: dict[str, Any] = {"dtype": "float32", "max_running_requests": 2}
    plain = EngineHarness(ASSETS, **options).generate(ids, max_new_tokens=24)
    drafting = EngineHarness(
        ASSETS,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(further),
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        **options,
    )
    assert drafting.generate(ids, max_new_tokens=24).output_ids == plain.output_ids


def test_no_file_is_in_both_splits(sources: list[tuple[str, Path]]) -> None:
    found = {
        heldout: list(corpus.read_texts(heldout=heldout)) for heldout in (True, False)
    }
    paths = {heldout: {text.path for text in found[heldout]} for heldout in found}
    assert paths[True] == {"argparse.py"}
    assert len(paths[False]) > 3 and not paths[True] & paths[False]
    texts = [text.text for part in found.values() for text in part]
    assert len(set(texts)) == len(texts)
    assert {text.kind for text in found[False]} == {"chat", "docs", "code"}


def test_files_of_a_package_are_on_one_side() -> None:
    names = [f"{package}/{file}.py" for package in "abcdefgh" * 9 for file in "xyz"]
    assert all(
        corpus.is_heldout(name) == corpus.is_heldout(f"{name[0]}.py") for name in names
    )
    many = [corpus.is_heldout(f"package{i}/__init__.py") for i in range(400)]
    assert 8 <= sum(many) <= 40


def test_rows_of_classes_are_of_held_out_text(
    sources: list[tuple[str, Path]], tmp_path: Path
) -> None:
    file = tmp_path / "classes.jsonl"
    classes.main([str(file)])
    rows = read_rows(str(file))
    counts = Counter(row.category for row in rows)
    assert set(counts) == {rows.__name__ for rows in classes.CLASSES}
    assert counts["reasoning"] == classes.ROWS_PER_CLASS
    trained = {text.text for text in corpus.read_texts(heldout=False)}
    assert not [row for row in rows if any(text in row.turns[0] for text in trained)]


def test_a_head_is_kept_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []

    def save(folder: Path, *others: object) -> None:
        kept.append(folder.name)

    monkeypatch.setattr(train, "save", save)
    with tempfile.TemporaryDirectory() as out:
        args = argparse.Namespace(out=Path(out), checkpoint_seconds=60)
        for seconds in (12.0, 59.9, 61.0, 90.0, 121.5, 300.2):
            row = {"seconds": seconds}
            train.save_now_and_then(args, Any, Any, Any, row)  # type: ignore[arg-type]
    assert kept == ["at_0060", "at_0120", "at_0300"]


def test_a_broken_source_has_no_docstrings() -> None:
    assert corpus.docstrings("def f(:\n") == []
    assert corpus.docstrings(f'"""{"x " * 200}"""')


def test_a_model_of_few_layers_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "LlamaForCausalLM")
    out = tmp_path / "head"
    command = ["--model", str(model), "--out", str(out), "--rows", "2"]
    with pytest.raises(SystemExit, match="too few for the three"):
        train.main([*command, "--length", "32"])


def document(length: int, *, seed: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    return Document(
        ids=torch.randint(0, 64, (length,), generator=generator),
        aux=torch.randn(length, 48, generator=generator),
        hidden=torch.randn(length, 16, generator=generator),
        best=torch.randint(0, 64, (length,), generator=generator),
    )


def test_padding_has_no_loss() -> None:
    torch.manual_seed(0)
    sizes = DemoConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    draft_ids = torch.arange(0, 64, 2)
    head = Eagle3Head(sizes, torch.randn(64, 16), draft_ids, final_norm=torch.ones(16))

    def loss_of(batch: data.Batch) -> float:
        logits = batch.hidden @ head.lm_head.weight.T
        loss, _ = chain_loss(
            head,
            draft_ids,
            ids=batch.ids,
            aux=batch.aux,
            shares=logits.softmax(-1),
            best=batch.best,
            unroll=2,
        )
        return loss.item()

    short, long = document(20, seed=1), document(41, seed=2)
    alone = data.pad([short])
    beside = data.pad([short, long])
    names = ("ids", "aux", "hidden", "best")
    first = data.Batch(**{name: getattr(beside, name)[:1] for name in names})
    assert first.ids.shape[1] == 41 > alone.ids.shape[1]
    # Up to the last anchor whose chain ends in the document.
    cut = data.Batch(**{name: getattr(first, name)[:, :22] for name in names})
    assert loss_of(first) == pytest.approx(loss_of(cut), rel=1e-5)


def test_every_document_comes_once_an_epoch() -> None:
    documents = [document(10 + i, seed=i) for i in range(11)]
    stream = data.batches(documents, size=3, unroll=2, seed=0)
    found: list[int] = []
    while len(found) < 22:
        found += [int((row >= 0).sum()) for row in next(stream).best]
    assert sorted(found[:11]) == sorted(found[11:]) == list(range(10, 21))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

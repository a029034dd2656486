"""Records as files: what is in them, and what happens with bad ones."""

from __future__ import annotations

import dataclasses
import json
import stat
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.explain import explain
from kv_canary.reporter import CanaryViolation
from sglang.srt.replay.playing.command import main
from sglang.srt.replay.playing.player import CannotReplay, Setting, play
from sglang.srt.replay.playing.restore import restore
from sglang.srt.replay.recording import identity, pseudonyms
from sglang.srt.replay.recording.checkpoint import save_checkpoint
from sglang.srt.replay.recording.pseudonyms import Pseudonyms
from sglang.srt.replay.recording.record_file import (
    BadRecord,
    decode_record,
    encode_record,
    read_record,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.canary_traffic import CONTEXT, VOCAB, canary_of, faults_of, plant
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.replay_traffic import (
    LONG_AGO,
    check_same,
    record_of,
    recorded_engine,
    replayed,
    serve,
)
from sglang.test.scale import count
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=4, suite="cpu")

SECRET = "the-key-of-the-house"
WORDS = "words of a client"
ALPHABET, LENGTHS = 12, st.lists(st.integers(0, 3), max_size=12)


@pytest.fixture(scope="module")
def incident(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An incident file with its record; tests copy it."""
    folder = tmp_path_factory.mktemp("incidents")
    with pytest.MonkeyPatch.context() as patch:
        # Under 8 of 399 keys the damaged record suited the other tokens' KV.
        patch.setattr(pseudonyms, "secrets", SimpleNamespace(randbits=lambda bits: 1))
        plant(
            model,
            "record",
            seed=1,
            kv_canary_report_dir=str(folder),
            kv_canary_record=8,
            api_key=SECRET,
        )
    return next(folder.glob("*.json"))


def copy_of(incident: Path, folder: Path, **changes: Any) -> Path:
    """The incident and its record in `folder`, the record's origin changed."""
    record = read_record(incident.with_suffix(".record"))
    origin = dataclasses.replace(record.origin, **changes)
    copy = folder / incident.name
    copy.write_bytes(incident.read_bytes())
    changed = encode_record(dataclasses.replace(record, origin=origin))
    copy.with_suffix(".record").write_bytes(changed)
    return copy


# -- what is in them -----------------------------------------------------------------


def test_an_incident_says_how_to_replay_it(incident: Path) -> None:
    document = json.loads(incident.read_text())
    record = incident.with_suffix(".record")
    assert document["record"] == record.name
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    said = explain(document)
    assert f"python -m sglang.srt.kv_canary.replay {incident.name}" in said


def test_no_key_and_no_word_of_a_client_is_in_a_record(
    model: Path, tmp_path: Path
) -> None:
    contents = {}
    for has_tokens in (False, True):
        harness = recorded_engine(
            model,
            tmp_path,
            kv_canary_report_tokens=has_tokens,
            api_key=SECRET,
            admin_api_key=SECRET + "2",
        )
        marked = [7, 7, 7, 901, 902, 903, 904, 905]
        harness.generate(marked, max_new_tokens=3, regex=WORDS, logit_bias={904: -1.0})
        harness.generate(marked, max_new_tokens=3, stop_token_ids=[905])
        record = record_of(harness)
        contents[has_tokens] = repr(record)
        tokens = [r.tokens.tolist()[: len(marked)] for r in record.requests]
        assert all((t == marked) == has_tokens for t in tokens)
        # They still share their prompt.
        assert tokens[0] == tokens[1]
    for text in contents.values():
        assert SECRET not in text
    assert WORDS in contents[True]
    assert WORDS not in contents[False]


def test_a_checkpoint_keeps_the_counters(model: Path, tmp_path: Path) -> None:
    """Serials, and seeds that nobody asked for, go on where they were."""
    harness = recorded_engine(model, tmp_path / "old")
    for start in (0, 100, 200):
        harness.generate(range(start, start + 20), max_new_tokens=2)
    harness.run()
    while harness.scheduler.step():
        pass
    checkpoint = save_checkpoint(harness.scheduler)
    other = recorded_engine(model, tmp_path / "new").scheduler
    assert (other.num_created, other.idle_checked) != (3, True)
    restore(other, checkpoint, create=lambda serial: pytest.fail("nobody is left"))
    assert (other.num_created, other.idle_checked) == (3, True)


@settings(max_examples=count(ci=40, full=2000), deadline=None)
@given(st.lists(LENGTHS, max_size=8), st.integers(0, 2**64 - 1))
def test_other_tokens_share_prefixes_as_the_real_ones_do(
    sequences: list[list[int]], key: int
) -> None:
    names = Pseudonyms(ALPHABET, key=key)
    for tokens in sequences:
        # In two pieces, as runs of a tree come.
        array, half = np.array(tokens, dtype=np.int64), len(tokens) // 2
        state = names.add(array[:half], after=names.root(None), start=0)
        names.add(array[half:], after=state, start=half)
    pieces = [piece.tolist() for piece in names.replace()]
    replaced = [a + b for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    assert [len(r) for r in replaced] == [len(s) for s in sequences]
    assert all(0 <= token < ALPHABET for r in replaced for token in r)
    for one, other in pairwise(range(len(sequences))):
        assert common(replaced[one], replaced[other]) == common(
            sequences[one], sequences[other]
        )


def common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_namespaces_do_not_share_tokens() -> None:
    names = Pseudonyms(1 << 20, key=1)
    tokens = np.arange(50, dtype=np.int64)
    for namespace in (None, "a", "a"):
        names.add(tokens, after=names.root(namespace), start=0)
    none, first, second = (piece.tolist() for piece in names.replace())
    assert first == second
    assert common(none, first) == 0


def test_a_log_is_bounded(model: Path, tmp_path: Path) -> None:
    """Two generations of 10 forwards, or of half as many as the prefix tree has runs,
    however long the engine serves."""
    harness = recorded_engine(
        model, tmp_path, kv_canary_record=10, max_total_tokens=300
    )
    runs = 0
    for turn in range(6):
        serve(harness, seed=turn, requests=10, steps=10_000)
        runs = max(runs, sum(1 for _ in harness.scheduler.cache.iter_nodes()))
        record = record_of(harness)
        assert 10 <= record.num_launches <= 2 * max(10, runs)
        assert len(record.requests) <= 10 * (turn + 1)
    assert canary_of(harness).next_forward > 3 * record.num_launches


# -- bad ones ------------------------------------------------------------------------


def refusal(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line of a replay that is refused."""
    capsys.readouterr()
    assert main([str(path), *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("cannot replay: ")
    return said


def test_a_cut_or_changed_record_is_refused(incident: Path) -> None:
    data = incident.with_suffix(".record").read_bytes()
    for length in range(0, len(data), 64):
        with pytest.raises(BadRecord):
            decode_record(data[:length], name="cut")
    for at in range(0, len(data), 97):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(BadRecord):
            decode_record(changed, name="changed")


@settings(max_examples=count(ci=50, full=5000), deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_a_foreign_file_is_refused(data: bytes, has_head: bool) -> None:
    import hashlib

    if has_head:
        data = b"KVRECORD" + hashlib.sha256(data).digest() + data
    with pytest.raises(BadRecord):
        decode_record(data, name="foreign")


def test_a_bad_incident_file_is_refused_in_one_line(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = incident.read_bytes()
    bad = tmp_path / "bad.json"
    for length in range(0, len(whole) - 2, 64):
        bad.write_bytes(whole[:length])
        assert "not an incident file, or cut" in refusal(bad, capsys)
    bad.write_bytes(b"[" * 100_000)
    assert "nested too deeply" in refusal(bad, capsys)
    document = json.loads(whole)
    for key, foreign in (
        *(("diagnosis", 1), ("forward", "x"), ("forward", None), ("reasons", [1])),
        *(("slot", [1]), ("position", {}), ("group", [[]])),
    ):
        changed = [document["violations"][0] | {key: foreign}]
        bad.write_text(json.dumps(document | {"violations": changed}))
        assert "not an incident file, or cut" in refusal(bad, capsys)
    for name, expected in (
        ("../elsewhere.record", "not a file beside it"),
        ("gone.record", "cannot be read"),
        (None, "it has no record"),
    ):
        bad.write_text(json.dumps(document | {"record": name}))
        assert expected in refusal(bad, capsys)
    assert "cannot be read" in refusal(tmp_path / "nowhere.json", capsys)


def test_another_version_or_model_is_refused_without_force(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(incident, tmp_path, version="0.0.1")
    assert "recorded by version 0.0.1" in refusal(other, capsys)
    capsys.readouterr()
    assert main([str(other), "--force"]) == 0
    assert "note        it was recorded by version 0.0.1" in capsys.readouterr().out
    smaller = write_mock_model(
        tmp_path / "smaller", vocab_size=VOCAB // 2, max_position_embeddings=CONTEXT
    )
    of_model = ("--model-path", str(smaller))
    assert "the target model is another one" in refusal(incident, capsys, *of_model)
    # Its vocabulary does not even fit.
    assert "a vocabulary of" in refusal(incident, capsys, "--force", *of_model)
    missing = ("--model-path", str(tmp_path / "missing"))
    assert "the recorded model is not here" in refusal(incident, capsys, *missing)


def test_an_unknown_variable_of_a_record_is_refused(
    incident: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign record must not set just any variable of the process."""
    changed = copy_of(incident, tmp_path, environment={"PATH": "/nowhere"})
    assert "PATH is no variable" in refusal(changed, capsys)


def test_the_digest_of_a_model_follows_configuration_and_weights(
    model: Path, tmp_path: Path
) -> None:
    digests = set()
    for i, (config, weights) in enumerate([("{}", b"a"), ("{ }", b"a"), ("{}", b"b")]):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        digests.add(identity.model_digest(folder))
    assert len(digests) == 3


# -- what is not recorded ------------------------------------------------------------


def test_a_model_with_windows_replays_from_the_start_alone(tmp_path: Path) -> None:
    windows = write_mock_model(
        tmp_path / "windows",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=24,
    )
    harness = recorded_engine(windows, tmp_path, kv_canary_record=20)
    serve(harness, seed=1, requests=8, steps=40)
    record = record_of(harness)
    check_same(replayed(record), record)
    serve(harness, seed=2, requests=60, steps=10_000)
    with pytest.raises(CannotReplay, match="checkpoints of window slots"):
        play(record_of(harness), Setting())


def test_flags_without_effect_are_refused(model: Path, tmp_path: Path) -> None:
    def resolved(**flags: Any) -> ServerArgs:
        return ServerArgs(model_path=str(model), device="cpu", **flags)

    folder = {"kv_canary_report_dir": str(tmp_path)}
    assert resolved().kv_canary_record == 0
    assert resolved(kv_canary="log").kv_canary_record == 0
    assert resolved(kv_canary="log", **folder).kv_canary_record == LONG_AGO
    off = resolved(kv_canary="log", kv_canary_record=0, **folder)
    assert off.kv_canary_record == 0
    with pytest.raises(ValueError, match="--kv-canary-record 5 has no effect"):
        resolved(kv_canary_record=5)
    with pytest.raises(ValueError, match="set --kv-canary-report-dir too"):
        resolved(kv_canary="raise", kv_canary_record=5)
    draft = write_mock_draft(
        tmp_path / "draft",
        kind="EAGLE",
        source="hidden",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )
    drafting = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(draft),
        "kv_canary": "log",
        **folder,
    }
    assert resolved(**drafting).kv_canary_record == 0
    with_tokens = resolved(**drafting, kv_canary_report_tokens=True)
    assert with_tokens.kv_canary_record == LONG_AGO
    with pytest.raises(ValueError, match="set --kv-canary-report-tokens too"):
        resolved(**drafting, kv_canary_record=5)


def test_a_record_that_fails_costs_no_incident(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = recorded_engine(model, tmp_path)
    recorder = harness.scheduler.recorder
    assert recorder is not None
    monkeypatch.setattr(recorder, "encode", lambda: 1 / 0)
    faults_of(harness).arm("real_kv_used", seed=1)
    harness.submit(list(range(30)), max_new_tokens=20)
    with pytest.raises(CanaryViolation):
        harness.run()
    document = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert "record" not in document
    assert not list(tmp_path.glob("*.record"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

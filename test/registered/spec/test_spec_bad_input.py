"""Refusals of speculation, with the numbers and the fix; and inputs that it accepts
though they look wrong."""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import bundled_demo_draft_path, bundled_demo_model_path
from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_parity import check_no_leak
from sglang.test.spec_world import plain_engine, write_noisy_copy
from sglang.test.tiny_models import (
    write_mock_draft,
    write_mock_model,
    write_tiny_eagle,
    write_tiny_model,
)

register_cpu_ci(est_time=12, suite="cpu")

LONG = 160


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_model(
        folder / "target", "LlamaForCausalLM", seed=11, max_position_embeddings=LONG
    )
    write_noisy_copy(target, folder / "small-lm", "LlamaForCausalLM")
    for algorithm in ("EAGLE", "EAGLE3"):
        write_tiny_eagle(folder / algorithm, target, algorithm=algorithm)
    write_mock_model(folder / "mock", max_position_embeddings=LONG)
    return folder


def arguments(root, algorithm="EAGLE", draft=None, **options):
    return {
        "model_path": str(root / "target"),
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft or root / algorithm),
        "skip_tokenizer_init": True,
    } | options


def engine(root, algorithm="EAGLE", draft=None, **options):
    chain = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    given = arguments(root, algorithm, draft, max_total_tokens=2048)
    given |= chain | options
    return EngineHarness(given.pop("model_path"), **given)


def refusal(build):
    with pytest.raises(ValueError) as error:
        build()
    return str(error.value)


def tree(steps, topk, nodes):
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


# -- flags -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (tree(5, 4, 5), ["num-draft-tokens 5", "num-steps 5", "at least", "6"]),
        (tree(2, 2, 8), ["num-draft-tokens 8", "6 candidates", "at most 7"]),
        (tree(1, 4, 9), ["num-draft-tokens 9", "4 candidates", "at most 5"]),
        (tree(0, 1, 2), ["num-steps 0", "at least 1"]),
        (tree(3, 0, 4), ["eagle-topk 0", "at least 1"]),
        (tree(3, 2, -1), ["num-draft-tokens -1", "at least 1"]),
        (tree(3, 33, 64), ["eagle-topk 33", "at most 32"]),
        ({"speculative_accept_threshold_acc": 0.0}, ["threshold-acc 0.0", "(0, 1]"]),
        (
            {"speculative_accept_threshold_single": 1.5},
            ["threshold-single 1.5", "(0, 1]"],
        ),
        ({"speculative_draft_model_path": None}, ["--speculative-draft-model-path"]),
        ({"attention_backend": "triton"}, ["--attention-backend triton", "cpu"]),
        ({"speculative_algorithm": "MEDUSA"}, ["MEDUSA", "EAGLE3", "NGRAM"]),
    ],
)
def test_flags_are_refused(root, options, words):
    message = refusal(lambda: ServerArgs(**arguments(root) | options))
    for word in words:
        assert word in message


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_a_token_map_is_for_eagle(root, algorithm):
    options = arguments(root, algorithm, speculative_token_map="map.json")
    message = refusal(lambda: ServerArgs(**options))
    assert "--speculative-token-map map.json" in message and "EAGLE" in message


def test_a_chain_has_one_size_and_says_so(root, caplog):
    args = ServerArgs(**arguments(root) | tree(3, 1, 9))
    assert args.speculative_num_draft_tokens == 4
    assert "num-draft-tokens 9 becomes 4" in caplog.text


@pytest.mark.parametrize(
    ("model", "numbers"), [("target", (5, 4, 8)), ("mock", (3, 1, 4))]
)
def test_numbers_that_nobody_gave(root, model, numbers):
    args = ServerArgs(**arguments(root) | {"model_path": str(root / model)})
    shape = args.tree_shape
    assert (shape.num_steps, shape.topk, shape.num_draft_tokens) == numbers


@pytest.mark.parametrize(
    ("layout", "slots", "needed"), [("paged", 1024, 1030), ("region", 64, 70)]
)
def test_too_few_slots(root, layout, slots, needed):
    options = tree(5, 8, 64) | {"page_size": 64, "max_total_tokens": slots}
    options["speculative_draft_layout"] = layout
    message = refusal(lambda: engine(root, **options))
    lower = ("--max-total-tokens", "--speculative-num-draft-tokens")
    for word in (str(slots), str(needed), *lower):
        assert word in message


def test_simulated_acceptance_needs_dummy_weights(root, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    message = refusal(lambda: engine(root, kv_canary="none"))
    assert "SGLANG_SIMULATE_ACC_LEN=2.5" in message and "dummy" in message
    # Tokens that are made up are not those that the KV canary expects.
    simulated = engine(root, load_format="dummy", kv_canary="none")
    recorder = AcceptRecorder(simulated.scheduler)
    answer = simulated.generate([1, 2, 3], max_new_tokens=120, ignore_eos=True)
    assert len(answer.output_ids) == 120
    assert recorder.mean() == pytest.approx(2.5, abs=0.3)


# -- drafts ----------------------------------------------------------------------------


def test_not_a_draft_of_this_kind(root):
    cases = [
        ("EAGLE", root / "EAGLE3", "LlamaForCausalLMEagle3"),
        ("EAGLE3", root / "EAGLE", "LlamaForCausalLMEagle"),
        ("EAGLE", root / "small-lm", "LlamaForCausalLM"),
        ("EAGLE3", root / "small-lm", "LlamaForCausalLM"),
        ("STANDALONE", root / "EAGLE", "LlamaForCausalLMEagle"),
    ]
    for algorithm, draft, architecture in cases:
        message = refusal(lambda a=algorithm, d=draft: engine(root, a, d))
        assert str(draft) in message
        assert f"{architecture} is not a draft of" in message
        assert algorithm in message


def test_no_such_draft(root):
    message = refusal(lambda: engine(root, draft=root / "nowhere"))
    assert "--speculative-draft-model-path" in message and "nowhere" in message


def test_a_head_as_the_target(root):
    message = refusal(lambda: EngineHarness(root / "EAGLE", skip_tokenizer_init=True))
    assert "LlamaForCausalLMEagle" in message


def test_a_target_with_recurrent_state(root, tmp_path):
    config = json.loads((root / "target" / "config.json").read_text())
    shutil.copytree(root / "target", tmp_path / "recurrent")
    config["architectures"] = ["MambaForCausalLM"]
    (tmp_path / "recurrent" / "config.json").write_text(json.dumps(config))
    options = {"model_path": str(tmp_path / "recurrent")}
    message = refusal(lambda: engine(root, **options))
    assert "MambaForCausalLM is not supported" in message


def test_a_head_of_another_width(root, tmp_path):
    other = write_tiny_model(
        tmp_path / "other", "LlamaForCausalLM", hidden_size=32, num_attention_heads=2
    )
    for algorithm in ("EAGLE", "EAGLE3"):
        draft = tmp_path / algorithm
        write_tiny_eagle(draft, other, algorithm=algorithm)
        message = refusal(lambda a=algorithm, d=draft: engine(root, a, d))
        assert str(draft) in message
        assert "32" in message and "64" in message


def test_a_map_of_the_checkpoint_that_leaves_the_vocabulary(root, tmp_path):
    write_tiny_eagle(
        tmp_path, root / "target", algorithm="EAGLE3", draft_vocab_size=100
    )
    weights = load_file(tmp_path / "model.safetensors")
    weights["d2t"][40] = 400
    save_file(weights, tmp_path / "model.safetensors")
    message = refusal(lambda: engine(root, "EAGLE3", tmp_path))
    for word in ("d2t", "40", "440", "264"):
        assert word in message


def test_layers_that_the_target_does_not_have(root, tmp_path):
    write_tiny_eagle(
        tmp_path,
        root / "target",
        algorithm="EAGLE3",
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 7]},
    )
    message = refusal(lambda: engine(root, "EAGLE3", tmp_path))
    assert "8" in message and "2" in message


def test_a_small_lm_with_other_tokens(root, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(root / "small-lm", draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal(lambda: engine(root, "STANDALONE", draft))
    assert "tokenizer" in message and str(draft) in message


def test_a_small_lm_with_another_vocabulary(root, tmp_path):
    draft = write_tiny_model(tmp_path, "LlamaForCausalLM", vocab_size=300)
    message = refusal(lambda: engine(root, "STANDALONE", draft))
    for word in ("300", "264", "tokenizer"):
        assert word in message


# -- token maps ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2, 264]", ["264", "vocabulary of 264"]),
        ("[1, -2]", ["-2", "vocabulary"]),
        ("[1, 2, 1]", ["more than once"]),
        ("[]", ["list of token ids"]),
        ("[[1], [2]]", ["list of token ids"]),
        ("[1.5]", ["list of token ids"]),
        ('{"a": 1}', ["list of token ids"]),
        ("[1, ", ["list of token ids"]),
        ('["a"]', ["list of token ids"]),
        ("[99999999999999999999]", ["token id"]),
    ],
)
def test_bad_token_maps(root, tmp_path, content, words):
    path = tmp_path / "map.json"
    path.write_text(content)
    message = refusal(lambda: engine(root, speculative_token_map=str(path)))
    assert f"--speculative-token-map {path}" in message
    for word in words:
        assert word in message


def test_token_maps_of_other_files(root, tmp_path):
    missing = tmp_path / "missing.json"
    message = refusal(lambda: engine(root, speculative_token_map=str(missing)))
    assert "no such file" in message and str(missing) in message
    two = tmp_path / "two.safetensors"
    save_file({"a": torch.arange(3), "b": torch.arange(3)}, two)
    message = refusal(lambda: engine(root, speculative_token_map=str(two)))
    assert str(two) in message and "one tensor" in message


def test_a_token_map_that_is_smaller_than_top_k(root, tmp_path):
    path = tmp_path / "map.json"
    path.write_text("[1, 2, 3]")
    options = tree(2, 4, 8) | {"speculative_token_map": str(path)}
    message = refusal(lambda: engine(root, **options))
    assert "--speculative-eagle-topk 4" in message and "3" in message


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_only_mapped_tokens_are_drafted(tmp_path, suffix):
    """The output is what it was; nothing outside the map is ever drafted."""
    model = bundled_demo_model_path()
    allowed = list(range(0, 4096, 2))
    random.Random(1).shuffle(allowed)
    path = tmp_path / f"map.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(allowed))
    else:
        save_file({"map": torch.tensor(allowed, dtype=torch.int32)}, path)
    drafted = set()
    prompts = [[5, 9, 20, 44, 100, 7, 3, 88] * 3, list(range(50, 90))]
    plain = plain_engine(model)
    mapped = EngineHarness(
        model,
        skip_tokenizer_init=True,
        context_length=LONG,
        max_total_tokens=2048,
        speculative_algorithm="EAGLE",
        speculative_token_map=str(path),
        **tree(3, 2, 8),
    )
    worker = mapped.scheduler.worker
    recorder = AcceptRecorder(mapped.scheduler)
    verify = worker.verify

    def watch(live, logits, sampling_info, *, history):
        drafted.update(live.tree.tokens[:, 1:].flatten().tolist())
        return verify(live, logits, sampling_info, history=history)

    worker.verify = watch
    for prompt in prompts:
        options = {"max_new_tokens": 40, "ignore_eos": True}
        expected = plain.generate(prompt, **options).output_ids
        assert mapped.generate(prompt, **options).output_ids == expected
    assert len(drafted) > 20 and drafted <= set(allowed)
    assert recorder.mean() > 1.05
    check_no_leak(mapped)


def test_a_draft_with_made_up_weights(root, tmp_path):
    """Its folder needs no weights; the output is the target's."""
    shutil.copy(root / "EAGLE" / "config.json", tmp_path / "config.json")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    harness = engine(root, "EAGLE", tmp_path, speculative_draft_load_format="dummy")
    expected = engine(root).generate([1, 2, 3], **options).output_ids
    assert harness.generate([1, 2, 3], **options).output_ids == expected


# -- accepted inputs -------------------------------------------------------------------


def test_a_draft_of_a_shorter_context_goes_on(root, tmp_path, caplog):
    """Its rotary table is extended: it drafts the same as one of the target's."""
    short = tmp_path / "short"
    shutil.copytree(root / "small-lm", short)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 48
    (short / "config.json").write_text(json.dumps(config))
    prompt = [random.Random(3).randrange(250) for _ in range(40)]
    found = []
    for draft in (short, root / "small-lm"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            harness = engine(root, "STANDALONE", draft)
        logged = [r for r in caplog.records if "rotary table" in r.getMessage()]
        assert len(logged) == (draft == short)
        for record in logged:
            assert "48" in record.getMessage() and str(LONG) in record.getMessage()
        recorder = AcceptRecorder(harness.scheduler)
        answer = harness.generate(prompt, max_new_tokens=119, ignore_eos=True)
        assert len(prompt) + len(answer.output_ids) == LONG - 1
        (run,) = recorder.runs.values()
        found.append((answer.output_ids, run.accept_lens))
        assert max(run.accept_lens[-20:]) > 1
    assert found[0] == found[1]


def test_a_published_eagle_head_may_have_its_targets_class(root, tmp_path):
    shutil.copytree(root / "EAGLE", tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    options = {"max_new_tokens": 12, "ignore_eos": True}
    expected = engine(root).generate([1, 2, 3], **options).output_ids
    harness = engine(root, "EAGLE", tmp_path / "head")
    assert harness.generate([1, 2, 3], **options).output_ids == expected


def test_the_demo_model_brings_its_heads():
    for algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        args = ServerArgs(
            model_path=str(bundled_demo_model_path()), speculative_algorithm=algorithm
        )
        expected = str(bundled_demo_draft_path(algorithm))
        assert args.speculative_draft_model_path == expected


OPTIMIZED = """
import json, sys
from pathlib import Path
from sglang.srt.server_args import ServerArgs
from sglang.test.harness import EngineHarness
model, draft = sys.argv[1:]
common = dict(
    skip_tokenizer_init=True, max_total_tokens=2048, page_size=4,
    speculative_algorithm="STANDALONE", speculative_draft_model_path=draft,
)
found = {"assertions": __debug__, "refused": []}
for numbers in ((5, 4, 5), (2, 2, 8), (3, 33, 64)):
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    tree = {f"speculative_{n}": v for n, v in zip(names, numbers)}
    try:
        ServerArgs(model_path=model, **common, **tree)
    except ValueError as error:
        found["refused"].append(str(error))
tree = dict(
    speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=9
)
engine = EngineHarness(Path(model), **common, **tree)
answer = engine.generate(list(range(1, 40)), max_new_tokens=60, ignore_eos=True)
found["output"] = answer.output_ids
print(json.dumps(found))
"""


def test_python_o_changes_nothing(root):
    found = []
    for flags in ([], ["-O"]):
        command = [sys.executable, *flags, "-c", OPTIMIZED]
        command += [str(root / "target"), str(root / "small-lm")]
        done = forked_process.run(command, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert [each.pop("assertions") for each in found] == [True, False]
    assert found[0] == found[1]
    assert len(found[0]["refused"]) == 3 and len(found[0]["output"]) == 60


def test_a_mock_draft_of_another_vocabulary(root, tmp_path):
    draft = write_mock_draft(tmp_path, kind="STANDALONE", vocab_size=500)
    options = {"model_path": str(root / "mock")}
    message = refusal(lambda: engine(root, "STANDALONE", draft, **options))
    assert "500" in message and "1000" in message


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

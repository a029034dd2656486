"""Engines with n-gram drafts: outputs are those without, and texts that repeat are
drafted well. (`test_spec_features.py` has the options of requests.)
"""

from __future__ import annotations

import random

import pytest

from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.hybrid_models import write_hybrid_model
from sglang.test.scale import sampled
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_matrix import NGRAM_SAMPLE, SpecConfig
from sglang.test.spec_parity import check_no_leak
from sglang.test.spec_world import (
    ModelFolders,
    References,
    plain_engine,
    run_configuration,
    spec_engine,
)

register_cpu_ci(est_time=12, suite="cpu", full_time=60)
register_cuda_ci(est_time=40, suite="cuda")

CHECKED = {"kv_canary": "raise", "kv_canary_real_data": "all"}
DEMO = SpecConfig(
    algorithm="NGRAM",
    topk=4,
    page_size=4,
    num_steps=5,
    nodes="middle",
    backend="cpu_native",
    overlap=True,
    model="demo",
    variant=None,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references(folders):
    return References(folders)


@pytest.mark.parametrize(
    "config", sampled(NGRAM_SAMPLE, key=lambda config: None, ci=4), ids=str
)
def test_same_output_with_and_without(folders, references, config):
    run_configuration(folders, references, config, **CHECKED)


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_a_repeated_text_is_drafted(folders, match_type):
    """The demo model repeats itself; then a second request for the same text is drafted
    from the first one's output."""
    plain = plain_engine(folders.target("demo"))
    engine = spec_engine(
        folders, DEMO, speculative_ngram_match_type=match_type, **CHECKED
    )
    prompt = [5, 9, 20, 44, 100, 7, 3, 88] * 3
    options = {"max_new_tokens": 60, "ignore_eos": True}
    expected = plain.generate(prompt, **options).output_ids
    for least in (1.3, 5.0):
        recorder = AcceptRecorder(engine.scheduler)
        assert engine.generate(prompt, **options).output_ids == expected
        assert recorder.mean() > least
    check_no_leak(engine)


def test_tenants_share_no_drafts(folders):
    engine = spec_engine(folders, DEMO)
    options = {"max_new_tokens": 60, "ignore_eos": True}
    prompt = [random.Random(5).randrange(50, 4000) for _ in range(20)]
    means = {}
    for key in ("a", "a", "b"):
        recorder = AcceptRecorder(engine.scheduler)
        engine.generate(prompt, extra_key=key, **options)
        means.setdefault(key, []).append(recorder.mean())
    assert means["a"][1] > 4 > means["b"][0] == means["a"][0]


def test_sampled_output_is_the_same_with_the_same_seed(folders):
    plain, spec = plain_engine(folders.target("demo")), spec_engine(folders, DEMO)
    for seed in range(4):
        asked = {"temperature": 0.8, "top_p": 0.9, "sampling_seed": seed}
        asked |= {"max_new_tokens": 40, "ignore_eos": True}
        expected = plain.generate([5, 9, 20, 44] * 6, **asked).output_ids
        assert spec.generate([5, 9, 20, 44] * 6, **asked).output_ids == expected


def test_a_history_smaller_than_a_prompt(folders):
    plain = plain_engine(folders.target("demo"), context_length=2048)
    engine = spec_engine(
        folders,
        DEMO,
        context_length=2048,
        max_total_tokens=4096,
        speculative_ngram_capacity=1024,
    )
    prompt = [random.Random(1).randrange(50, 4000) for _ in range(1500)]
    options = {"max_new_tokens": 60, "ignore_eos": True}
    for length in (1500, 700, 1500):
        expected = plain.generate(prompt[:length], **options).output_ids
        assert engine.generate(prompt[:length], **options).output_ids == expected


def test_states_follow_the_accepted_path(tmp_path):
    model = write_hybrid_model(tmp_path / "hybrid", "Qwen3NextForCausalLM")
    plain = plain_engine(model)
    engine = plain_engine(
        model,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=8,
        **CHECKED,
    )
    recorder = AcceptRecorder(engine.scheduler)
    # The second time, what followed the first time is drafted.
    for prompt in 2 * [[3, 9, 4, 1] * 8, list(range(20, 50))]:
        options = {"max_new_tokens": 50, "ignore_eos": True}
        expected = plain.generate(prompt, **options).output_ids
        assert engine.generate(prompt, **options).output_ids == expected
    assert recorder.mean() > 1.5
    check_no_leak(engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_draft_model_path": "head"}, ["model-path head", "remove it"]),
        ({"speculative_eagle_topk": 4}, ["topk 4", "ngram-max-bfs-breadth"]),
        ({"speculative_token_map": "m.json"}, ["token-map m.json", "remove it"]),
        (
            {"speculative_draft_kv_cache_dtype": "bfloat16"},
            ["draft-kv-cache-dtype bfloat16", "remove it"],
        ),
        ({"speculative_draft_layout": "paged"}, ["draft-layout paged", "remove it"]),
        ({"speculative_ngram_max_bfs_breadth": 40}, ["breadth 40", "at most 32"]),
        ({"speculative_ngram_capacity": 3}, ["capacity 3", "at least 1024"]),
        ({"speculative_ngram_match_type": "DFS"}, ["match-type", "BFS", "PROB"]),
        (
            {"speculative_num_steps": 9, "speculative_num_draft_tokens": 4},
            ["draft-tokens 4", "at least"],
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_ngram_capacity": 2048},
            ["capacity 2048", "NGRAM"],
        ),
    ],
)
def test_flags_are_refused(options, words):
    with pytest.raises(ValueError) as error:
        ServerArgs(**{"speculative_algorithm": "NGRAM"} | options)
    for word in words:
        assert word in str(error.value)


def test_more_nodes_than_tokens(folders):
    with pytest.raises(ValueError, match="draft-tokens 300: the model has only 264"):
        plain_engine(
            folders.target("llama"),
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=300,
        )


def test_defaults():
    args = ServerArgs(speculative_algorithm="NGRAM")
    shape = args.tree_shape
    assert (shape.topk, shape.num_steps, shape.num_draft_tokens) == (10, 11, 12)
    assert args.speculative_draft_model_path is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""Options of requests beyond a greedy answer, with drafts accepted: the same as without
speculation, wherever in an accepted run they take effect.
"""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, is_full, sampled
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_adaptive import InTurn
from sglang.test.spec_matrix import SpecConfig
from sglang.test.spec_parity import (
    CONTEXT,
    Ask,
    answer_all,
    assert_parity,
    check_no_leak,
)
from sglang.test.spec_prompts import code_prompts
from sglang.test.spec_world import ModelFolders, plain_engine, spec_engine

register_cpu_ci(est_time=28, suite="cpu")
register_cuda_ci(est_time=60, suite="cuda")

TREE = SpecConfig(
    algorithm="EAGLE3",
    topk=4,
    page_size=4,
    num_steps=4,
    nodes="middle",
    backend="cpu_native",
    overlap=True,
    model="demo",
    variant=None,
)
CHAIN = SpecConfig(
    algorithm="STANDALONE",
    topk=1,
    page_size=1,
    num_steps=5,
    nodes=None,
    backend="cpu_native",
    overlap=False,
    model="llama",
    variant=None,
)
NGRAM = dataclasses.replace(TREE, algorithm="NGRAM", num_steps=6, page_size=16)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
ASKED = {
    "frequency-penalty": {"frequency_penalty": 0.6},
    "presence-penalty": {"presence_penalty": 0.9},
    "repetition-penalty": {"repetition_penalty": 1.2},
    "all-penalties": {
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "negative-penalty": {"frequency_penalty": -0.4},
    "logit-bias": {"logit_bias": {10: 3.0, 65: 2.5, 32: -8.0}},
    "stop-ids": {"stop_token_ids": list(range(1, 256, 7))},
    "min-new-tokens": {
        "stop_token_ids": list(range(1, 256, 3)),
        "min_new_tokens": 9,
    },
    "stop-string": {"stop": ["e", "\n", "1"]},
    "stop-string-late": {"stop": ["e", "\n", "1"], "min_new_tokens": 8},
    "stop-regex": {"stop_regex": ["[a-z]{2}[^a-z]"]},
    "regex": {"regex": r"(yes|no) [0-9]{3}(, [a-f]+){2}!", "ignore_eos": False},
    "regex-open-end": {"regex": r"[a-d ]{4,}", "ignore_eos": False},
    "json-schema": {"json_schema": json.dumps(SCHEMA), "ignore_eos": False},
    "grammar-and-penalty": {
        "regex": r"([a-z]{1,6} )*[.]",
        "frequency_penalty": 0.5,
        "ignore_eos": False,
    },
    "logprobs": {"return_logprob": True, "top_logprobs_num": 5, "stream": True},
    "prompt-logprobs": {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    },
    "token-ids-logprob": {
        "return_logprob": True,
        "logprob_start_len": 2,
        "token_ids_logprob": [65, 3, 200, 65],
        "stream": True,
    },
    "logprobs-and-stop": {
        "return_logprob": True,
        "stream": True,
        "stop_token_ids": list(range(1, 256, 7)),
    },
    "logprobs-and-grammar": {
        "return_logprob": True,
        "regex": r"(yes|no) [0-9]{3}!",
        "ignore_eos": False,
    },
}


class Pair:
    """Both engines, and prompts that the draft follows well."""

    def __init__(self, root, config, **options):
        folders = ModelFolders(root)
        model = folders.target(config.model)
        self.plain = plain_engine(model, skip_tokenizer_init=False)
        self.spec = spec_engine(
            folders,
            config,
            skip_tokenizer_init=False,
            max_total_tokens=16384,
            **options,
        )
        self.recorder = AcceptRecorder(self.spec.scheduler)
        self.vocab_size = self.spec.scheduler.model_config.vocab_size
        if config.model == "demo":
            self.prompts = code_prompts()[:3]
        else:
            rng = random.Random(4)
            self.prompts = [
                [rng.randrange(256) for _ in range(length)] for length in (5, 20, 60)
            ]

    def compare(self, *options, prompts=None):
        """Answers with and without speculation, which are the same."""
        prompts = self.prompts if prompts is None else prompts
        usual = {"max_new_tokens": 24, "ignore_eos": True}
        asks = [
            Ask(prompt=prompt, options=usual | option, is_plain=False)
            for option in options
            for prompt in prompts
        ]
        want = answer_all(self.plain, asks)
        self.recorder.runs.clear()
        self.recorder.verifications.clear()
        self.recorder.finished.clear()
        got = answer_all(self.spec, asks)
        assert_parity(asks, want, got, aborted=set(), reference=None)
        self.recorder.check_counters()
        check_no_leak(self.spec)
        return asks, got

    def ends_inside_a_run(self, rid, answer):
        """Whether the last verification yielded more than the request keeps."""
        run = self.recorder.runs[(rid, 0)]
        return 1 + sum(run.accept_lens) > len(answer.output_ids)


ADAPTIVE = {"speculative_adaptive": True, "skip_server_warmup": True}
CONFIGS = {"tree": TREE, "ngram": NGRAM} | ({"chain": CHAIN} if is_full() else {})


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=list(CONFIGS))
def pair(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("models"), request.param)


@pytest.mark.parametrize("name", ASKED)
def test_same_answer(pair, name):
    pair.compare(ASKED[name], prompts=pair.prompts[:2])
    assert pair.recorder.lens().total() > 0


@pytest.mark.parametrize("config", CONFIGS.values() if is_full() else [TREE], ids=str)
def test_everything_while_the_shape_changes(tmp_path, config):
    pair = Pair(tmp_path, config, **ADAPTIVE)
    shapes = pair.spec.scheduler.shapes
    for iterations in (1, 3) if is_full() else (2,):
        shapes.policy = InTurn(shapes, iterations)
        pair.compare({}, *ASKED.values(), prompts=pair.prompts[:1])
    assert pair.recorder.lens().total() > 0


@pytest.mark.parametrize(
    ("config", "in_turn"),
    sampled(
        [
            (TREE, True),
            (TREE, False),
            (CHAIN, False),
            (CHAIN, True),
            (dataclasses.replace(TREE, algorithm="EAGLE", overlap=False), False),
            (dataclasses.replace(TREE, algorithm="EAGLE", overlap=False), True),
            (NGRAM, True),
            (NGRAM, False),
        ],
        key=lambda case: case[0].algorithm,
        ci=1,
    ),
    ids=str,
)
def test_hidden_states_are_those_of_the_tokens_that_are_kept(tmp_path, config, in_turn):
    """Whole, or the last alone; also where the output ends inside an accepted run, and
    after a retraction."""
    folders = ModelFolders(tmp_path)
    flags = {"enable_return_hidden_states": True, "skip_tokenizer_init": False}
    plain = plain_engine(folders.target(config.model), **flags)
    if in_turn:
        flags |= ADAPTIVE
    spec = spec_engine(folders, config, max_total_tokens=1024, **flags)
    if in_turn:
        spec.scheduler.shapes.policy = InTurn(spec.scheduler.shapes, 2)
    stops = {"stop_token_ids": list(range(1, 256, 7)), "ignore_eos": True}
    options = [
        {"max_new_tokens": 24, "ignore_eos": True},
        {"max_new_tokens": 24} | stops,
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
        {"max_new_tokens": 24, "stream": True, "regex": r"(yes|no) [0-9]{3}!"},
    ]
    prompts = code_prompts()[:2] if config.model == "demo" else [[5] * 9, [7, 200]]
    asks = [
        Ask(prompt=prompt, options=option | wanted, is_plain=False)
        for wanted in (
            {"return_hidden_states": True},
            {"return_hidden_states": True, "only_last_hidden_state": True},
        )
        for option in options
        for prompt in prompts
    ]
    want, got = answer_all(plain, asks), answer_all(spec, asks)
    for rid, ask in enumerate(asks):
        expected, found = want[str(rid)], got[str(rid)]
        assert found.output_ids == expected.output_ids
        is_last = "only_last_hidden_state" in ask.options
        every = len(ask.prompt) + max(len(found.output_ids) - 1, 0)
        assert len(found.hidden_states) == (1 if is_last else every)
        torch.testing.assert_close(
            torch.tensor(found.hidden_states),
            torch.tensor(expected.hidden_states),
            atol=2e-4,
            rtol=2e-4,
        )
    half = len(asks) // 2
    for rid in range(half):
        assert got[str(half + rid)].hidden_states[0] == pytest.approx(
            got[str(rid)].hidden_states[-1], abs=2e-4
        )


def test_drafts_are_accepted(pair):
    pair.compare({}, {})
    assert pair.recorder.mean() > 1.4


def test_everything_at_once(pair):
    """Rows with and without grammar, penalty and logprobs in one batch."""
    pair.compare({}, *ASKED.values(), prompts=pair.prompts[:1])


def test_stop_ids_at_every_place_of_a_run(pair):
    _, answers = pair.compare({})
    places = range(1, 24, 2)
    inside = 0
    for i, prompt in enumerate(pair.prompts[: count(ci=2, full=3)]):
        out = answers[str(i)].output_ids
        asked = [{"stop_token_ids": [out[place]]} for place in places]
        _, stopped = pair.compare(*asked, prompts=[prompt])
        for rid, answer in stopped.items():
            token = out[places[int(rid)]]
            assert answer.output_ids == out[: out.index(token) + 1]
            assert answer.finish_reason.matched == token
            if len(answer.output_ids) > 1:
                inside += pair.ends_inside_a_run(rid, answer)
    assert inside > 3


def test_lengths_at_every_place_of_a_run(pair):
    """One token, which needs no verification; lengths that end a run; lengths inside
    one."""
    _, answers = pair.compare({})
    boundary = inside = 0
    for i, prompt in enumerate(pair.prompts[:2]):
        out = answers[str(i)].output_ids
        lengths = range(1, 25)
        asked = [{"max_new_tokens": length} for length in lengths]
        _, cut = pair.compare(*asked, prompts=[prompt])
        assert ("0", 0) not in pair.recorder.runs
        for rid, answer in cut.items():
            length = lengths[int(rid)]
            assert answer.output_ids == out[:length]
            assert answer.finish_reason.length == length
            if length > 1:
                is_inside = pair.ends_inside_a_run(rid, answer)
                inside += is_inside
                boundary += not is_inside
    assert boundary > 5 and inside > 5


def test_to_the_last_position(pair):
    """Prompt and output fill the context, whatever is drafted after it."""
    rng = random.Random(2)
    prompts = [
        [rng.randrange(256) for _ in range(CONTEXT - rest)] for rest in (1, 2, 3, 5, 9)
    ]
    _, answers = pair.compare({"max_new_tokens": 100}, prompts=prompts)
    for rid, rest in zip("01234", (1, 2, 3, 5, 9), strict=True):
        assert len(answers[rid].output_ids) == rest
        assert answers[rid].finish_reason.type == "length"


def test_streamed_deltas_add_up(pair):
    asks, answers = pair.compare({"stream": True}, {"stream": False})
    half = len(pair.prompts)
    for i in range(half):
        streamed, whole = answers[str(i)], answers[str(i + half)]
        assert streamed.output_ids == whole.output_ids
        assert whole.messages == 1
        # One message per prefill or verification, each with what it yielded.
        run = pair.recorder.runs[(str(i), 0)]
        assert streamed.messages == 1 + len(run.accept_lens)


def test_grammars_hold(pair):
    asked = {name: ASKED[name] for name in ("regex", "json-schema")}
    _, answers = pair.compare(*asked.values())
    tokenizer = load_tokenizer(str(pair.spec.server_args.tokenizer_path))
    half = len(pair.prompts)
    texts = [
        tokenizer.decode(answers[str(i)].output_ids, skip_special_tokens=True)
        for i in range(2 * half)
    ]
    for text in texts[:half]:
        assert text.startswith(("yes ", "no "))
    for i, text in enumerate(texts[half:], half):
        if answers[str(i)].finish_reason.type == "stop":
            assert set(json.loads(text)) == {"name", "size", "ok"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_graphs_change_nothing(tmp_path):
    folders = ModelFolders(tmp_path)
    for config in (TREE, CHAIN):
        engine = spec_engine(folders, config, disable_cuda_graph=True)
        other = spec_engine(folders, config, disable_cuda_graph=False)
        asks = [
            Ask(prompt=list(range(5, 30 + i)), options=option, is_plain=False)
            for i in range(4)
            for option in ({"max_new_tokens": 20}, {"frequency_penalty": 0.5})
        ]
        assert_parity(
            asks,
            answer_all(engine, asks),
            answer_all(other, asks),
            aborted=set(),
            reference=None,
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

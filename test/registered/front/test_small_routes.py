"""Tokenization, loads, profiles and refused paths, without a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from app_world import App
from manager_world import TOKENIZER

from sglang.srt.entrypoints.refused_routes import REFUSED
from sglang.srt.managers.messages.io_struct import ProfileReq, SchedulerStats
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.version import __version__

register_cpu_ci(est_time=4, suite="cpu")

USER = {"role": "user", "content": "Hi"}
TEXT = "def area(width, height):"


@pytest.fixture(scope="module")
def app() -> App:
    return App()


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_and_its_ids(app: App, prefix: str) -> None:
    answer = app.post(f"{prefix}/tokenize", {"prompt": TEXT}).json()
    ids = TOKENIZER.encode(TEXT)
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 100}
    back = app.post(f"{prefix}/detokenize", {"tokens": ids, "model": "any"}).json()
    assert back == {"text": TEXT, "prompt": TEXT}


def test_several_texts(app: App) -> None:
    texts = [TEXT, "x", ""]
    answer = app.post("/tokenize", {"prompt": texts, "add_special_tokens": False})
    ids = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    assert answer.json()["tokens"] == ids
    assert answer.json()["count"] == [len(one) for one in ids]
    back = app.post("/detokenize", {"tokens": ids}).json()
    assert back["text"] == back["prompt"] == texts


def test_the_text_of_each_token(app: App) -> None:
    body = {"prompt": "aä", "return_token_strs": True}
    answer = app.post("/tokenize", body).json()
    assert answer["token_strs"] == [TOKENIZER.token_text(i) for i in answer["tokens"]]
    answer = app.post("/tokenize", body | {"prompt": ["a", "b"]}).json()
    assert [len(one) for one in answer["token_strs"]] == answer["count"]


def test_a_chat_has_the_tokens_of_its_template(app: App) -> None:
    messages = [USER]
    body = {"messages": messages}
    for generates in (True, False):
        text = TOKENIZER.apply_chat_template(messages, add_generation_prompt=generates)
        answer = app.post("/tokenize", body | {"add_generation_prompt": generates})
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert answer.json()["tokens"] == ids


def test_special_tokens_can_be_left_out(app: App) -> None:
    special = min(TOKENIZER.special_ids)
    ids = [special, *TOKENIZER.encode("x", add_special_tokens=False)]
    assert app.post("/detokenize", {"tokens": ids}).json()["text"] == "x"
    kept = app.post("/detokenize", {"tokens": ids, "skip_special_tokens": False})
    assert kept.json()["text"] == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert kept.json()["text"] != "x"


class Watched:
    """A tokenizer that counts how often it works in this process."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        self.count += name in ("encode", "decode")
        return getattr(TOKENIZER, name)


def test_long_texts_do_not_block_the_loop() -> None:
    tokenizer = Watched()
    app = App(tokenizer=tokenizer)
    for count, is_here in ((5, True), (500, False)):
        tokenizer.count = 0
        texts = ["word " * 10] * count
        answer = app.post("/tokenize", {"prompt": texts}).json()
        assert answer["tokens"] == [TOKENIZER.encode(text) for text in texts]
        back = app.post("/detokenize", {"tokens": answer["tokens"]}).json()
        assert back["text"] == texts
        assert tokenizer.count == (2 * count if is_here else 0)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "set either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt", "set either"),
        ("/tokenize", {"messages": []}, "messages", "must not be empty"),
        ("/tokenize", {"prompt": 5}, "prompt", "expected"),
        (
            "/tokenize",
            {"prompt": "a", "chat_template": "x"},
            "chat_template",
            "not sup",
        ),
        ("/tokenize", {"messages": [USER], "tools": [{}]}, "tools[0].type", "0"),
        ("/tokenize", {"prompt": "a", "max": 1}, "max", "known fields: model, prompt"),
        ("/tokenize", {"prompt": "a" * 400_000}, "prompt", "at most 99 tokens fit"),
        ("/tokenize", {"prompt": ["a"] * 5000}, "prompt", "5000 texts"),
        ("/tokenize", {"prompt": ["a" * 2000] * 4000}, "prompt", "8000000 characters"),
        ("/detokenize", {}, None, "missing required field `tokens`"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1, outside the vocabulary"),
        ("/detokenize", {"tokens": [[1], [4096]]}, "tokens", "4096, outside the voc"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens", "mixes token ids"),
        ("/detokenize", {"tokens": [[1]] * 5000}, "tokens", "5000 lists"),
    ],
)
def test_wrong_bodies(
    path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    error = App(strict_fields=True).refused(path, body)
    assert error["param"] == param
    assert message in error["message"].lower() or message in error["message"]


def test_a_server_without_a_tokenizer_says_so() -> None:
    app = App(tokenizer=None)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert "--skip-tokenizer-init" in app.refused(path, body)["message"]


def test_another_model_is_refused_if_the_server_is_strict() -> None:
    app = App(strict_model_name=True)
    assert app.refused("/tokenize", {"prompt": "a", "model": "b"}, 404)


STATS = SchedulerStats(
    num_running_reqs=3,
    num_queue_reqs=2,
    num_queue_tokens=70,
    num_used_tokens=100,
    max_total_num_tokens=1000,
    token_usage=0.1,
    gen_throughput=50.0,
    num_retracted_reqs=1,
)


@pytest.mark.parametrize("path", ["/v1/loads", "/get_loads"])
def test_loads(path: str) -> None:
    app = App(max_running_requests=12)
    app.stats = STATS
    answer = app.ask("GET", path).json()
    assert answer["dp_rank_count"] == 1
    (load,) = answer["loads"]
    del load["timestamp"]
    assert load == {
        "dp_rank": 0,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_waiting_uncached_tokens": 70,
        "num_total_reqs": 5,
        "num_used_tokens": 100,
        "num_total_tokens": 170,
        "max_total_num_tokens": 1000,
        "token_usage": 0.1,
        "gen_throughput": 50.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.25,
        "max_running_requests": 12,
        "queues": {"waiting": 2, "retracted": 1},
    }
    assert answer["aggregate"] == {
        "total_running_reqs": 3,
        "total_waiting_reqs": 2,
        "total_reqs": 5,
        "avg_token_usage": 0.1,
        "avg_throughput": 50.0,
        "avg_utilization": 0.25,
    }


def test_sections_of_loads() -> None:
    app = App()
    app.stats = SchedulerStats(spec_accept_length=2.5)
    everything = app.ask("GET", "/v1/loads?include=all").json()["loads"][0]
    assert everything["speculative"] == {"accept_length": 2.5}
    core = app.ask("GET", "/v1/loads?include=core,memory").json()["loads"][0]
    assert not {"speculative", "queues"} & set(core)
    for query in ("include=cores", "dp_rank=1", "dp_rank=x", "format=prometheus"):
        response = app.ask("GET", f"/v1/loads?{query}")
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == query.split("=")[0]


def test_the_old_load() -> None:
    app = App()
    app.stats = STATS
    (load,) = app.ask("GET", "/get_load").json()
    del load["ts_tic"]
    assert load == {
        "dp_rank": 0,
        "num_reqs": 5,
        "num_waiting_reqs": 2,
        "num_tokens": 170,
    }


def test_ping_and_version() -> None:
    app = App()
    assert app.ask("GET", "/ping").status_code == 200
    assert app.ask("GET", "/version").json() == {"version": __version__}
    app.wire.manager.set_draining()
    refused = app.ask("GET", "/ping")
    assert refused.status_code == 503 and refused.headers["retry-after"]


def profiles(app: App) -> list[ProfileReq]:
    return [message for message in app.wire.sent if isinstance(message, ProfileReq)]


def test_a_profile_is_asked_of_the_scheduler(tmp_path: Path) -> None:
    app = App(profile_output_dir=str(tmp_path), profile_max_steps=7)
    app.profile = {"path": "there"}
    assert app.ask("POST", "/start_profile").json() == {
        "status": "started",
        "path": "there",
    }
    body = {
        "output_dir": "a/b",
        "num_steps": 5,
        "activities": ["CPU"],
        "with_stack": True,
        "record_shapes": True,
        "profile_by_stage": False,
        "merge_profiles": False,
    }
    assert app.post("/start_profile", body).status_code == 200
    assert app.post("/stop_profile", None).json()["status"] == "stopped"
    default, chosen, stop = profiles(app)
    assert default.folder == str(tmp_path) and default.num_steps == 7
    assert default.activities == ["CPU", "GPU"] and not default.with_stack
    assert chosen.folder == str(tmp_path / "a" / "b") and chosen.num_steps == 5
    assert chosen.activities == ["CPU"]
    assert chosen.with_stack and chosen.record_shapes
    assert default.name != chosen.name
    assert not stop.is_start


def test_the_schedulers_reason_is_a_400() -> None:
    app = App()
    app.profile = {"error": "no profile runs"}
    assert app.refused("/stop_profile", None)["message"] == "no profile runs"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"num_steps": 0}, "num_steps", "between 1 and 500 (--profile-max-steps)"),
        ({"num_steps": 501}, "num_steps", "between 1 and 500"),
        ({"activities": []}, "activities", "name CPU, GPU or both"),
        ({"activities": ["RPD"]}, "activities[0]", "invalid enum value"),
        ({"profile_by_stage": True}, "profile_by_stage", "not supported"),
        ({"output_dir": "/etc"}, "output_dir", "--profile-output-dir"),
        ({"output_dir": "../x"}, "output_dir", "--profile-output-dir"),
        ({"output_dir": "a\0"}, "output_dir", "not a path"),
    ],
)
def test_wrong_profiles(
    tmp_path: Path, body: dict[str, Any], param: str, message: str
) -> None:
    app = App(profile_output_dir=str(tmp_path))
    error = app.refused("/start_profile", body)
    assert message in error["message"] and error["param"] == param
    assert not profiles(app)


def test_a_link_out_of_the_folder_is_no_way_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    app = App(profile_output_dir=str(root))
    assert app.refused("/start_profile", {"output_dir": "out"})["param"] == "output_dir"


@pytest.mark.parametrize("path", REFUSED)
def test_paths_that_are_not_served(app: App, path: str) -> None:
    error = app.refused(path, {"model": "m", "input": "x"})
    assert error["message"] == f"{path} is not served: {REFUSED[path]}"
    assert error["type"] == "invalid_request_error"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

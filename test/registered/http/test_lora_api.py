"""Adapters over HTTP: names of models, routes that load and unload, and keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import Server, greedy

from sglang.test.adapters import write_adapter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=6, suite="cpu")

ADMIN, CLIENT = "admin-key", "client-key"
IDS = list(range(30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    model = write_tiny_model(made / "model", "LlamaForCausalLM")
    for seed, name in enumerate(("fr", "de", "late")):
        write_adapter(made / name, model, seed=seed)
    return made


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], folder: Path) -> Server:
    return start_server(
        "--lora-paths",
        *(f"fr={folder / 'fr'}", f"de={folder / 'de'}"),
        *("--max-loras-per-batch", "2", "--kv-canary", "raise"),
        *("--api-key", CLIENT, "--admin-api-key", ADMIN),
        model=folder / "model",
    ).wait_ready()


def post(server: Server, path: str, body: Any, key: str = CLIENT) -> Any:
    return server.post(path, body, headers={"Authorization": f"Bearer {key}"})


def ids_of(server: Server, **fields: Any) -> list[int]:
    body = {"input_ids": IDS, "sampling_params": greedy(max_new_tokens=6)}
    answer = post(server, "/generate", body | fields)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["output_ids"]
    return found


def test_an_adapter_is_asked_for_in_any_way(server: Server) -> None:
    base, fr, de = (ids_of(server, lora_path=name) for name in ("", "fr", "de"))
    assert len({tuple(ids) for ids in (base, fr, de)}) == 3
    assert ids_of(server, model="mock:fr") == ids_of(server, model="fr") == fr
    assert ids_of(server, model="mock") == ids_of(server, model="other:x") == base
    lists = {
        "input_ids": [IDS] * 3,
        "sampling_params": greedy(max_new_tokens=6),
        "lora_path": ["de", None, "fr"],
    }
    answers = post(server, "/generate", lists).json()
    assert [answer["output_ids"] for answer in answers] == [de, base, fr]


def test_clients_of_openai_name_a_model(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=CLIENT) as client:
        shown = {model.id: model for model in client.models.list()}
        assert list(shown) == ["mock", "fr", "de"]
        assert shown["fr"].to_dict()["parent"] == "mock"
        assert client.models.retrieve("mock:de").id == "de"

        def ask(model: str) -> tuple[str, str]:
            answer = client.completions.create(
                model=model, prompt=IDS, max_tokens=6, temperature=0
            )
            return answer.model, answer.choices[0].text

        texts = {model: ask(model) for model in ("mock", "mock:fr", "fr", "mock:de")}
        assert texts["fr"][1] == texts["mock:fr"][1] != texts["mock"][1]
        assert texts["mock:de"][0] == "mock:de"
        chats = [
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "hello"}],
                max_completion_tokens=6,
                temperature=0,
            )
            .choices[0]
            .message.content
            for model in ("mock", "mock:fr", "mock:de")
        ]
        assert len(set(chats)) == 3
        with pytest.raises(openai.NotFoundError, match="has no adapter 'es'"):
            ask("mock:es")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("es")


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"lora_path": "es"}, 400, "no adapter 'es' is loaded"),
        ({"lora_path": ["fr", "de"]}, 400, "lora_path has 2 entries for 1 prompt"),
        ({"lora_path": 3}, 400, "lora_path"),
        ({"lora_path": "fr", "model": "mock:de"}, 400, "leave one of them out"),
        ({"model": "mock:es"}, 404, "no adapter 'es'"),
        ({"lora_path": "x" * 100_000}, 400, "no adapter"),
    ],
)
def test_what_is_not_there(
    server: Server, fields: dict[str, Any], status: int, message: str
) -> None:
    body = {"input_ids": IDS, "sampling_params": greedy(max_new_tokens=1)} | fields
    answer = post(server, "/generate", body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert len(answer.text) < 2000


def test_the_administrator_loads_and_unloads(server: Server, folder: Path) -> None:
    body = {"lora_name": "late", "lora_path": str(folder / "late")}
    assert post(server, "/load_lora_adapter", body).status_code == 403
    assert server.post("/load_lora_adapter", body).status_code == 401
    loaded = post(server, "/load_lora_adapter", body, ADMIN)
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["success"] is True
    assert set(loaded.json()["loaded_adapters"]) == {"fr", "de", "late"}
    again = post(server, "/load_lora_adapter", body, ADMIN)
    assert again.status_code == 400 and "is loaded" in again.text
    due = ids_of(server, lora_path="late")
    for change in ({"lora_path": "/nowhere", "lora_name": "x"}, {"pinned": True}):
        refused = post(server, "/load_lora_adapter", body | change, ADMIN)
        assert refused.status_code == 400, refused.text
    assert ids_of(server, lora_path="late") == due
    gone = post(server, "/unload_lora_adapter", {"lora_name": "late"}, ADMIN)
    assert set(gone.json()["loaded_adapters"]) == {"fr", "de"}
    late = {"input_ids": IDS, "lora_path": "late"}
    assert post(server, "/generate", late).status_code == 400
    twice = post(server, "/unload_lora_adapter", {"lora_name": "late"}, ADMIN)
    assert twice.status_code == 400 and "no adapter 'late'" in twice.text


def test_an_unload_waits_for_requests(server: Server, folder: Path) -> None:
    body = {"lora_name": "late", "lora_path": str(folder / "late")}
    assert post(server, "/load_lora_adapter", body, ADMIN).status_code == 200
    answers: list[Any] = []

    def ask() -> None:
        params = greedy(max_new_tokens=200, ignore_eos=True)
        answers.append(ids_of(server, lora_path="late", sampling_params=params))

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 30
    while not server.get(
        "/get_server_info", headers={"Authorization": f"Bearer {ADMIN}"}
    ).json()["num_in_flight"]:
        assert time.monotonic() < deadline or answers
        if answers:
            break
    gone = post(server, "/unload_lora_adapter", {"lora_name": "late"}, ADMIN)
    assert gone.status_code == 200, gone.text
    asking.join()
    assert len(answers[0]) == 200


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

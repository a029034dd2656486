"""The canary inside a stock vLLM on the CPU: faults are named, clean traffic is silent
and unchanged, what is unknown is refused. With whole counts; skipped where vLLM is not
installed (`make engines-venv`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=1500, suite="engines")

REPO = Path(__file__).resolve().parents[3]
PYTHON = REPO / ".engines-venv" / "bin" / "python"
TRAFFIC = Path(__file__).with_name("vllm_traffic.py")
SEEDS = count(ci=1, full=20)
INTERPRETED = ("v2", "connector-v2", "latent", "eagle-v2", "states-v2")
"""Models of the second runner, which Triton's interpreter makes slow."""
FEW_SEEDS = count(ci=1, full=3)
LIMIT_SECONDS = 2400
CLASSES = {
    "plain": 15,
    "hybrid": 1,
    "asynchronous": 15,
    "v2": 15,
    "connector": 7,
    "connector-ahead": 7,
    "connector-asynchronous": 7,
    "connector-v2": 7,
    "latent": 12,
    "eagle": 15,
    "eagle-v2": 16,
    "states": 9,
    "states-v2": 9,
}

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"{PYTHON} is not there: make engines-venv"
)


def run(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KV_CANARY")}
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(PYTHON), *arguments],
        env={**env, "VLLM_LOGGING_LEVEL": "ERROR", **environ},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def last_json(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.parametrize("model", CLASSES)
def test_each_class_of_fault_is_named(model: str) -> None:
    command = ["-m", "kv_canary.engines.cli", "selftest", "--model", model]
    seeds = FEW_SEEDS if model in INTERPRETED else SEEDS
    result = run([*command, "--seeds", str(seeds)], KV_CANARY="log")
    report = last_json(result)
    assert len(report["named"]) == CLASSES[model]
    assert set(report["named"].values()) == {seeds}, result.stdout


@pytest.mark.parametrize("model", list(CLASSES))
def test_no_answer_shows_a_fault_that_is_healed(model: str) -> None:
    command = ["-m", "kv_canary.engines.cli", "selftest", "--model", model]
    result = run(
        [*command, "--seeds", str(FEW_SEEDS)],
        KV_CANARY="heal",
        KV_CANARY_REAL_DATA="all",
    )
    report = last_json(result)
    assert report["mode"] == "heal" and len(report["named"]) == CLASSES[model]
    assert set(report["named"].values()) == {FEW_SEEDS}, result.stdout


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("plain", {"num_gpu_blocks_override": 24}),
        ("plain", {"enable_prefix_caching": False, "num_gpu_blocks_override": 24}),
        ("hybrid", {}),
        ("asynchronous", {"num_gpu_blocks_override": 24}),
        ("v2", {"num_gpu_blocks_override": 24}),
        ("connector", {"num_gpu_blocks_override": 24}),
        ("connector-ahead", {"num_gpu_blocks_override": 24}),
        ("connector-v2", {"num_gpu_blocks_override": 24}),
        ("latent", {"num_gpu_blocks_override": 48}),
        ("eagle", {"num_gpu_blocks_override": 24}),
        ("eagle-v2", {"num_gpu_blocks_override": 24}),
        ("states", {"num_gpu_blocks_override": 26}),
        ("states", {"enable_prefix_caching": False}),
        ("states-v2", {"num_gpu_blocks_override": 26}),
        (
            "plain",
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_max": 3,
                    "prompt_lookup_min": 1,
                }
            },
        ),
    ],
    ids=[
        "mixed",
        "uncached",
        "hybrid",
        "asynchronous",
        "v2",
        "connector",
        "connector-ahead",
        "connector-v2",
        "latent",
        "eagle",
        "eagle-v2",
        "states",
        "states-uncached",
        "states-v2",
        "ngram",
    ],
)
def test_clean_traffic_is_silent_and_unchanged(
    model: str, options: dict[str, Any]
) -> None:
    requests = count(ci=24, full=192) // (3 if model in INTERPRETED else 1)
    arguments = [str(TRAFFIC), model, str(requests), json.dumps(options)]
    plain = last_json(run(arguments))
    checked = last_json(run(arguments, KV_CANARY="raise", KV_CANARY_REAL_DATA="all"))
    assert checked["violations"] == 0 and checked["forwards"] > 0
    assert checked["outputs"] == plain["outputs"]


_RENAMED = """
from kv_canary.engines.vllm import plugin
from kv_canary.faults.vllm.host import VllmHost, write_model
import pathlib, tempfile
import vllm.v1.worker.gpu_model_runner as m
m.GPUModelRunner.forward_of_the_model = m.GPUModelRunner._model_forward
del m.GPUModelRunner._model_forward
VllmHost(write_model(pathlib.Path(tempfile.mkdtemp()), "plain"))
print("started")
"""


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_renamed_method_is_refused(mode: str) -> None:
    result = run(["-c", _RENAMED], KV_CANARY=mode)
    text = "GPUModelRunner._model_forward, found no such method"
    assert text in result.stderr, result.stderr[-4000:]
    assert ("started" in result.stdout) is (mode == "log")
    assert ("NOTHING IS CHECKED" in result.stderr) is (mode == "log")


def test_doctor() -> None:
    result = run(["-m", "kv_canary.engines.cli", "doctor"])
    assert result.returncode == 0, result.stdout
    assert "engine: vllm" in result.stdout and "MISSING" not in result.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


@contextmanager
def server(folder: str, tmp_path: Path, **environ: str) -> Iterator[str]:
    """A vLLM server; yields its address."""
    log, port = tmp_path / "log", free_port()
    flags = "--load-format dummy --skip-tokenizer-init --enforce-eager --dtype float32"
    flags += " --max-model-len 512 --max-num-seqs 4 --num-gpu-blocks-override 48"
    process = subprocess.Popen(
        [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", folder, "--host", "127.0.0.1", "--port", str(port)),
            *flags.split(),
        ],
        env={
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "VLLM_PLUGINS": "kv_canary",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **environ,
        },
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                get(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def plain_model(tmp_path: Path) -> str:
    write = "from pathlib import Path; from kv_canary.faults.vllm.host import *; "
    model = run(["-c", f"{write}print(write_model(Path({str(tmp_path)!r}), 'plain'))"])
    return model.stdout.strip()


def test_a_server_checks_in_its_worker_process(tmp_path: Path) -> None:
    """Workers of a server load their plugins in a process of their own, and late."""
    folder, metrics = plain_model(tmp_path), free_port()
    ours = {"KV_CANARY": "raise", "KV_CANARY_METRICS_PORT": str(metrics)}
    with server(folder, tmp_path, **ours) as url:
        body = {"model": folder, "prompt": [5, 6, 7, 8, 9], "max_tokens": 8}
        get(f"{url}/v1/completions", {**body, "ignore_eos": True})
        salted = {**body, "max_tokens": 1, "cache_salt": "tenant"}
        get(f"{url}/v1/completions", salted)
        found = get(f"http://127.0.0.1:{metrics}/metrics")
        page = get(f"{url}/kv_canary")
        report = json.loads(get(f"{url}/kv_canary/report"))
        asked = ["doctor", "--running", f"http://127.0.0.1:{metrics}"]
        doctor = run(["-m", "kv_canary.engines.cli", *asked])
    assert doctor.returncode == 0 and "rank 0: checked, since " in doctor.stdout
    assert 'kv_canary_forwards_total{rank="0"} 9.0' in found
    assert "<title>KV canary</title>" in page
    (rank,) = report["ranks"]
    assert (rank["attached"], rank["forwards"], rank["incidents"]) == (True, 9, [])
    assert f'kv_canary_verified_slots_total{{rank="0"}} {sum(range(5, 12))}.0' in found
    assert 'kv_canary_violations_total{rank="0",reason="write_token"} 0.0' in found
    log = (tmp_path / "log").read_text()
    assert "across cache salts is not seen" not in log
    # In the worker's log, with vLLM's prefix: the proof that it is attached.
    lines = [line for line in log.splitlines() if "kv_canary: " in line]
    for text in ("checks group 'full': 3 layers", "the first forward is checked"):
        (line,) = [line for line in lines if text in line]
        assert re.match(r"\(Worker pid=\d+\) WARNING \d\d-\d\d ", line), line


def test_the_page_on_vllms_own_port() -> None:
    page = Path(__file__).with_name("vllm_page.py")
    told = last_json(run([str(page)], KV_CANARY="log", KV_CANARY_SAMPLE="1.0"))
    rid, *_ = told["due"]
    assert told["named"] and rid in told["explained"]
    assert "bytes changed in place" in told["explained"]
    rank = told["rank"]
    assert rank["attached"] and rank["forwards"] > 0 and rank["verified_slots"] > 0
    assert rank["requests"] == rank["verified_requests"] > 1
    assert rank["violations"]["verify_real_kv"] > 0
    assert "KV canary" in told["page"] and told["script"] == 200
    assert "default-src 'none'" in told["policy"] and told["absent"] == 404
    denials = [told[name] for name in ("elsewhere", "without a key", "with a key")]
    assert denials == [403, 401, 200]


_DAMAGE = """
from kv_canary.engines.engine_canary import EngineCanary

def register():
    plan = EngineCanary.plan

    def damage(self, step):
        # Each answer but the first loses its first block in the middle.
        for request in self.ledger.requests.values():
            if self.ledger.admitted > 1 and request.computed in (70, 75):
                self.groups[0].group.layers[1][request.blocks[0][0]].uniform_(-9, 9)
        plan(self, step)

    EngineCanary.plan = damage
"""


def test_a_server_heals(tmp_path: Path) -> None:
    """Scheduler and front end are in processes of their own."""
    plugin = tmp_path / "plugins" / "damage-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: damage\nVersion: 1\n"
    )
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndamage = damage:register\n"
    )
    (plugin.parent / "damage.py").write_text(_DAMAGE)
    folder = plain_model(tmp_path)
    ours = {
        "KV_CANARY": "heal",
        "KV_CANARY_REAL_DATA": "all",
        "VLLM_PLUGINS": "kv_canary,damage",
        "PYTHONPATH": str(plugin.parent),
    }
    with server(folder, tmp_path, **ours) as url:
        body = {
            "model": folder,
            "prompt": list(range(5, 65)),
            "max_tokens": 30,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        answers = [json.loads(get(f"{url}/v1/completions", body)) for _ in range(3)]
        report = json.loads(get(f"{url}/kv_canary/report"))
    first, *others = [answer["choices"][0]["token_ids"] for answer in answers]
    assert len(first) == 30 and others == [first, first]
    (rank,) = report["ranks"]
    assert (len(rank["incidents"]), rank["healed_requests"]) == (4, 4)
    assert (tmp_path / "log").read_text().count("kv_canary: healing: 1 running") == 4

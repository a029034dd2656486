"""Mistakes with flags: one line that names the fix, and exit code 2."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.srt.managers.scheduler.build import build_scheduler
from sglang.srt.managers.scheduler.scheduler_io import NullIO
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import bundled_demo_draft_path, bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="cpu")

DEMO = bundled_demo_model_path()

# Runs `sglang` with each list of flags of stdin and prints exit codes and stderr.
RUN_ALL = """
import contextlib, io, json, sys
from sglang import cli, launch_server
launch_server.guard_standard_streams = lambda: None
results = []
for argv in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(argv)
        except SystemExit as left:
            code = left.code
    results.append([code, err.getvalue()])
print(json.dumps(results))
"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """Flags of `sglang serve`, and what the one line about them says."""

    flags: list[str]
    words: list[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Broken copies of the demo model, one folder each."""
    root = tmp_path_factory.mktemp("models")
    for name, left_out in (
        ("no_config", "config.json"),
        ("no_weights", "model.safetensors.index.json"),
        ("no_tokenizer", "tokenizer.json"),
        ("strange", ""),
    ):
        (root / name).mkdir()
        for file in DEMO.glob("*.json"):
            if file.name != left_out:
                (root / name / file.name).symlink_to(file)
    config = root / "strange" / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text.replace("LlamaForCausalLM", "StrangeForCausalLM"))
    return root


def front_mistakes(folder: Path, port: int) -> list[Mistake]:
    """Those that are found before a scheduler is started."""
    model = "--model-path"
    return [
        Mistake(flags=["--port", f"{port}"], words=["another --port"]),
        Mistake(
            flags=["--host", "192.0.2.1"], words=["--host 192.0.2.1", "another --host"]
        ),
        Mistake(flags=["--host", "256.0.0.1"], words=["--host 256.0.0.1", "not known"]),
        Mistake(
            flags=[model, "/none"], words=[model, "/none", "no such folder", "name one"]
        ),
        Mistake(flags=["none"], words=[f"{model} none", "OWNER/NAME"]),
        Mistake(flags=["nobody/none"], words=[f"{model} nobody/none", "network"]),
        Mistake(flags=[f"{DEMO}/README.md"], words=["README.md", "no such folder or"]),
        Mistake(
            flags=[f"{folder}/no_config"],
            words=["no_config: the folder has no config.json", "name the folder"],
        ),
        Mistake(
            flags=[f"{folder}/no_tokenizer"],
            words=["no tokenizer.json", "--tokenizer-path", "--skip-tokenizer-init"],
        ),
        Mistake(
            flags=["--tokenizer-path", "/none"],
            words=["--tokenizer-path /none"],
        ),
        Mistake(flags=["--api-key-file", "/none"], words=["--api-key-file /none"]),
        Mistake(
            flags=["--chat-template", "/none"], words=["--chat-template /none", "file"]
        ),
        Mistake(flags=["--config", "/none"], words=["--config /none: no such file"]),
        Mistake(flags=["--max-runing-requests", "3"], words=["max-running-requests?"]),
        Mistake(flags=["--page", "3"], words=["is the beginning of --page-size, "]),
        Mistake(flags=["--enable-lora"], words=["add --max-lora-rank"]),
        Mistake(flags=["--enable-nothing"], words=["does not have", "--help lists"]),
        Mistake(flags=["--port", "http"], words=["invalid int value: 'http'"]),
        Mistake(flags=["--tp", "0"], words=["--tp-size 0 must be at least 1"]),
        Mistake(
            flags=["--attention-backend", "flashinfer", "--device", "cpu"],
            words=["--attention-backend flashinfer", "choose from cpu_native"],
        ),
        Mistake(
            flags=["--context-length", "4096"],
            words=["--context-length 4096", "use at most 2048"],
        ),
        Mistake(
            flags=["--speculative-algorithm", "EAGLE3", model, "/some/model"],
            words=["--speculative-draft-model-path"],
        ),
        Mistake(
            flags=["--max-total-tokens", "2", "--page-size", "64"],
            words=["--max-total-tokens 2", "raise it, or lower the page size"],
        ),
        *no_cuda(),
    ]


def no_cuda() -> Iterator[Mistake]:
    """Asking for CUDA on a machine without."""
    if not Path("/dev/nvidiactl").exists():
        yield Mistake(flags=["--device", "cuda"], words=["use --device cpu"])


SCHEDULER_MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_path": "strange"}, ["StrangeForCausalLM is not supported; supported: "]),
    ({"model_path": "no_weights"}, ["no *.safetensors file", "--load-format dummy"]),
    (
        {"max_total_tokens": 10**12},
        ["--max-total-tokens 1000000000000", "GiB are free; lower it"],
    ),
    (
        {"max_running_requests": 10**8},
        ["100000000 requests", "lower --context-length or --max-running-requests"],
    ),
    (
        {"page_size": 100_000},
        ["--page-size 100000", "lower it, or set --max-total-tokens"],
    ),
    (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_layout": "paged",
            "max_total_tokens": 16,
        },
        ["16 KV slots do not hold one request", "raise --max-total-tokens"],
    ),
    (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(bundled_demo_draft_path("EAGLE")),
        },
        ["--speculative-draft-model-path", "not a draft", "LlamaForCausalLMEagle3"],
    ),
    (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": "other_vocabulary",
        },
        ["--speculative-draft-model-path", "vocab"],
    ),
]


def test_the_front_says_what_to_do(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mistakes = front_mistakes(folder, taken.getsockname()[1])
        ran = subprocess.run(
            [sys.executable, "-c", RUN_ALL],
            input=json.dumps(
                [
                    ["serve", *m.flags, *([] if "--port" in m.flags else ["--port=0"])]
                    for m in mistakes
                ]
            ),
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    assert ran.returncode == 0, ran.stderr
    for mistake, (code, told) in zip(mistakes, json.loads(ran.stdout), strict=True):
        assert code == ExitCode.CONFIGURATION_ERROR, (mistake, told)
        (line,) = told.splitlines()
        assert "error: " in line and "Traceback" not in line
        for word in mistake.words:
            assert word in line, (mistake, line)


@pytest.mark.parametrize(
    ("values", "words"), SCHEDULER_MISTAKES, ids=range(len(SCHEDULER_MISTAKES))
)
def test_the_scheduler_says_what_to_do(
    folder: Path, values: dict[str, Any], words: list[str]
) -> None:
    named = {
        key: str(folder / value)
        for key, value in values.items()
        if key.endswith("model_path") and not value.startswith("/")
    }
    with contextlib.suppress(FileExistsError):
        write_other_vocabulary(folder / "other_vocabulary")
    with pytest.raises(ValueError) as raised:
        build_scheduler(ServerArgs(device="cpu", **{**values, **named}), NullIO())
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def write_other_vocabulary(folder: Path) -> None:
    """A model that is no draft of the demo model: it has other tokens."""
    folder.mkdir()
    for file in DEMO.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4000}))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

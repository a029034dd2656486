"""Files and flags with JSON or text that anybody may have written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang.bench_utils.crash_dumps import read_crash_dump
from sglang.bench_utils.launch import json_object_flag
from sglang.srt.arg_groups.config_file import read_config
from sglang.srt.arg_groups.kv_events_hook import parse_kv_events_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.weight_utils import weight_files
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.draft_model import load_token_map
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.json_file import parse_json_object, read_text_file, shown
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="cpu")

TEXTS = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"",
    b"{",
    b"nul",
    b"3",
    b"[]",
]
TEXTS += [b'{"a": ' + b"9" * 5000 + b"}", b"\x00" * 100, b'{"a": 1}' * 2]


def in_folder(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Reads a folder of the demo model in which the file `name` is another one."""

    def read_folder(file: Path) -> None:
        folder = file.parent / f"{file.name}.folder"
        folder.mkdir()
        for each in bundled_demo_model_path().iterdir():
            if each.name != name:
                (folder / each.name).symlink_to(each)
        os.link(file, folder / name)
        read(folder)

    return read_folder


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": in_folder("config.json", ModelConfig.from_path),
    "generation_config.json": in_folder(
        "generation_config.json", ModelConfig.from_path
    ),
    "index": in_folder("model.safetensors.index.json", weight_files),
    "tokenizer.json": in_folder("tokenizer.json", lambda f: load_tokenizer(str(f))),
    "tokenizer_config.json": in_folder(
        "tokenizer_config.json", lambda f: load_tokenizer(str(f))
    ),
    "token map": lambda f: load_token_map(str(f), vocab_size=9, device="cpu"),
    "crash dump": read_crash_dump,
    "--config": lambda f: read_config(str(f), ServerArgs),
}
# An empty file of flags sets none.
ADMITTED = {("--config", b"")}


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("name", READERS)
def test_a_file_with_something_else(tmp_path: Path, name: str, text: bytes) -> None:
    file = tmp_path / "given.json"
    file.write_bytes(text)
    if (name, text) in ADMITTED:
        READERS[name](file)
        return
    with pytest.raises(ValueError) as refused:
        READERS[name](file)
    told = str(refused.value)
    assert str(tmp_path) in told
    assert len(told.splitlines()) == 1 and len(told) < 1200, told


@pytest.mark.parametrize(
    "name", ["token map", "crash dump", "--config", "--chat-template"]
)
@pytest.mark.parametrize(
    "place", ["folder", "fifo", "fifo.safetensors", "none", "a\x00b", "x" * 5000]
)
def test_a_path_that_is_no_file(tmp_path: Path, name: str, place: str) -> None:
    file = tmp_path / place
    if place == "folder":
        file.mkdir()
    if place.startswith("fifo"):
        os.mkfifo(file)
    readers = READERS | {
        "--chat-template": lambda f: ServerArgs(chat_template=str(f)),
    }
    with pytest.raises(ValueError) as refused:
        readers[name](file)
    assert len(str(refused.value).splitlines()) == 1


def test_a_template_s_file_is_text(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="--chat-template .*template.jinja: not UTF-8"):
        ServerArgs(chat_template=str(file))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"publisher":' * 100_000, "", "3", "9" * 5000, "{"]
)
def test_a_flag_with_something_else(text: str) -> None:
    for read in (
        parse_kv_events_config,
        lambda text: json_object_flag("--extra-request-body", text),
        lambda text: parse_json_object(text, where="--flag"),
    ):
        with pytest.raises(ValueError) as refused:
            read(text)
        assert str(refused.value).startswith("--") and len(str(refused.value)) < 1200


def test_what_is_nested_too_deeply_is_shown_in_words() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a list that is nested too deeply"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(ValueError, match="bytes, more than"):
        read_text_file(file)


def test_commands_end_with_their_reader() -> None:
    for module in ("-m sglang", "-um sglang", "-m sglang.bench_serving"):
        command = f"{sys.executable} {module} --help | true"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

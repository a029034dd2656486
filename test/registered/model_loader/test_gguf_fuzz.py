"""Damaged GGUF files: whatever is wrong, one line that names the file says so."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFValueType as Kind

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_utils import iterate_weights, tensor_names
from sglang.srt.utils.gguf_header import read_gguf_header
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.gguf_files import finish, write_gguf, write_vocabulary
from sglang.test.scale import count
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=8, suite="cpu")

BASES = ["llama", "gemma3", "pieces"]
MUTANTS = count(ci=100, full=4000)
# What a field of 1, 4 or 8 bytes may be made.
NUMBERS = [0, 1, 2, 3, 7, 8, 9, 12, 24, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31]
NUMBERS += [(1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]

# Far more than a file of 400 KB needs, far less than it can claim.
MAX_MIB = 128


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    files = {}
    for name, model in (("llama", "LlamaForCausalLM"), ("gemma3", "Gemma3ForCausalLM")):
        tiny = write_tiny_model(folder / name, model, **sizes)
        files[name] = write_gguf(tiny, folder / f"{name}.gguf")
    files["pieces"] = write_vocabulary(
        folder / "pieces.gguf",
        ["<unk>", "<s>", "▁", "a", "▁a"],
        model="llama",
        scores=[0.0, 0.0, -1.0, -2.0, -3.0],
        bos_token_id=1,
        unknown_token_id=0,
    )
    return files


def read_everything(file: Path) -> list[str]:
    """Return the messages of each reader's ValueError; other errors leave."""
    said = []
    for read in (load, load_tokenizer_of, tensor_names, iterated):
        try:
            read(file)
        except ValueError as error:
            said.append(str(error))
    return said


def load(file: Path) -> None:
    config = ModelConfig.from_path(file)
    load_model(config, load_format="auto", dtype=torch.float32, rope_rows=64)


def load_tokenizer_of(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    tokenizer.decode(tokenizer.encode("a <s> né\n"))


def iterated(file: Path) -> None:
    for _ in iterate_weights(file):
        pass


def check(file: Path) -> int:
    """Check that each reader reads `file` or refuses it with one line, in little
    memory. Returns how many refuse it."""
    before = peak_mib()
    said = read_everything(file)
    assert peak_mib() - before < MAX_MIB, said
    for text in said:
        assert str(file) in text, text
        assert len(text.splitlines()) == 1 and len(text) < 1000, text
    return len(said)


def peak_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- bytes -------------------------------------------------------------------------


def damaged(data: bytes, random_: random.Random, end: int) -> bytes:
    """`data` with one to three changes before `end`."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 3))):
        at = random_.randrange(4, min(end, len(changed)))
        match random_.randrange(6):
            case 0:
                changed[at] ^= 1 << random_.randrange(8)
            case 1:
                changed[at] = random_.randrange(256)
            case 2:
                changed[at : at + 4] = struct.pack(
                    "<I", random_.choice(NUMBERS) & 0xFFFFFFFF
                )
            case 3:
                changed[at : at + 8] = struct.pack("<Q", random_.choice(NUMBERS))
            case 4:
                del changed[at : at + random_.randrange(1, 40)]
            case _:
                source = random_.randrange(end)
                changed[at:at] = changed[source : source + random_.randrange(1, 40)]
    return bytes(changed)


@pytest.mark.parametrize("base", BASES)
def test_damaged_headers(bases: dict[str, Path], tmp_path: Path, base: str) -> None:
    whole = bases[base]
    data = whole.read_bytes()
    tensors = read_gguf_header(whole).tensors.values()
    end = min((tensor.offset for tensor in tensors), default=len(data))
    file = tmp_path / f"{base}.gguf"
    refused = 0
    for seed in range(MUTANTS):
        file.write_bytes(damaged(data, random.Random(seed), end))
        refused += check(file) > 0
    assert refused > MUTANTS / 3


# -- values and tensors ------------------------------------------------------------

VALUES: list[tuple[Any, Kind, Kind | None]] = [
    ("", Kind.STRING, None),
    ("x", Kind.STRING, None),
    (0, Kind.UINT32, None),
    (-1, Kind.INT64, None),
    (7, Kind.UINT32, None),
    ((1 << 32) - 1, Kind.UINT32, None),
    ((1 << 64) - 1, Kind.UINT64, None),
    (True, Kind.BOOL, None),
    (0.5, Kind.FLOAT32, None),
    (float("nan"), Kind.FLOAT32, None),
    (float("inf"), Kind.FLOAT64, None),
    (["a"], Kind.ARRAY, Kind.STRING),
    ([1, 2], Kind.ARRAY, Kind.INT32),
    ([float("nan")], Kind.ARRAY, Kind.FLOAT32),
]
# Left alone by the readers, or no value at all for the library.
SKIPPED = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")


def with_value(source: Path, target: Path, key: str, value: Any) -> Path:
    """Write `source` again with another value, or without one (None)."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    writer.kv_data[0].clear()
    for name, field in reader.fields.items():
        if name in SKIPPED or (name == key and value is None):
            continue
        kind = field.types[0]
        given = (
            field.contents(),
            kind,
            field.types[-1] if kind is Kind.ARRAY else None,
        )
        writer.add_key_value(name, *(value if name == key else given))
    if key not in reader.fields and value is not None:
        writer.add_key_value(key, *value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data.copy())
    finish(writer)
    return target


def read_keys(file: Path) -> Iterator[str]:
    yield from read_gguf_header(file).values
    yield from ("split.count", "general.alignment", "tokenizer.chat_template.tool_use")
    yield from (f"tokenizer.ggml.{name}" for name in ("scores", "eot_token_id"))
    yield "tokenizer.ggml.add_space_prefix"


@pytest.mark.parametrize("base", BASES)
def test_values_of_other_kinds(
    bases: dict[str, Path], tmp_path: Path, base: str
) -> None:
    file = tmp_path / f"{base}.gguf"
    cases = [
        (key, value) for key in read_keys(bases[base]) for value in [None, *VALUES]
    ]
    random.Random(base).shuffle(cases)
    for key, value in cases[: count(ci=20, full=len(cases))]:
        if key == "general.alignment":  # the library's reader takes part in it
            continue
        check(with_value(bases[base], file, key, value))


SHAPES = [(), (0,), (1,), (5,), (16, 16, 1), (1 << 40, 1 << 40), ((1 << 64) - 1,)]


def test_tensors_of_other_shapes_kinds_and_places(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    data = bases["llama"].read_bytes()
    tensors = read_gguf_header(bases["llama"]).tensors
    file = tmp_path / "m.gguf"
    kinds = [*gguf.GGMLQuantizationType, 4, 5, 99, (1 << 32) - 1]
    for name, tensor in list(tensors.items())[: count(ci=4, full=100)]:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        end = at + 4 + 8 * len(tensor.shape) + 4 + 8
        for shape in [tensor.shape, *SHAPES]:
            for kind in kinds if shape == tensor.shape else [0, 2]:
                for place in (0, 32, 7, 1 << 40, (1 << 64) - 1)[: 1 + (kind == 0) * 4]:
                    info = struct.pack("<I", len(shape))
                    info += struct.pack(f"<{len(shape)}Q", *reversed(shape))
                    info += struct.pack("<IQ", kind, place)
                    file.write_bytes(data[:at] + info + data[end:])
                    check(file)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

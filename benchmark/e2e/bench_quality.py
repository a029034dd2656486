"""What fewer bits cost: perplexity and agreement with the unquantised model.

python benchmark/e2e/bench_quality.py FOLDER [--windows 8] [--group-size 64]

Quantises a model with `scripts/quantize.py` to every scheme and serves each; also the
plain model with KV of 8 bits. The text is the first ten decisions in docs/adr, cut into
windows of 512 tokens. Perplexity is that of the text; agreement is the share of
positions whose likeliest next token is the plain model's. Prints a table in Markdown,
and as the last line one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import sglang

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

from quantize import recipes  # noqa: E402

from sglang.srt.utils.hf_tokenizer import load_tokenizer  # noqa: E402
from sglang.test.quantized_models import quantize_folder  # noqa: E402

WINDOW = 512


class Scores(NamedTuple):
    """Log probabilities of the text's tokens, and the likeliest token at each place."""

    logprobs: list[float]
    likeliest: list[int]


def windows(folder: Path, count: int) -> list[list[int]]:
    files = sorted((REPO / "docs" / "adr").glob("00*.md"))[:10]
    text = "\n".join(file.read_text() for file in files)
    ids = load_tokenizer(str(folder)).encode(text)
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(count)]


def score(folder: Path, text: list[list[int]], **server_args: Any) -> Scores:
    found = Scores([], [])
    with sglang.Engine(
        model_path=str(folder), log_level="error", **server_args
    ) as engine:
        for ids in text:
            answer = engine.generate(
                input_ids=ids,
                sampling_params={"max_new_tokens": 1, "temperature": 0},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=1,
            )
            meta = answer["meta_info"]
            found.logprobs.extend(each[0] for each in meta["input_token_logprobs"][1:])
            tops = meta["input_top_logprobs"][1:]
            found.likeliest.extend(top[0][1] for top in tops)
    return found


def size_of(folder: Path) -> float:
    """Bytes of the weights, in MB."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--scheme", action="append", help="unset: all")
    args = parser.parse_args()
    text = windows(args.folder, args.windows)
    plain = score(args.folder, text)
    rows: list[dict[str, Any]] = []

    def add(name: str, folder: Path, **server_args: Any) -> None:
        began = time.perf_counter()
        found = plain if name == "plain" else score(folder, text, **server_args)
        same = sum(
            a == b for a, b in zip(found.likeliest, plain.likeliest, strict=True)
        )
        row = {
            "scheme": name,
            "megabytes": round(size_of(folder)),
            "perplexity": math.exp(-sum(found.logprobs) / len(found.logprobs)),
            "agreement": same / len(plain.likeliest),
        }
        rows.append(row)
        seconds = time.perf_counter() - began
        print(
            f"| {name} | {row['megabytes']} | {row['perplexity']:.3f} | "
            f"{100 * row['agreement']:.1f} % | {seconds:.0f} s",
            flush=True,
        )

    add("plain", args.folder)
    for name in ("fp8_e4m3", "fp8_e5m2"):
        add(f"KV {name}", args.folder, kv_cache_dtype=name)
    for name, recipe in recipes(args.group_size).items():
        if args.scheme and name not in args.scheme:
            continue
        with tempfile.TemporaryDirectory() as parent:
            folder = quantize_folder(args.folder, Path(parent, "model"), recipe)
            add(name, folder)
    print(json.dumps({"tokens": len(plain.likeliest), "rows": rows}))


if __name__ == "__main__":
    main()

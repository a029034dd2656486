"""Export of the shipped folder: bf16 shards, their index, the configurations and, once
evaluation.json exists, metrics.json and the model card.

Knows file formats and size limits; measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.demo_model.card import render_card
from lab.demo_model.model import DemoConfig
from lab.demo_model.paths import ASSETS, ENDOFTEXT_ID, IM_END_ID, PACK, RUN

MAX_SHARD_BYTES = 12_000_000
HEADER_BYTES = 20_000
REPORT = "training.json"
RUN_KEYS = ("config", "best_heldout_loss", "best_step", "seconds", "epochs")


def split_shards(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Fill shards in the order of the names; none is over `MAX_SHARD_BYTES`."""
    shards: list[dict[str, Tensor]] = [{}]
    size = HEADER_BYTES
    for name, tensor in state.items():
        if size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = HEADER_BYTES
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def write_weights(state: dict[str, Tensor], out: Path) -> None:
    """Write `model-0000x-of-0000y.safetensors` and the index that maps names."""
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    shards = split_shards(narrow)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        # safetensors writes owner-only files; package data must be readable by all.
        (out / name).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(tensor.nbytes for tensor in narrow.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / "model.safetensors.index.json", index)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def pick_run(runs: list[Path]) -> Path:
    """Return the run with the best held-out loss."""
    return min(runs, key=lambda r: float(read_json(r / REPORT)["best_heldout_loss"]))


def export_weights(run: Path, out: Path) -> None:
    """Write weights and configurations from the checkpoint in `run`."""
    out.mkdir(parents=True, exist_ok=True)
    write_weights(load_file(run / "checkpoint.safetensors"), out)
    write_json(out / "config.json", DemoConfig().to_transformers())
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": ENDOFTEXT_ID,
            "eos_token_id": [ENDOFTEXT_ID, IM_END_ID],
            "pad_token_id": ENDOFTEXT_ID,
        },
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if out != ASSETS:
            shutil.copy(ASSETS / name, out / name)


def export_card(runs: list[Path], pack: Path, out: Path) -> None:
    """Write metrics.json and README.md from the measurements of the other steps."""
    reports = [read_json(run / REPORT) for run in runs]
    metrics = {
        "corpus": read_json(pack / "summary.json"),
        "training": read_json(pick_run(runs) / REPORT),
        "runs": [{key: report[key] for key in RUN_KEYS} for report in reports],
        "evaluation": read_json(pick_run(runs) / "evaluation.json"),
    }
    write_json(out / "metrics.json", metrics)
    (out / "README.md").write_text(render_card(metrics), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("what", choices=("weights", "card"))
    parser.add_argument("--runs", type=Path, nargs="+", default=[RUN])
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    if args.what == "weights":
        export_weights(pick_run(args.runs), args.out)
    else:
        export_card(args.runs, args.pack, args.out)


if __name__ == "__main__":
    main()

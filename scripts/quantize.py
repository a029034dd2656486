"""Quantise a checkpoint folder in a published format, rounding to nearest.

    scripts/quantize.py FOLDER TARGET --scheme block

Writes `quantization_config` and one `model.safetensors`. Embedding, head, norms and
routers stay as they are. Nothing is calibrated: published GPTQ and AWQ checkpoints
choose their values with data and lose less.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang.test.quantized_models import (
    Recipe,
    awq_recipe,
    block_recipe,
    channel_recipe,
    gptq_recipe,
    packed_recipe,
    quantize_folder,
    tensor_recipe,
)


def recipes(group_size: int) -> dict[str, Recipe]:
    """Return the schemes by name."""
    size = group_size
    return {
        "tensor": tensor_recipe(),
        "channel": channel_recipe(),
        "block": block_recipe(128, 128),
        "int4": packed_recipe(size=size, symmetric=True),
        "gptq": gptq_recipe(size=size, act_order=False, symmetric=True),
        "gptq-act-order": gptq_recipe(size=size, act_order=True, symmetric=False),
        "awq": awq_recipe(size=size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--scheme", choices=recipes(128), required=True)
    parser.add_argument("--group-size", type=int, default=128, help="of 4 bits")
    args = parser.parse_args()
    if args.target.exists():
        raise SystemExit(f"{args.target} exists; name a new folder")
    recipe = recipes(args.group_size)[args.scheme]
    print(quantize_folder(args.folder, args.target, recipe))


if __name__ == "__main__":
    main()

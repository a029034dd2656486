"""Export of the demo model's drafts: weights, config.json, metrics.json and a card in
which every number was measured.

Knows file formats and wording; trains and measures nothing.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.demo_model import train_draft_lm, train_eagle, train_eagle3
from lab.demo_model.export import read_json, write_json
from lab.demo_model.model import DemoConfig
from lab.demo_model.paths import ASSETS, BUILD
from lab.demo_model.target_states import AUX_LAYERS

RUNS = BUILD / "drafts"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """`run` is the folder of its training run, `config` the content of config.json."""

    run: str
    algorithm: str
    folder: Path
    title: str
    config: Callable[[], dict[str, object]]
    has_tokenizer: bool


def head_config(sizes: DemoConfig, architecture: str) -> dict[str, object]:
    """Return the config of a head, which uses the target's embedding."""
    return {
        **sizes.to_transformers(),
        "architectures": [architecture],
        "tie_word_embeddings": False,
    }


def eagle_config() -> dict[str, object]:
    return head_config(train_eagle.CONFIG, "LlamaForCausalLMEagle")


def eagle3_config(
    sizes: DemoConfig = train_eagle3.CONFIG,
    *,
    draft_vocab: int = train_eagle3.DRAFT_VOCAB,
    aux_layers: tuple[int, ...] = AUX_LAYERS,
) -> dict[str, object]:
    """Return EAGLE3's config; its layers, by output, are one before `aux_layers`."""
    return {
        **head_config(sizes, "LlamaForCausalLMEagle3"),
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": sizes.hidden_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_layers],
        },
    }


DRAFTS = (
    Draft(
        run="eagle",
        algorithm="EAGLE",
        folder=ASSETS.with_name("demo_model_eagle"),
        title="EAGLE head of the demo model",
        config=eagle_config,
        has_tokenizer=False,
    ),
    Draft(
        run="eagle3",
        algorithm="EAGLE3",
        folder=ASSETS.with_name("demo_model_eagle3"),
        title="EAGLE3 head of the demo model",
        config=eagle3_config,
        has_tokenizer=False,
    ),
    Draft(
        run="draft",
        algorithm="STANDALONE",
        folder=ASSETS.with_name("demo_model_draft"),
        title="Draft language model of the demo model",
        config=train_draft_lm.CONFIG.to_transformers,
        has_tokenizer=True,
    ),
)

CARD = """\
# {title}

Drafts for `../demo_model` with `--speculative-algorithm {algorithm}`. Like its target
it is a test object: it makes speculative decoding measurable without a download. Data,
split and licences are the target's; `lab/demo_model/README.md` says how to rebuild
it.

| | |
|---|---|
| trained weights | {parameters} million, bf16 safetensors |
| licence of the weights | Apache-2.0, as the package |
| training | {steps} steps, {tokens} million tokens in {seconds} s on {machine} |
| text | {own_share} of the windows hold continuations that the target wrote |
| optimiser | AdamW, peak learning rate {lr}, weight decay {weight_decay}, cosine |
| steps in which the draft reads its own state | {unroll} |

## Measured on held-out code

Greedy chains over {tokens_measured} tokens that the target wrote greedily for
{requests} held-out prompts ({new_tokens} tokens each at most); tokens per verification,
bonus included.

| steps | tokens per verification |
|---|---|
{lengths}

Share of draft tokens that are right, by depth, given that those before them were:
{by_depth}.
"""


def render_card(draft: Draft, metrics: dict[str, Any]) -> str:
    """Return README.md; KeyError when a measurement is missing."""
    config, acceptance = metrics["config"], metrics["acceptance"]
    return CARD.format(
        title=draft.title,
        algorithm=draft.algorithm,
        parameters=f"{metrics['parameters'] / 1e6:.2f}",
        steps=metrics["steps"],
        tokens=f"{metrics['tokens_seen'] / 1e6:.1f}",
        seconds=f"{metrics['seconds']:.0f}",
        machine=metrics["machine"],
        own_share=f"{100 * metrics['own_text_share']:.0f} %",
        lr=config["lr"],
        weight_decay=config["weight_decay"],
        unroll=config["unroll"],
        requests=acceptance["requests"],
        tokens_measured=acceptance["tokens"],
        new_tokens=acceptance["new_tokens"],
        lengths="\n".join(
            f"| {steps} | {length} |"
            for steps, length in acceptance["accept_length"].items()
        ),
        by_depth=", ".join(map(str, acceptance["right_by_depth"])),
    )


def export(draft: Draft, run: Path, out: Path) -> None:
    """Write the folder `out` from a training run."""
    out.mkdir(parents=True, exist_ok=True)
    metrics = read_json(run / "training.json")
    shutil.copy(run / "draft.safetensors", out / "model.safetensors")
    # safetensors writes owner-only files; package data must be readable by all.
    (out / "model.safetensors").chmod(0o644)
    write_json(out / "config.json", draft.config())
    write_json(out / "metrics.json", metrics)
    (out / "README.md").write_text(render_card(draft, metrics), encoding="utf-8")
    if draft.has_tokenizer:
        for name in TOKENIZER_FILES:
            shutil.copy(ASSETS / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=Path, default=RUNS)
    args = parser.parse_args()
    for draft in DRAFTS:
        export(draft, args.runs / draft.run, draft.folder)
        print(draft.folder)


if __name__ == "__main__":
    main()

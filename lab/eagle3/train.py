"""An EAGLE3 head for a model that the engine serves, from the model alone: it continues
text that is on this machine, and the head learns from the resulting states.

    python -m lab.eagle3.train --model FOLDER --device cpu --minutes 25 --out HEAD

Writes HEAD/config.json, model.safetensors, training.json and heldout.jsonl, prompts of
packages that were not trained on, for `bench_spec_text.py --heldout`, and if asked the
heads of every few minutes of training. The recipe is the same as for the demo model's
head (`lab/demo_model/train_eagle3.py`).
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.demo_model.distill import (
    DistillConfig,
    load_weights,
    save_weights,
    train_draft,
)
from lab.demo_model.draft_heads import Eagle3Head
from lab.demo_model.export import write_json
from lab.demo_model.export_drafts import eagle3_config
from lab.demo_model.model import DemoConfig
from lab.demo_model.train_eagle3 import (
    chain_loss,
    choose_draft_ids,
    read_draft_ids,
    vocabulary_maps,
)
from lab.eagle3.data import Batch, batches
from lab.eagle3.prompts import (
    HELDOUT,
    heldout_prompts,
    read_training,
    training_prompts,
    write_lines,
)
from lab.eagle3.record import (
    Document,
    Recorder,
    build_target,
    write_documents,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.utils.hf_tokenizer import load_tokenizer

WEIGHTS = "model.safetensors"


def batch_loss(
    head: Eagle3Head,
    draft_ids: Tensor,
    head_rows: Tensor,
    logit_cap: float,
    unroll: int,
    batch: Batch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch; `head_rows` [D, H] are the head's rows for
    `draft_ids`.
    """
    logits = (batch.hidden.to(head_rows.dtype) @ head_rows.T).float()
    if logit_cap:
        logits = (logits / logit_cap).tanh() * logit_cap
    return chain_loss(
        head,
        draft_ids,
        ids=batch.ids,
        aux=batch.aux.to(head_rows.dtype),
        shares=logits.softmax(-1),
        best=batch.best,
        unroll=unroll,
    )


def head_sizes(config: ModelConfig, args: argparse.Namespace) -> DemoConfig:
    """Return the sizes of a layer of the target's width; plain rotary positions."""
    return DemoConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=args.intermediate_size or config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=args.length,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a head takes from its target, in fp32, and the text that the target wrote.

    Fields:
        config: the target's `ModelConfig`.
        eos_ids: its end tokens.
        embedding: [V, H], as the layers read it.
        head: [V, H].
        final_norm: [H].
    """

    config: ModelConfig
    eos_ids: list[int]
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    aux_layers: tuple[int, ...]
    documents: list[Document]


def layers_to_read(model: object, config: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: the usual three.

    Raises:
        SystemExit: this model has no layers that can be read.
    """
    if not isinstance(model, LlamaForCausalLM) or config.latent is not None:
        raise SystemExit(
            f"--model {config.path}: no head is trained for {config.architecture}; "
            "choose a decoder without latents"
        )
    count = config.num_layers
    layers = (2, count // 2, count - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise SystemExit(
            f"--model {config.path}: {count} layers are too few for the three that an "
            "EAGLE3 head reads; it needs 7"
        )
    return layers


def prepare_prompts(args: argparse.Namespace) -> Iterator[list[int]]:
    """Write the held-out prompts, and return those to train with."""
    heldout: Path = args.out / HELDOUT
    if args.prompts is not None:
        shutil.copy(args.prompts / HELDOUT, heldout)
        return read_training(args.prompts, length=args.length)
    tokenizer = load_tokenizer(args.model)
    write_lines(heldout, heldout_prompts(tokenizer))
    return training_prompts(tokenizer, length=args.length, seed=args.seed)


@torch.no_grad()
def record_target(args: argparse.Namespace) -> Target:
    """Serve the target, let it write, and keep what training needs."""
    scheduler, io = build_target(
        args.model,
        device=args.device,
        rows=args.rows,
        length=args.length,
        dtype="bfloat16" if args.device == "cuda" else "float32",
    )
    model, config = scheduler.worker.model_runner.model, scheduler.model_config
    aux_layers = layers_to_read(model, config)
    assert isinstance(model, LlamaForCausalLM)
    model.capture_layers(aux_layers)
    recorder = Recorder(model, rows=args.rows, length=args.length, device=args.device)
    write_documents(
        scheduler,
        io,
        prepare_prompts(args),
        recorder,
        rows=args.rows,
        length=args.length,
        seconds=60 * args.minutes * args.writing_share,
        max_tokens=args.max_tokens,
    )
    embedding, head = model.embed_and_head()
    every = torch.arange(config.vocab_size, device=args.device)
    return Target(
        config=config,
        eos_ids=sorted(config.eos_token_ids),
        embedding=embedding(every).float(),
        head=head.rows(every).float(),
        final_norm=model.model.norm.weight.float(),
        aux_layers=aux_layers,
        documents=recorder.documents,
    )


def train(
    args: argparse.Namespace, target: Target, seconds: float
) -> tuple[Eagle3Head, Tensor, dict[str, object]]:
    """Train a head; return it, its draft ids and the report."""
    counts = torch.zeros(target.config.vocab_size, dtype=torch.float64)
    for document in target.documents:
        counts += torch.bincount(document.best.cpu(), minlength=len(counts))
    # Unseen tokens are ordered by id, which is the order of merges in a byte-pair
    # vocabulary.
    rank = torch.arange(len(counts)) / len(counts)
    draft_ids = choose_draft_ids(counts - rank, args.draft_vocab)
    if args.resume is not None:
        draft_ids = read_draft_ids(args.resume / WEIGHTS)
    on_device = draft_ids.to(args.device)
    torch.manual_seed(args.seed)
    sizes = head_sizes(target.config, args)
    head = Eagle3Head(
        sizes, target.embedding, on_device, final_norm=target.final_norm
    ).to(args.device)
    head_rows = target.head[on_device]
    with torch.no_grad():
        head.lm_head.weight.copy_(head_rows)
    if args.resume is not None:
        load_weights(head, args.resume / WEIGHTS)
    config = DistillConfig(
        seconds=seconds,
        batch=args.batch,
        length=args.length,
        lr=args.lr,
        weight_decay=args.weight_decay,
        seed=args.seed,
        unroll=args.unroll,
        max_steps=args.max_steps,
    )
    loss_of = partial(
        batch_loss,
        head,
        on_device,
        head_rows,
        target.config.final_logit_cap,
        args.unroll,
    )
    stream = batches(
        target.documents, size=args.batch, unroll=args.unroll, seed=args.seed
    )
    keep = partial(save_now_and_then, args, target, head, draft_ids)
    report = train_draft(
        head, stream, loss_of, config, torch.device(args.device), on_report=keep
    )
    report["draft_vocab_share"] = round(
        float(counts[draft_ids].sum() / counts.sum()), 4
    )
    return head, draft_ids, report


def save_now_and_then(
    args: argparse.Namespace,
    target: Target,
    head: Eagle3Head,
    draft_ids: Tensor,
    row: dict[str, float],
) -> None:
    """Keep the head of every `--checkpoint-seconds` as OUT/at_SECONDS."""
    if not args.checkpoint_seconds:
        return
    seconds = int(row["seconds"]) // args.checkpoint_seconds * args.checkpoint_seconds
    folder = args.out / f"at_{seconds:04d}"
    if seconds and not folder.exists():
        folder.mkdir()
        save(folder, target, head, draft_ids, row)


def save(
    folder: Path,
    target: Target,
    head: Eagle3Head,
    draft_ids: Tensor,
    report: Mapping[str, object],
) -> None:
    """Write the folder for --speculative-draft-model-path."""
    own = {
        "vocab_size": target.config.vocab_size,
        "max_position_embeddings": target.config.context_len,
        "bos_token_id": None,
        "eos_token_id": target.eos_ids,
        "pad_token_id": None,
    }
    sizes = eagle3_config(
        head.config, draft_vocab=len(draft_ids), aux_layers=target.aux_layers
    )
    config = {key: value for key, value in (sizes | own).items() if value is not None}
    write_json(folder / "config.json", config)
    write_json(folder / "training.json", report)
    maps = vocabulary_maps(draft_ids, target.config.vocab_size)
    save_weights({**head.state_dict(), **maps}, folder / WEIGHTS)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of the target")
    add("--out", type=Path, required=True, help="folder of the head")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--resume", type=Path, help="folder of a head that is trained further")
    add("--seed", type=int, default=0, help="another one writes other text")
    add("--prompts", type=Path, help="folder of `lab.eagle3.prompts`, instead of files")
    add("--minutes", type=float, default=25.0, help="of writing and training")
    add("--writing-share", type=float, default=0.45, help="of the minutes, at most")
    add("--checkpoint-seconds", type=int, default=0, help="0: only the last head")
    add("--rows", type=int, default=48, help="requests that the target answers at once")
    add("--length", type=int, default=320, help="tokens of a request, its prompt too")
    add("--max-tokens", type=int, default=4_000_000, help="recorded at most")
    add("--max-steps", type=int, default=1_000_000, help="of training")
    add("--draft-vocab", type=int, default=4096)
    add("--intermediate-size", type=int, help="of the head; default: the target's")
    add("--unroll", type=int, default=4, help="steps that read the head's own state")
    add("--batch", type=int, default=6, help="documents of a training step")
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.05)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    target = record_target(args)
    gc.collect()  # the scheduler, its model and its KV
    num_tokens = sum(len(document.ids) for document in target.documents)
    print(f"{len(target.documents)} documents, {num_tokens} tokens", flush=True)
    if not target.documents:
        raise SystemExit(f"--minutes {args.minutes}: nothing was written in that time")
    head, draft_ids, report = train(args, target, deadline - time.monotonic())
    report["recorded_tokens"] = num_tokens
    save(args.out, target, head, draft_ids, report)
    print(args.out)


if __name__ == "__main__":
    main()

"""Rendering of the model card from metrics.json: every number in it was measured.

Knows the wording; refuses to know how anything was measured.
"""

from __future__ import annotations

from typing import Any

MAX_SAMPLE_LINES = 24

CARD = """\
# Demo model

A Llama-type language model of {parameters} parameters that writes Python. It is
bundled so that the engine can be started, tested and measured on real text without a
download. It is a test object: its code looks like Python and is often wrong.

| | |
|---|---|
| architecture | `LlamaForCausalLM`, hidden {hidden_size}, {num_hidden_layers} layers, \
{num_attention_heads} heads / {num_key_value_heads} KV heads of {head_dim}, \
SwiGLU {intermediate_size}, RoPE, tied embeddings |
| vocabulary, context | {vocab_size} byte-level BPE tokens, \
{max_position_embeddings} positions |
| weights | bf16 safetensors |
| licence of the weights | Apache-2.0, as the package |

## Data

Python sources without their tests, split by a hash of the de-duplicated files,
{heldout_files} of {all_files} files ({heldout_share}) held out:

| source | version | licence | training bytes | held-out bytes |
|---|---|---|---|---|
{sources}

{chat_share} of the training tokens are chat-shaped samples cut from the same training
files: a docstring or a name turned into a request, and the function as the answer,
plain code without a fence.

## Training

{tokens_seen} tokens in {steps} steps ({epochs} epochs, each in a new order with a new
draw of chats) in {seconds} s on {machine} at {tokens_per_second} tokens/s, after
{compile_seconds} s of compilation; bf16 autocast, AdamW (peak learning rate {lr},
weight decay {weight_decay}), cosine schedule, dropout {dropout}. The checkpoint (step
{best_step}) is the one with the best held-out loss of all runs below; because it was
chosen there, that loss is slightly optimistic.

| run | dropout | weight decay | epochs | seconds | best held-out loss |
|---|---|---|---|---|---|
{runs}

## Measured on the held-out files

| | |
|---|---|
| loss of files, nats per token | {code_nats_per_token} |
| loss of files, nats per byte | {code_nats_per_byte} |
| loss of chats, nats per token | {chat_nats_per_token} |
| completions that parse, greedy | {parse_share} of {count} |
| completions that parse, temperature {temperature} | {sampled_parse_share} of {count} |
| completions with too few lines of code, greedy | {too_short_share} |
| completions that finish their function in time, greedy | {closed_share} |
| distinct 4-gram ratio, greedy | {distinct_4gram} (pooled {distinct_4gram_pooled}) |
| distinct 4-gram ratio, temperature {temperature} | {sampled_distinct_4gram} \
(pooled {sampled_distinct_4gram_pooled}) |
| distinct 4-gram ratio of the files' own text | {reference_distinct_4gram} \
(pooled {reference_distinct_4gram_pooled}) |
| chat answers that end with `<|im_end|>`, greedy | {chat_ended} of {chat_count} |
| chat answers that end so and parse, greedy | {chat_both} of {chat_count} |

A prompt is a held-out file up to the end of a function's header and docstring (its last
{context_tokens} tokens); {count} functions with a body of at least three lines were
drawn from {case_files} files. At most {max_new_tokens} tokens are generated. The
completion ends where the function ends; where the limit came first, after its last
complete simple statement. It counts when file prefix and completion together pass
`ast.parse`, in one attempt, and it has at least {min_code_lines} lines of code. The
ratio is taken over token 4-grams inside one completion and averaged, pooled over all.

## Samples

The first prompts of the measure above, as drawn; greedy.

{samples}

## Chat

Greedy answers to fixed requests.

{chats}

The scripts that made this folder are in `lab/demo_model/` of the source tree.
"""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def clip(text: str) -> str:
    """Cut to `MAX_SAMPLE_LINES` lines, with a mark if more follow."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MAX_SAMPLE_LINES:
        lines = [*lines[:MAX_SAMPLE_LINES], "..."]
    return "\n".join(lines)


def render_sources(corpus: dict[str, Any]) -> str:
    rows = []
    for source in corpus["sources"]:
        name = source["package"]
        train = corpus["train"]["bytes_by_package"].get(name, 0)
        heldout = corpus["heldout"]["bytes_by_package"].get(name, 0)
        label = "CPython standard library" if name == "cpython" else name
        rows.append(
            f"| {label} | {source['version']} | {source['licence']} "
            f"| {train:,} | {heldout:,} |"
        )
    return "\n".join(rows)


def render_runs(runs: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"| {number} | {run['config']['dropout']} | {run['config']['weight_decay']} "
        f"| {run['epochs']} | {run['seconds']:.0f} | {run['best_heldout_loss']} |"
        for number, run in enumerate(runs, start=1)
    )


def render_sample(sample: dict[str, Any]) -> str:
    prompt = clip("\n".join(sample["prompt_end"]))
    verdict = "parses" if sample["parses"] else "does not parse"
    return (
        f"`{sample['path']}` ({verdict}); end of the prompt, then the completion:\n\n"
        f"~~~python\n{prompt}\n~~~\n\n~~~python\n{clip(sample['completion'])}\n~~~"
    )


def render_chat_sample(sample: dict[str, Any]) -> str:
    return f"> {sample['user']}\n\n~~~python\n{clip(sample['assistant'])}\n~~~"


def render_card(metrics: dict[str, Any]) -> str:
    """Return README.md; KeyError when a measurement is missing."""
    corpus, training = metrics["corpus"], metrics["training"]
    evaluation = metrics["evaluation"]
    loss, greedy = evaluation["loss"], evaluation["greedy"]
    sampled, reference = evaluation["sampled"], evaluation["reference"]
    files = corpus["train"]["files"] + corpus["heldout"]["files"]
    return CARD.format(
        **training["model"],
        parameters=f"{training['parameters'] / 1e6:.1f} million",
        heldout_files=corpus["heldout"]["files"],
        all_files=files,
        heldout_share=percent(corpus["heldout"]["files"] / files),
        sources=render_sources(corpus),
        chat_share=percent(training["config"]["chat_share"]),
        tokens_seen=f"{training['tokens_seen'] / 1e6:,.0f} million",
        steps=training["steps"],
        epochs=training["epochs"],
        seconds=f"{training['seconds']:.0f}",
        machine=training["machine"],
        tokens_per_second=f"{training['tokens_per_second']:,}",
        compile_seconds=f"{training['compile_seconds']:.0f}",
        lr=training["config"]["lr"],
        weight_decay=training["config"]["weight_decay"],
        dropout=training["config"]["dropout"],
        best_step=training["best_step"],
        runs=render_runs(metrics["runs"]),
        code_nats_per_token=loss["code_nats_per_token"],
        code_nats_per_byte=loss["code_nats_per_byte"],
        chat_nats_per_token=loss["chat_nats_per_token"],
        parse_share=percent(greedy["parse_share"]),
        count=greedy["count"],
        too_short_share=percent(greedy["too_short_share"]),
        closed_share=percent(greedy["closed_share"]),
        distinct_4gram=greedy["distinct_4gram"],
        distinct_4gram_pooled=greedy["distinct_4gram_pooled"],
        temperature=sampled["temperature"],
        sampled_parse_share=percent(sampled["parse_share"]),
        sampled_distinct_4gram=sampled["distinct_4gram"],
        sampled_distinct_4gram_pooled=sampled["distinct_4gram_pooled"],
        reference_distinct_4gram=reference["distinct_4gram"],
        reference_distinct_4gram_pooled=reference["distinct_4gram_pooled"],
        chat_ended=percent(evaluation["chat"]["ended_share"]),
        chat_both=percent(evaluation["chat"]["ended_and_parse_share"]),
        chat_count=evaluation["chat"]["count"],
        context_tokens=evaluation["rules"]["context_tokens"],
        max_new_tokens=evaluation["rules"]["max_new_tokens"],
        min_code_lines=evaluation["rules"]["min_code_lines"],
        case_files=evaluation["rules"]["files"],
        samples="\n\n".join(map(render_sample, evaluation["samples"])),
        chats="\n\n".join(map(render_chat_sample, evaluation["chat"]["samples"])),
    )

"""Needs of models are served, or refused by name: sinks, caps, windows over trees."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from sglang.srt.configs.attention_backends import (
    ATTENTION_BACKENDS,
    LATENT,
    LOGIT_CAP,
    SINKS,
    WINDOWED_TREES,
    AttentionNeed,
    check_needs,
)
from sglang.srt.configs.draft_layout import BranchLayout
from sglang.srt.layers.attention.attention_registry import attention_needs
from sglang.srt.layers.ops.attention.op import decode_attention_ref
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.ops.branch_slots.op import SlotRows, branch_table_ref
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=4, suite="cpu")

NEEDS = (LATENT, SINKS, LOGIT_CAP, WINDOWED_TREES)


def layer(**options: object) -> RadixAttention:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return RadixAttention(**heads, layer_id=0, scaling=1.0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "has_trees", "needs"),
    [
        ({}, True, []),
        ({"sinks": torch.zeros(4)}, False, [SINKS]),
        ({"logit_cap": 30.0}, False, [LOGIT_CAP]),
        ({"sliding_window": 8}, False, []),
        ({"sliding_window": 8}, True, [WINDOWED_TREES]),
    ],
)
def test_needs_are_those_of_any_layer(
    options: dict[str, object], has_trees: bool, needs: list[AttentionNeed]
) -> None:
    model = nn.Sequential(layer(), nn.Linear(2, 2), nn.Sequential(layer(**options)))
    assert attention_needs(model.modules(), has_trees=has_trees) == needs


def test_latents_are_a_need() -> None:
    attention = layer()
    attention.is_latent = True
    assert attention_needs([attention], has_trees=False) == [LATENT]


@pytest.mark.parametrize("need", NEEDS)
def test_a_backend_that_lacks_a_need_is_refused_by_name(need: AttentionNeed) -> None:
    for name, device in (("torch_native", "cpu"), ("triton", "cuda")):
        check_needs(name, NEEDS, device=device)
    check_needs("flashinfer", [], device="cuda")
    message = (
        f"--attention-backend flashinfer does not serve {need.text}.*; use "
        "--attention-backend torch_native or triton"
    )
    with pytest.raises(ValueError, match=message):
        check_needs("flashinfer", [need], device="cuda")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"attn_logit_softcapping": 9.0}, "capped attention scores"),
        ({"sliding_window": 9}, "sliding windows with --speculative-eagle-topk"),
        ({}, "latents in place of K and V"),
    ],
)
def test_a_model_that_needs_more_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, float], text: str
) -> None:
    """As if cpu_native lacked everything."""
    name = "DeepseekV2ForCausalLM" if not config else "LlamaForCausalLM"
    write_tiny_model(tmp_path, name, **config)
    ForwardHarness(tmp_path)
    known = ATTENTION_BACKENDS["torch_native"]
    monkeypatch.setitem(ATTENTION_BACKENDS, "cpu_native", type(known)(**_plain(known)))
    monkeypatch.setattr(ModelRunner, "_verifies_trees", lambda self: True)
    with pytest.raises(ValueError, match=f"cpu_native does not serve {text}"):
        ForwardHarness(tmp_path, attention_backend="cpu_native")


def _plain(known: object) -> dict[str, object]:
    lacking = {need.capability: False for need in NEEDS}
    return {name: getattr(known, name) for name in known.__slots__} | lacking


def test_a_window_over_a_branch_is_a_window_by_position() -> None:
    """A branch's table lists its elements by position: prefix, then its own drafts,
    wherever their slots are; so decode's window by element is right."""
    sizes = itertools.product((1, 4, 16), (2, 4), (1, 3), (False, True))
    for page_size, topk, steps, has_region in sizes:
        region = 3 * page_size + 5 if has_region else None
        layout = BranchLayout(
            page_size=page_size, topk=topk, num_steps=steps, region=region
        )
        lens = [page_size + 3, 2 * page_size]
        width = -(-max(map(layout.end_column, lens)) // page_size) * page_size
        table = torch.arange(2 * width, dtype=torch.int32).view(2, width)
        rows = SlotRows(table, torch.arange(2), torch.tensor(lens))
        pages = torch.zeros(2 * topk, width, dtype=torch.int32)
        branch_table_ref(rows, layout=layout, paged=False, out=pages)
        for branch, step in itertools.product(range(2 * topk), range(steps)):
            prefix, end = lens[branch // topk], lens[branch // topk] + step + 1
            # The value of an element is its position, the same in all channels.
            v_cache = torch.full((2 * width, 1, 8), torch.nan)
            for element in range(end):
                column = element
                if element >= prefix:
                    column = layout.draft_column(
                        prefix, branch % topk, element - prefix
                    )
                v_cache[table[branch // topk, column]] = float(element)
            for window in (1, 2, prefix, end + 5):
                out = torch.zeros(1, 1, 8)
                decode_attention_ref(
                    torch.zeros(1, 1, 8),
                    torch.zeros(2 * width, 1, 8),
                    v_cache,
                    page_table=pages,
                    row_index=torch.tensor([branch]),
                    read_lens=torch.tensor([end]),
                    page_size=1,
                    sm_scale=1.0,
                    window=window,
                    out=out,
                )
                position = end - 1
                read = range(max(0, position - window + 1), position + 1)
                assert float(out[0, 0, 0]) == pytest.approx(sum(read) / len(read))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

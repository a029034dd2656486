"""The lines of a start name everything that a user may have got wrong."""

from __future__ import annotations

import msgspec
import pytest

from sglang.srt.entrypoints.start_message import serving, starting
from sglang.srt.managers.messages.io_struct import SchedulerReady
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.version import __version__

register_cpu_ci(est_time=1, suite="cpu")

READY = SchedulerReady(
    max_total_num_tokens=4096,
    max_running_requests=64,
    kv_pool_bytes=3 << 29,
    context_len=2048,
    max_req_input_len=2047,
    vocab_size=9,
)
TREE = "EAGLE3 drafts of 5 steps, top-k 4, 8 tokens verified at once"
CASES = [
    (
        {},
        "cpu (float32, cpu_native)",
        "no speculative decoding",
        "KV canary off",
        " (1.50 GiB)",
    ),
    (
        {"speculative_algorithm": "EAGLE3", "kv_canary": "raise"},
        "cpu (float32, cpu_native)",
        TREE,
        "KV canary raise (real data partial)",
        " (1.50 GiB)",
    ),
    (
        {"tp_size": 2, "dtype": "bfloat16", "page_size": 16},
        "cpu (2 ranks, bfloat16, cpu_native)",
        "no speculative decoding",
        "KV canary off",
        " in pages of 16 (1.50 GiB on each rank)",
    ),
]


@pytest.mark.parametrize(("flags", "device", "drafts", "canary", "pages"), CASES)
def test_the_lines(flags, device, drafts, canary, pages):
    args = ServerArgs(device="cpu", **flags)
    assert starting(args).splitlines() == [
        f"sglang-canary {__version__} loads {args.model_path} on {device}",
        f"{drafts}; {canary}",
    ]
    assert serving(
        args, READY, url="http://[::1]:7", sampling_defaults={}
    ).splitlines() == [
        f"sglang-canary serves demo on {device}: 4096 KV slots{pages}, context 2048, "
        "at most 64 requests at once",
        f"{drafts}; {canary}",
        "chat: http://[::1]:7, API: http://[::1]:7/docs, inspector: http://[::1]:7/canary",
        "ready on http://[::1]:7",
    ]


def test_where_to_go_for_what_is_on():
    args = ServerArgs(device="cpu", enable_metrics=True, disable_canary_page=True)
    lines = serving(
        args, READY, url="http://h:7", sampling_defaults={"top_p": 0.9, "top_k": 5}
    ).splitlines()
    assert (
        "chat: http://h:7, API: http://h:7/docs, metrics: http://h:7/metrics" in lines
    )
    assert any("recommends: top_p 0.9, top_k 5 (--sampl" in line for line in lines)


def test_where_the_memory_of_a_gpu_went():
    gib = 1 << 30
    use = {"weights": 15 * gib, "KV": 50 * gib, "the rest": gib // 2, "free": 9 * gib}
    ready = msgspec.structs.replace(READY, device_bytes=use)
    text = serving(
        ServerArgs(device="cpu"), ready, url="http://h:7", sampling_defaults={}
    )
    assert (
        "GPU memory of 74.50 GiB: weights 15.00, KV 50.00, the rest 0.50, free 9.00\n"
        in text
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

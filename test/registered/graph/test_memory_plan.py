"""Memory at start: graph sizes, memory set aside for them, and running out of it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.arg_groups import memory_hook
from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.configs.latent_form import PREFIX_BLOCK
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.memory_plan import (
    CPU_POOL_BYTES,
    DRAFT_GRAPH_BYTES,
    GRAPH_BYTES,
    KERNEL_BYTES,
    MAX_WHOLE_TOKENS,
    NO_DRAFT_MEMORY,
    SEGMENT_BYTES,
    DraftMemory,
    cpu_pool_slots,
    decode_graph_sizes,
    default_batch_sizes,
    default_rows,
    device_bytes,
    draft_graph_bytes,
    explain_out_of_memory,
    graph_bytes,
    prefill_graph_bytes,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=4, suite="cpu")
register_cuda_ci(est_time=10, suite="cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def test_default_sizes_end_at_the_maximum():
    assert default_batch_sizes(1) == [1]
    assert default_batch_sizes(10) == [1, 2, 4, 8, 10]
    assert default_batch_sizes(300)[-3:] == [256, 288, 300]


@pytest.mark.parametrize(
    ("max_rows", "max_bs", "wanted", "sizes"),
    [
        (10, None, None, [1, 2, 4, 8, 10]),
        (10, 3, None, [1, 2, 3]),
        (6, None, [9, 5, 2], [2, 5]),
        (6, None, [9], [6]),
        (6, 4, [6, 5], [4]),
    ],
)
def test_graph_sizes_never_exceed_a_batch(max_rows, max_bs, wanted, sizes):
    assert sizes == decode_graph_sizes(
        max_running_requests=max_rows, max_bs=max_bs, wanted=wanted
    )


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "context", "slots", "rows"),
    [
        (63 * GIB, 131072 + 4, 440_000, 1024),  # an 8B model on 80 GiB
        (122 * GIB, 131072 + 4, 900_000, 2048),  # and on 141
        (8 * GIB, 131072, 40_000, 256),  # and on 24: no fewer
        (64 * GIB, 1 << 20, 440_000, 256),  # tables of long contexts
        (64 * GIB, 8192, 300_000, 1024),  # what the slots feed
        (64 * GIB, 2048, 50_000_000, 2048),  # no more
    ],
)
def test_rows_of_a_gpu_follow_from_its_memory(free, context, slots, rows):
    per_row = ReqToTokenPool.bytes_per_row(row_width=context)
    assert per_row == 8 * context
    assert rows == default_rows(free_bytes=free, bytes_per_row=per_row, num_slots=slots)
    assert rows == 256 or rows * per_row <= free * 0.02


def test_all_see_the_rows_that_memory_allows(tmp_path, monkeypatch, caplog):
    """As on a GPU, where no flag says how many."""
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(memory_hook, "_CPU_RUNNING_REQUESTS", None)
    free = [1 << 34]
    monkeypatch.setattr(ModelRunner, "_available_bytes", lambda runner: free[0])

    def engine(**flags):
        return EngineHarness(
            folder, device="cpu", **{"max_total_tokens": 300_000} | flags
        )

    with caplog.at_level("INFO"):
        scheduler = engine().scheduler
    runner = scheduler.worker.model_runner
    assert scheduler.server_args.max_running_requests is None
    assert runner.max_running_requests == 1024
    assert runner.req_to_token_pool.size == runner.req_to_token_pool.available_size()
    assert runner.req_to_token_pool.size == 1024
    assert scheduler.ready_message().max_running_requests == 1024
    assert "At most 1024 requests run at once (--max-running-requests)" in caplog.text
    # Slots follow from memory too.
    free[0] = 600 * 256 * runner.bytes_per_kv_slot()
    runner = engine(max_total_tokens=None, mem_fraction_static=0.99).scheduler.worker
    assert runner.model_runner.max_running_requests == 512
    # Another rank has less.
    free[0] = 1 << 34
    monkeypatch.setattr(
        "sglang.srt.distributed.parallel_state.TensorParallelGroup.min_int",
        lambda group, value: min(value, 300),
    )
    assert engine().scheduler.worker.model_runner.max_running_requests == 300


def test_many_short_requests_run_at_once(tmp_path, monkeypatch):
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr(memory_hook, "_CPU_RUNNING_REQUESTS", None)
    engine = EngineHarness(
        folder, device="cpu", max_total_tokens=300_000, chunked_prefill_size=4096
    )
    count = 300
    for i in range(count):
        prompt = [1 + i % 50, 1 + i // 50, 3]
        engine.submit(prompt, max_new_tokens=3, ignore_eos=True)
    engine.scheduler.step()
    engine.scheduler.step()
    assert engine.scheduler.stats_snapshot().num_running_reqs == count
    assert len(engine.run()) == count


def test_graphs_take_logits_per_graph_and_activations_once(model):
    config = ModelConfig.from_path(model)
    one = graph_bytes(config, [4], dtype=torch.bfloat16)
    two = graph_bytes(config, [2, 4], dtype=torch.bfloat16)
    assert two - one == GRAPH_BYTES + 2 * config.vocab_size * 2
    assert one > GRAPH_BYTES + KERNEL_BYTES
    assert graph_bytes(config, [], dtype=torch.bfloat16) == 0


def test_prefill_graphs_share_what_lives_during_a_forward(model):
    config = ModelConfig.from_path(model)
    one = prefill_graph_bytes(config, [512], dtype=torch.bfloat16)
    two = prefill_graph_bytes(config, [4, 512], dtype=torch.bfloat16)
    assert two - one == (config.num_layers + 1) * SEGMENT_BYTES
    wide = prefill_graph_bytes(config, [1024], dtype=torch.bfloat16)
    fixed = (config.num_layers + 1) * SEGMENT_BYTES
    assert wide - fixed == 2 * (one - fixed) > 0
    assert prefill_graph_bytes(config, [], dtype=torch.bfloat16) == 0


def test_short_prefills_of_one_request_have_graphs_of_their_own(model):
    config = ModelConfig.from_path(model)
    counts = [4, MAX_WHOLE_TOKENS, 512]
    alone, both = (
        prefill_graph_bytes(
            config, counts, dtype=torch.bfloat16, captures_attention=captures
        )
        for captures in (False, True)
    )
    assert both - alone == 2 * (config.num_layers + 1) * SEGMENT_BYTES


def test_draft_graphs_share_what_lives_during_a_step(model):
    config = ModelConfig.from_path(model)

    def taken(sizes, rows):
        return draft_graph_bytes(
            config, sizes, dtype=torch.bfloat16, rows_per_request=rows
        )

    assert taken([2, 4], 8) - taken([4], 8) == 2 * DRAFT_GRAPH_BYTES
    fixed = 2 * DRAFT_GRAPH_BYTES
    assert taken([4], 8) - fixed == 2 * (taken([4], 4) - fixed) > 0
    assert taken([], 8) == 0


def test_a_draft_takes_slots_from_the_target(model, monkeypatch):
    """Memory of a draft, per slot and beside the slots, is gone from the pool."""
    runner = ForwardHarness(model, slots=64).runner
    args = dataclasses.replace(
        runner.server_args, max_total_tokens=None, mem_fraction_static=0.5
    )
    monkeypatch.setattr(runner, "server_args", args)
    monkeypatch.setattr(runner, "device", "cuda")
    each = runner.bytes_per_kv_slot()
    beside = runner.decode_graph_bytes() + runner.prefill_graph_bytes()
    beside += runner.gathered_bytes()
    available = beside + 10_000 * each
    monkeypatch.setattr(runner, "_available_bytes", lambda: available)
    monkeypatch.setattr(runner, "free_bytes_at_start", 0)
    alone = runner._pool_size(NO_DRAFT_MEMORY)
    assert alone == 10_000 - runner.page_size
    assert runner._pool_size(DraftMemory(graph_bytes=1000 * each)) == alone - 1000
    assert runner._pool_size(DraftMemory(bytes_per_slot=each)) == (alone + 1) // 2 - 1
    assert runner._pool_size(DraftMemory(region_bytes=1000 * each)) == alone - 1000


def test_expanded_latents_are_kept_free(tmp_path, monkeypatch):
    """Where the backend expands any: a block of keys and values, and float32 results of
    the new tokens."""
    model = write_tiny_model(tmp_path, "DeepseekV2ForCausalLM")
    harness = ForwardHarness(model, slots=64, device="cpu", chunked_prefill_size=64)
    runner = harness.runner
    assert runner.expansion_bytes() == 0
    name = runner.server_args.attention_backend
    able = dataclasses.replace(ATTENTION_BACKENDS[name], expands_latents=True)
    monkeypatch.setitem(ATTENTION_BACKENDS, name, able)
    itemsize, latent = runner.dtype.itemsize, runner.model_config.latent
    block = PREFIX_BLOCK * (latent.width + 4 * (24 + 20)) * itemsize
    assert runner.expansion_bytes() == block + 64 * 4 * (20 + 1) * 4


@pytest.mark.parametrize(("topk", "steps", "widest"), [(8, 2, 8), (2, 4, 5)])
def test_draft_graphs_are_planned_for_their_widest_forward(
    topk, steps, widest, monkeypatch
):
    """A step of all branches, or an extend by all tokens that can be gained."""
    harness = EngineHarness(
        bundled_demo_model_path(),
        device="cpu",
        speculative_algorithm="EAGLE",
        speculative_eagle_topk=topk,
        speculative_num_steps=steps,
        speculative_num_draft_tokens=topk * steps,
        max_total_tokens=512,
    )
    worker = harness.scheduler.worker.draft_worker
    runner = worker.draft_runner
    monkeypatch.setattr(runner, "graph_sizes", lambda: [1, 4])
    due = draft_graph_bytes(
        runner.model_config, [1, 4], dtype=runner.dtype, rows_per_request=widest
    )
    assert worker.memory().graph_bytes == due + runner.prefill_graph_bytes()


def test_gathered_prefixes_are_kept_free(model, monkeypatch):
    """K and V of a context of one layer, where the backend gathers any."""
    runner = ForwardHarness(model, slots=64, device="cpu").runner
    assert runner.gathered_bytes() == 0
    name = runner.server_args.attention_backend
    able = dataclasses.replace(ATTENTION_BACKENDS[name], gathers_prefixes=True)
    monkeypatch.setitem(ATTENTION_BACKENDS, name, able)
    config = runner.model_config
    per_token = config.num_kv_heads * config.head_dim * runner.dtype.itemsize
    assert runner.gathered_bytes() == 2 * config.context_len * per_token


def test_a_capture_says_what_it_took(model, caplog):
    runner = ForwardHarness(model, slots=64).runner
    with caplog.at_level("INFO"), runner.capturing("draft graphs", set_aside=3 << 29):
        pass
    assert "The draft graphs took " in caplog.text
    assert "1.50 GiB were set aside" in caplog.text
    with (
        pytest.raises(ValueError, match="while capturing draft graphs: lower --mem"),
        runner.capturing("draft graphs", set_aside=0),
    ):
        raise torch.OutOfMemoryError("no room")


def test_running_out_of_memory_names_the_flags(model, monkeypatch):
    args = ServerArgs(model_path=str(model), device="cpu", mem_fraction_static=0.7)
    with (
        pytest.raises(ValueError, match="pool: lower --max-total-tokens") as refused,
        explain_out_of_memory("building the KV pool", args),
    ):
        torch.empty(1 << 56)
    assert "cuda" not in str(refused.value).lower()
    with (
        pytest.raises(RuntimeError, match="another"),
        explain_out_of_memory("building the KV pool", args),
    ):
        raise RuntimeError("another failure")
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 1)
    args = ServerArgs(model_path=str(model), device="cuda", mem_fraction_static=0.7)
    with (
        pytest.raises(ValueError, match=r"--mem-fraction-static \(now 0.7\)"),
        explain_out_of_memory("building the KV pool", args),
    ):
        raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    ("context", "running", "bytes_per_slot", "slots"),
    [
        (2048, 64, 1024, 32 * 2048),  # contexts
        (2048, 4, 1024, 4 * 2048),  # what the requests can fill
        (32768, 64, 24576, CPU_POOL_BYTES // 24576),  # bytes
        (131072, 64, 262144, 131072),  # a whole context
    ],
)
def test_a_pool_on_the_cpu_is_no_larger_than_useful(
    context, running, bytes_per_slot, slots
):
    assert slots == cpu_pool_slots(
        context_len=context,
        max_running_requests=running,
        bytes_per_slot=bytes_per_slot,
    )


def test_the_default_pool_is_said_with_its_flag(model, caplog):
    with caplog.at_level("INFO"):
        harness = EngineHarness(
            model, device="cpu", max_running_requests=2, max_total_tokens=None
        )
    scheduler = harness.scheduler
    size = scheduler.worker.model_runner.max_total_num_tokens
    assert size == 2 * scheduler.model_config.context_len
    assert f"KV pool has {size} tokens by default; --max-total-tokens" in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"page_size": 1_000_000}, "--page-size 1000000 is more than the 8192 tokens"),
        ({"mem_fraction_static": 1e-9}, "the weights; raise it, or lower --page-size"),
    ],
)
def test_no_room_on_the_cpu_is_not_blamed_on_graphs(model, flags, words, monkeypatch):
    # Other processes free memory between two looks at it.
    monkeypatch.setattr(ModelRunner, "_available_bytes", lambda runner: 1 << 34)
    with pytest.raises(ValueError, match=words) as refused:
        EngineHarness(
            model,
            device="cpu",
            attention_backend="torch_native",
            max_total_tokens=None,
            chunked_prefill_size=None,
            **flags,
        )
    assert "cuda" not in str(refused.value).lower()


def test_tables_that_no_memory_holds(tmp_path):
    folder = write_tiny_model(
        tmp_path, "LlamaForCausalLM", max_position_embeddings=1 << 16
    )
    with pytest.raises(ValueError, match="lower --context-length or --max-running-r"):
        EngineHarness(folder, device="cpu", max_running_requests=1 << 22)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pool_that_does_not_fit_is_refused_at_start(model):
    torch.cuda.set_per_process_memory_fraction(0.002)
    try:
        with pytest.raises(ValueError, match="building the KV pool.*--mem-fraction"):
            EngineHarness(model, device="cuda", max_total_tokens=4 << 20)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_every_byte_of_a_gpu_is_told(monkeypatch):
    pool = SimpleNamespace(nbytes=50)
    runners = [
        SimpleNamespace(
            weight_bytes=weights,
            captured_bytes=captured,
            state_bytes=states,
            token_to_kv_pool=pool,
        )
        for weights, captured, states in ((15, 2, 7), (1, 0, 0))
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20, 150))
    use = device_bytes(runners, "cuda")
    held = {"weights": 16, "KV": 100, "states": 7, "graphs": 2}
    assert use == held | {"the rest": 5, "free": 20}
    use = device_bytes(runners, "cuda", watched=4)
    assert use == held | {"canary": 4, "the rest": 1, "free": 20}
    assert list(use) == ["weights", "KV", "states", "canary", *list(use)[4:]]
    assert device_bytes(runners, "cpu") == {}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

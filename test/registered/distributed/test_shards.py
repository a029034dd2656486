"""The part of a model that each rank holds, and the pieces that keep ranks alike."""

from __future__ import annotations

import sys
import textwrap
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
    get_tp_group,
    tensor_parallel_group,
)
from sglang.srt.distributed.partition import (
    Part,
    divide,
    divide_kv_heads,
    divide_padded,
)
from sglang.srt.managers.front.scheduler_process import GLOO_INTERFACE, SchedulerProcess
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    GenerateReq,
    GrammarDecision,
    SchedulerRequest,
)
from sglang.srt.managers.scheduler.scheduler_io import ListIO, NullIO
from sglang.srt.managers.scheduler.step_inputs import StepInputs
from sglang.srt.model_loader.loader import load_model
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=8, suite="cpu")


def rank_of(rank: int, size: int) -> TensorParallelGroup:
    return TensorParallelGroup(rank=rank, size=size)


# -- arithmetic --------------------------------------------------------------------


def test_parts() -> None:
    assert divide(12, rank_of(2, 4), what="x") == Part(full=12, start=6, size=3)
    with pytest.raises(ValueError, match=r"--tp-size 5 .* x 12 .* divides 12"):
        divide(12, rank_of(0, 5), what="x")
    assert divide(4, rank_of(1, 2), what="x").scaled(8) == Part(
        full=32, start=16, size=16
    )


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (8, 2, [(0, 4), (4, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_kv_heads_are_split_or_replicated(
    heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    parts = [divide_kv_heads(heads, rank_of(rank, size)) for rank in range(size)]
    assert [(part.start, part.size) for part in parts] == expected


def test_kv_heads_that_fit_neither_way() -> None:
    for heads, size in ((3, 2), (8, 12)):
        with pytest.raises(ValueError, match=f"--tp-size {size} .* {heads} "):
            divide_kv_heads(heads, rank_of(0, size))


@pytest.mark.parametrize(("full", "size"), [(265, 2), (264, 2), (3, 4), (9, 4)])
def test_a_vocabulary_is_covered_once(full: int, size: int) -> None:
    parts = [divide_padded(full, rank_of(rank, size)) for rank in range(size)]
    ids = [i for part in parts for i in range(part.start, part.start + part.size)]
    assert ids == list(range(full))


# -- weights -----------------------------------------------------------------------


def expected_part(
    name: str, full: torch.Tensor, config: ModelConfig, *, rank: int, size: int
) -> torch.Tensor:
    """The part of the one-rank parameter `full` for `rank`, cut by hand."""
    dim = config.head_dim
    q_heads = config.num_heads // size
    kv_heads = max(config.num_kv_heads // size, 1)
    first_kv = rank * config.num_kv_heads // size
    inner = config.intermediate_size
    if config.moe is not None and ".experts." in name:
        inner = config.moe.intermediate_size
    if config.moe is not None and ".shared_expert." in name:
        inner = config.moe.shared_intermediate_size
    inner_part = slice(rank * (inner // size), (rank + 1) * (inner // size))
    if "qkv_proj" in name:
        q, k, v = full.split(
            [config.num_heads * dim, *[config.num_kv_heads * dim] * 2], dim=0
        )
        q = q[rank * q_heads * dim : (rank + 1) * q_heads * dim]
        kept = slice(first_kv * dim, (first_kv + kv_heads) * dim)
        return torch.cat([q, k[kept], v[kept]])
    if "gate_up_proj" in name:
        dim = 1 if ".experts." in name else 0
        halves = [
            half.narrow(dim, inner_part.start, inner // size)
            for half in full.split(inner, dim=dim)
        ]
        return torch.cat(halves, dim=dim)
    if "down_proj" in name and not name.endswith("bias"):
        return full[..., inner_part]
    if name.endswith("o_proj.weight"):
        return full[:, rank * q_heads * dim : (rank + 1) * q_heads * dim]
    if "embed_tokens" in name or "lm_head" in name:
        room = -(-config.vocab_size // size)
        rows = torch.zeros(room, full.shape[1], dtype=full.dtype)
        mine = full[rank * room : (rank + 1) * room]
        rows[: len(mine)] = mine
        return rows
    return full


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("architecture", "load_format", "overrides"),
    [
        ("LlamaForCausalLM", "auto", {}),
        ("Qwen2ForCausalLM", "auto", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", "auto", {"vocab_size": 265}),
        ("Qwen2ForCausalLM", "dummy", {"vocab_size": 265}),
        ("LlamaForCausalLM", "dummy", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2MoeForCausalLM", "auto", {}),
        ("Qwen3MoeForCausalLM", "dummy", {}),
    ],
)
def test_each_rank_holds_its_part(
    tmp_path: Path,
    architecture: str,
    load_format: str,
    overrides: dict[str, Any],
    size: int,
) -> None:
    """Also that dummy weights are the same model with any number of ranks."""
    folder = write_tiny_model(tmp_path, architecture, **overrides)
    config = ModelConfig.from_path(folder)

    def parameters(group: TensorParallelGroup) -> dict[str, torch.Tensor]:
        # bfloat16 is not packed.
        with tensor_parallel_group(group):
            model = load_model(
                config, load_format=load_format, dtype=torch.bfloat16, rope_rows=32
            )
        return {name: p.data for name, p in model.named_parameters()}

    whole = parameters(rank_of(0, 1))
    for rank in range(size):
        held = parameters(rank_of(rank, size))
        assert held.keys() == whole.keys()
        for name, tensor in held.items():
            expected = expected_part(name, whole[name], config, rank=rank, size=size)
            assert torch.equal(tensor, expected), (name, rank)
    assert get_tp_group().size == 1


def test_a_wrong_shape_names_the_checkpoints_shape(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    config = ModelConfig.from_path(folder)
    with tensor_parallel_group(rank_of(1, 2)):
        model = load_model(
            config, load_format="auto", dtype=torch.bfloat16, rope_rows=32
        )
    weight = dict(model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"down .* \(64, 48\), .* \(64, 96\)"):
        weight.load("down", torch.zeros(64, 48), None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("size", "overrides", "words"),
    [
        (3, {}, ["--tp-size 3", "num_attention_heads 4"]),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            ["--tp-size 2", "num_key_value_heads 3"],
        ),
        (2, {"intermediate_size": 97}, ["--tp-size 2", "intermediate_size 97"]),
    ],
)
def test_sizes_that_do_not_divide(
    tmp_path: Path, size: int, overrides: dict[str, int], words: list[str]
) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM", **overrides)
    config = ModelConfig.from_path(folder)
    with tensor_parallel_group(rank_of(0, size)), pytest.raises(ValueError) as error:
        load_model(config, load_format="dummy", dtype=torch.float32, rope_rows=32)
    assert all(word in str(error.value) for word in words), error.value


def test_one_process_cannot_be_two_ranks(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ValueError, match="--tp-size 2 .* 1 run"):
        ForwardHarness(folder, tp_size=2)


# -- flags -------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--tp-size", "--tp", "--tensor-parallel-size"])
def test_names_of_the_flag(flag: str) -> None:
    assert ServerArgs.from_cli([flag, "2", "--device", "cpu"]).tp_size == 2


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 2)
    assert ServerArgs(tp_size=2, device="cuda").tp_size == 2
    with pytest.raises(ValueError, match="--tp-size 4 .* 2; use at most 2"):
        ServerArgs(tp_size=4, device="cuda")


# -- what a step begins with -------------------------------------------------------


class Wire(TensorParallelGroup):
    """A group whose broadcasts go through a list."""

    __slots__ = ()
    sent: deque[bytes] = deque()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        if data is not None:
            self.sent.append(data)
            return data
        return self.sent.popleft()


def test_followers_get_what_rank_0_got() -> None:
    io = ListIO()
    messages: list[SchedulerRequest] = [
        GenerateReq(rid="a", input_ids=[1], sampling_params=SamplingParams()),
        AbortReq(rid="b"),
    ]
    io.requests.extend(messages)
    leader = StepInputs(io, Wire(rank=0, size=2))
    follower = StepInputs(NullIO(), Wire(rank=1, size=2))
    decided = [GrammarDecision(rid="c"), GrammarDecision(rid="d", error="no")]
    assert leader.next(wait_ms=0, grammars=decided) == follower.next(
        wait_ms=0, grammars=[]
    )
    for inputs in (leader, follower):
        inputs.remember(3, 44)
    leader.next(wait_ms=0, grammars=[])
    empty = follower.next(wait_ms=0, grammars=[])
    assert not empty.requests and not empty.grammars
    follower.remember(5)
    leader.remember(6)
    leader.next(wait_ms=0, grammars=[])
    with pytest.raises(RuntimeError, match="rank 1 has diverged"):
        follower.next(wait_ms=0, grammars=[])


# -- collectives -------------------------------------------------------------------

RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from sglang.srt.distributed.parallel_state import init_tensor_parallel
rank, size, store = json.loads(sys.stdin.readline())["rank"], 3, Path(FOLDER, "store")
log = open(Path(FOLDER, f"rank{rank}"), "w")
group = init_tensor_parallel(rank=rank, size=size, device="cpu", store=store)
assert (group.rank, group.size, group.is_leader) == (rank, size, rank == 0)
for length in (0, 1, 8183, 8184, 8185, 30000):
    data = bytes(i * 7 % 251 for i in range(length))
    assert group.broadcast_bytes(data if rank == 0 else None) == data, length
for lengths in ((0, 0, 0), (0, 3, 1), (70000, 0, 5)):
    every = [bytes([i + 1]) * length for i, length in enumerate(lengths)]
    assert group.all_gather_bytes(every[rank]) == every, lengths
assert group.min_int(10 - rank) == 8
x = torch.full((2, 2), float(rank))
assert torch.equal(group.all_reduce(x.clone()), torch.full((2, 2), 3.0))
gathered = group.all_gather_last_dim(x + torch.tensor([[0.0, 10.0], [20.0, 30.0]]))
assert gathered.tolist() == [[0, 10, 1, 11, 2, 12], [20, 30, 21, 31, 22, 32]]
assert group.broadcast(torch.tensor([rank + 5])).item() == 5
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
         if os.path.islink(f"/proc/self/fd/{fd}")]
sockets = [line.split() for table in ("tcp", "tcp6")
           for line in Path("/proc/net", table).read_text().splitlines()[1:]]
listening = [s[1] for s in sockets if s[3] == "0A" and f"socket:[{s[9]}]" in links]
assert listening and all(a.startswith("0100007F:") for a in listening), listening
group.meet(timedelta(seconds=30))
if rank == 0:
    try:
        group.meet(timedelta(seconds=0.2))
    except RuntimeError:
        print("alone", file=log)
else:
    time.sleep(1.0)
print("done", file=log)
log.close()
"""


def test_collectives_of_three_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of every length; nothing listens but on the loopback interface; a wait
    for ranks that do not come ends."""
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    script = f"FOLDER = {str(tmp_path)!r}\n" + textwrap.dedent(RANK)
    process = SchedulerProcess.start(
        ServerArgs(tp_size=3, device="cpu"),
        num_threads=3,
        command=(sys.executable, "-W", "error", "-c", script),
    )
    assert process.stop(60)
    said = [path.read_text() for path in sorted(tmp_path.glob("rank*"))]
    assert said == ["alone\ndone\n", "done\n", "done\n"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

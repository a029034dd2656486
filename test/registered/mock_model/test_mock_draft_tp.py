"""The mock drafts under tensor parallelism: two processes, each with its heads and its
part of the tables, propose what one does."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from draft_world import HEADS, VOCAB, Pair, check_rows

from sglang.srt.distributed.parallel_state import init_tensor_parallel
from sglang.test import forked_process
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=12, suite="cpu")

SIZE = 2


def run_rank(rank: int, folder: Path) -> None:
    group = init_tensor_parallel(
        rank=rank, size=SIZE, device="cpu", store=folder / "store"
    )
    target = write_mock_model(folder / f"target-{rank}", vocab_size=VOCAB)
    for i, head in enumerate(HEADS):
        own = folder / f"draft-{rank}-{i}"
        pair = Pair(own, target, head, tp_size=SIZE, attention_backend="torch_native")
        check_rows(pair, random.Random(i), (3, 40), num_steps=2)
    # Ends together, so that neither leaves the other in a collective, and without the
    # group's threads, which would abort the process.
    group.min_int(rank)
    dist.destroy_process_group()


def test_two_ranks_propose_what_the_tokens_imply(tmp_path):
    ranks = [
        forked_process.start_process(
            [sys.executable, __file__, str(rank), str(tmp_path)], env=os.environ
        )
        for rank in range(SIZE)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        run_rank(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        raise SystemExit(pytest.main([__file__]))

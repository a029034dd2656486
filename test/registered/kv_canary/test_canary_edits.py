"""Edits computed again from what requests announced: bit for bit the sampler's."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from canary_world import DEVICE
from torch import Tensor

from kv_canary.drawn import SAMPLING_WORDS
from kv_canary.records import UNKNOWN
from sglang.srt.kv_canary.draws import announced_words
from sglang.srt.kv_canary.edits import EditBounds, EditTable, Positions
from sglang.srt.sampling.penalties import TokenHistory
from sglang.srt.sampling.sampler import process_logits
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, SamplingRow
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.vocab_mask import mask_words
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count

register_cpu_ci(est_time=8, suite="cpu", full_time=40)
register_cuda_ci(est_time=10, suite="cuda")

TABLE_ROWS = 12
MAX_LEN = 60
STOPS = (3, 5)
ASKED = [
    {},
    {"logit_bias": {0: 1.5, 7: -100.0, 2: 0.25}},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.1},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.4},
    {"min_new_tokens": 12},
    {"min_new_tokens": 2},
    {
        "logit_bias": {3: 2.0},
        "repetition_penalty": 1.7,
        "frequency_penalty": -0.2,
        "presence_penalty": 1.1,
        "min_new_tokens": 9,
    },
]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Requests in rows of a table, and a batch of some of them, W tokens each."""

    owners: list[SimpleNamespace]
    sampling: Tensor
    token_table: Tensor
    edits: EditTable
    due: Positions
    batch: list[SimpleNamespace]

    @property
    def width(self) -> int:
        return self.due.width

    def info(self) -> SamplingBatchInfo:
        rows = [owner.sampling_row for owner in self.batch]
        vocab = self.due.logits.shape[1]
        return SamplingBatchInfo.from_rows(rows, vocab_size=vocab, device=DEVICE)

    def bounds(self) -> EditBounds | None:
        starts = self.due.starts.cpu().numpy().astype(np.int64)
        return EditBounds.of(self.info(), starts)

    def by_the_sampler(self) -> Tensor:
        """Edited logits of all tokens, each as of a step of its own."""
        info = self.info()
        rows = []
        for j in range(self.width):
            table = self.token_table.clone()
            for r, req in enumerate(self.due.req_rows.tolist()):
                start = int(self.due.starts[r])
                table[req, start : start + j] = self.due.gained[r, :j].int()
            lens = self.due.starts + j
            at = torch.arange(len(self.batch), device=DEVICE) * self.width + j
            if self.due.at is not None:
                at = self.due.at[:, j]
            masked = info
            if self.due.masks is not None:
                words = mask_words(info.vocab_size)
                masked = info.with_vocab_mask(self.due.masks[at, :words].contiguous())
            rows.append(
                process_logits(
                    self.due.logits[at].float(),
                    masked,
                    positions=lens,
                    history=TokenHistory(
                        token_table=table,
                        req_pool_indices=self.due.req_rows,
                        lens=lens,
                    ),
                )
            )
        return torch.stack(rows, dim=1).view(-1, info.vocab_size)


def make_world(seed: int, *, width: int, has_masks: bool) -> World:
    rng = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=rng)

    vocab = [8, 33, 100][seed % 3]
    dtype = [torch.float32, torch.bfloat16][seed % 2]
    owners = []
    for i, row in enumerate(torch.randperm(TABLE_ROWS - 1, generator=rng)[:9].tolist()):
        asked = ASKED[(i + seed) % len(ASKED)]
        params = SamplingParams(temperature=0.0, **asked)
        prompt_len = int(ints(1, 9))
        sampling_row = SamplingRow(
            params=params, seed=i, prompt_len=prompt_len, stop_ids=STOPS
        )
        owners.append(
            SimpleNamespace(
                serial=100 + i, req_pool_idx=row + 1, sampling_row=sampling_row
            )
        )
    sampling = torch.full((TABLE_ROWS, SAMPLING_WORDS), UNKNOWN)
    rows = torch.tensor([owner.req_pool_idx for owner in owners])
    sampling[rows] = torch.from_numpy(announced_words(owners)).t()
    sampling = sampling.to(DEVICE)
    token_table = ints(0, vocab, TABLE_ROWS, MAX_LEN).int().to(DEVICE)
    edits = EditTable(sampling, token_table)
    # Rows that others had before.
    edits.announce(
        [owner.req_pool_idx for owner in owners],
        [owners[i - 1].sampling_row for i in range(len(owners))],
    )
    edits.announce(
        [owner.req_pool_idx for owner in owners],
        [owner.sampling_row for owner in owners],
    )
    batch = [owners[i] for i in torch.randperm(9, generator=rng)[:6].tolist()]
    starts = torch.tensor([o.sampling_row.prompt_len for o in batch]) + ints(0, 30, 6)
    nodes = 6 * width + 5
    words = mask_words(vocab)
    masks = ints(-(1 << 31), 1 << 31, nodes, words + 2).int()
    masks[:, 0] |= 2
    # Some allow stops only.
    masks[::3, :words] = 0
    masks[::3, 0] = 1 << STOPS[0]
    # A mask is only read where a grammar is announced.
    if has_masks:
        sampling[[o.req_pool_idx for o in batch], 6] |= 4
    at = torch.randperm(nodes, generator=rng)[: 6 * width].view(6, width)
    due = Positions(
        req_rows=torch.tensor([o.req_pool_idx for o in batch], device=DEVICE),
        serials=torch.tensor([o.serial for o in batch], device=DEVICE),
        starts=starts.to(DEVICE),
        gained=ints(0, vocab, 6, width).to(DEVICE),
        at=at.to(DEVICE) if width > 1 else None,
        logits=(torch.randn(nodes, vocab, generator=rng) * 3).to(dtype).to(DEVICE),
        masks=masks.to(DEVICE) if has_masks else None,
    )
    return World(
        owners=owners,
        sampling=sampling,
        token_table=token_table,
        edits=edits,
        due=due,
        batch=batch,
    )


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_edits_are_the_samplers(width: int, has_masks: bool) -> None:
    for seed in range(count(ci=12, full=200)):
        world = make_world(seed, width=width, has_masks=has_masks)
        bounds = world.bounds()
        assert bounds is not None
        found = world.edits.edit(world.due, bounds)
        due, rows = world.by_the_sampler(), found.rows.cpu()
        edits = [owner.sampling_row.edits_logits for owner in world.batch]
        is_edited = torch.tensor(edits).repeat_interleave(width)
        assert torch.equal(rows >= 0, is_edited)
        assert sorted(rows[is_edited].tolist()) == list(range(int(is_edited.sum())))
        values = found.values.cpu()[rows[is_edited]]
        due = due.cpu()[is_edited]
        if has_masks:
            # The mask is the check's own.
            allowed = due > -torch.inf
            assert torch.equal(values[allowed], due[allowed]), seed
            # A row without an allowed value would hide whether its ban was lifted.
            assert bool(allowed.any(dim=1).all())
        else:
            assert torch.equal(values, due), seed


def test_a_row_that_the_host_does_not_count_is_missing() -> None:
    world = make_world(4, width=2, has_masks=False)
    bounds = world.bounds()
    assert bounds is not None and bounds.num_rows > 1
    whole = world.edits.edit(world.due, bounds)
    part = world.edits.edit(world.due, bounds._replace(num_rows=bounds.num_rows - 1))
    last = whole.rows >= 2 * (bounds.num_rows - 1)
    assert torch.equal(part.rows, whole.rows.masked_fill(last, -1))
    assert torch.equal(part.values, whole.values[: len(part.values)])


def test_no_row_of_another_request_counts() -> None:
    """Its announcement is not the request's, so nothing is computed for it."""
    world = make_world(5, width=1, has_masks=False)
    bounds = world.bounds()
    assert bounds is not None
    world.due.serials[0] += 1000
    found = world.edits.edit(world.due, bounds)
    assert int(found.rows[0]) == -1


def test_nothing_is_announced_for_batches_without_edits() -> None:
    info = SamplingBatchInfo.from_rows(
        [SamplingRow(params=SamplingParams(temperature=0.5, top_p=0.9))],
        vocab_size=8,
        device=DEVICE,
    )
    assert EditBounds.of(info, np.array([7])) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

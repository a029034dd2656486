"""Fingerprints of whole slots on the CPU: every SIMD level, any number of words."""

from __future__ import annotations

import pytest
import torch

from kv_canary.layout import FingerprintMode, LayerGroup, PoolLayout, create_fingerprint
from kv_canary.op import native_available
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import WriterKind
from kv_canary.state import create_state
from kv_canary.view import ForwardView
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

pytestmark = pytest.mark.skipif(
    not native_available(), reason="the native CPU kernels are not installed"
)
# Bytes of a slot and layer in chunks of 16: around one and two registers of each level.
CHUNKS = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 64, 65]
SLOTS = 5


@pytest.mark.parametrize("chunks", CHUNKS)
def test_equals_the_reference(level: str, chunks: int) -> None:
    from kv_canary.kernels import native
    from kv_canary.kernels.reference import write

    torch.manual_seed(chunks)
    # V has other words than K, in rows with a gap between them.
    k = torch.randint(-128, 128, (3, SLOTS, 16 * chunks), dtype=torch.int8)
    v = torch.randint(-128, 128, (3, SLOTS, 48), dtype=torch.int8)[..., :32]
    layout = PoolLayout(groups=(LayerGroup(name="full", k=k, v=v),))
    checks = PoolChecks(fingerprint=create_fingerprint(FingerprintMode.ALL, layout))
    new = SLOTS - 1
    rows = ForwardView(
        req_rows=torch.tensor([1]),
        prefix_lens=torch.tensor([0]),
        extend_lens=torch.tensor([new]),
        qo_indptr=torch.tensor([0, new]),
        input_ids=torch.arange(10, 10 + new),
        positions=torch.arange(new),
        out_cache_loc=torch.arange(1, SLOTS),
        serials=torch.tensor([7]),
        salts=torch.tensor([8]),
        writer_kind=WriterKind.EXTEND,
    )
    written = []
    for module in (write, native):
        state = create_state(
            num_slots=SLOTS, req_rows=2, ring_capacity=8, num_managers=1, device="cpu"
        )
        stored = k.clone(), v.clone()
        module.write_head(state, rows, checks)
        # The model stores what the tensors held.
        k.copy_(stored[0])
        v.copy_(stored[1])
        module.write_tail(state, rows, checks, False, None)
        assert int(state.ring_count) == 0
        written.append(state.tail)
    assert torch.equal(*written)
    assert len(set(written[0][1:, 2].tolist())) == new

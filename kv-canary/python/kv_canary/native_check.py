"""Whether the native kernels that are installed are those of this `kv_canary`.

They are a package of their own, so that an older wheel may lie beside a newer checkout.
Its ops take other arguments or other words, and would fail at the first forward. So two
tiny forwards, one of which reads what was freed, are run before it, natively and by the
references.
"""

from __future__ import annotations

import functools
import importlib.metadata

import torch
from torch import Tensor

from kv_canary import launches
from kv_canary.op import force_reference, native_available, switch_off_native
from kv_canary.pool_checks import PoolChecks
from kv_canary.state import CanaryState, create_state
from kv_canary.version import __version__
from kv_canary.view import ForwardView, KVReadView

KERNELS = "sglang-canary-kernels"
_COMPARED = ("head", "tail", "ring", "ring_count", "counters", "expected_lineage")


def check_native_kernels() -> None:
    """Switch the native kernels off if they are not of this version; the warning of the
    next op names both."""
    problem = native_available() and _problem()
    if problem:
        switch_off_native(
            f"{KERNELS} {_installed()} does not fit kv-canary {__version__}: {problem}"
        )


@functools.cache
def _problem() -> str:
    """Return how the native kernels differ from the references, if they do."""
    with force_reference():
        due = _run()
    try:
        found = _run()
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    for name in _COMPARED:
        if not torch.equal(getattr(found, name), getattr(due, name)):
            return f"{name} differs from the reference"
    return ""


def _run() -> CanaryState:
    """Return the records of a prefill, and of a decode that reads a freed slot."""
    table = torch.tensor([[0, 0, 0], [1, 2, 3]], dtype=torch.int32)
    state = create_state(
        num_slots=4, req_rows=2, ring_capacity=8, num_managers=1, device="cpu"
    )
    checks = PoolChecks(req_to_token=table)
    row = torch.tensor([1])
    launches.expect_rows(state, row, torch.tensor([[5], [0], [7]]), None)
    for start, tokens in ((0, [11, 12]), (2, [13])):
        new = torch.arange(start, start + len(tokens))
        count = torch.tensor([len(tokens)])
        lens = count + start
        reads = KVReadView(read_lens=lens, page_table=table, row_index=row)
        view = ForwardView(
            req_rows=row,
            serials=torch.tensor([7]),
            salts=torch.tensor([5]),
            prefix_lens=torch.tensor([start]),
            extend_lens=count,
            qo_indptr=torch.tensor([0, len(tokens)]),
            input_ids=torch.tensor(tokens),
            positions=new,
            out_cache_loc=_slots(table, new),
            reads=[reads],
        )
        launches.before_model(state, view, checks)
        launches.write_tail(state, view, checks, advance=True)
        launches.poison(state, torch.tensor([1]))
    return state


def _slots(table: Tensor, positions: Tensor) -> Tensor:
    return table[1, positions].long()


def _installed() -> str:
    try:
        return importlib.metadata.version(KERNELS)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"

"""The comparison of states with their checksums in torch: the oracle of Triton's."""

from __future__ import annotations

from torch import Tensor

from kv_canary.state_sums import state_sums


def compare_states(states: Tensor, kept: Tensor, marks: Tensor, slots: Tensor) -> None:
    """See `launches.compare_states`."""
    for layer in range(states.shape[1]):
        found = state_sums(states[slots, layer])
        differs = (found != kept[slots, layer]).any(dim=1)
        marks[slots[differs], layer] = 1

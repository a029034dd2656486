"""vLLM's recurrent states: which tensors they are, the blocks that layers get, and what
is refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_canary.engines.hooks import Refusal
from kv_canary.engines.vllm.pool import read_groups
from kv_canary.engines.vllm.states import read_states, state_blocks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

BLOCKS, TOKENS, MAX_LEN = 6, 32, 100


@dataclasses.dataclass(frozen=True)
class MambaSpec:
    """As vLLM's class of this name."""

    kind: str = "GDN_ATTN"
    mamba_cache_mode: str = "align"
    block_size: int = TOKENS
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0

    @property
    def mamba_type(self) -> Any:
        return SimpleNamespace(name=self.kind)


def runner_of(*specs: Any, **options: Any) -> Any:
    """A runner with two layers of states per group."""
    layers = {
        f"model.layers.{3 * group + i}.mixer": SimpleNamespace(
            kv_cache=(torch.zeros(BLOCKS, 3, 8), torch.zeros(BLOCKS, 2, 4, 4))
        )
        for group in range(len(specs))
        for i in range(2)
    }
    names = list(layers)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=None,
            cache_config=SimpleNamespace(**options),
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        ),
        kv_cache_config=SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_groups=[
                SimpleNamespace(
                    layer_names=names[2 * g : 2 * g + 2], kv_cache_spec=spec
                )
                for g, spec in enumerate(specs)
            ],
        ),
    )


def test_groups_of_states_are_one_pool() -> None:
    runner = runner_of(MambaSpec(), MambaSpec())
    assert read_groups(runner) == []
    pool = read_states(runner)
    assert pool is not None
    assert (pool.name, pool.numbers, pool.block_tokens) == ("state", [0, 1], TOKENS)
    assert [group.numbers for group in pool.groups] == [[0, 1], [3, 4]]
    shapes = [[tuple(t.shape) for t in layer] for layer in pool.groups[1].layers]
    assert shapes == [[(BLOCKS, 3, 8), (BLOCKS, 2, 4, 4)]] * 2


def test_without_a_prefix_cache_a_state_keeps_its_block() -> None:
    pool = read_states(runner_of(MambaSpec(mamba_cache_mode="none")))
    assert pool is not None and pool.block_tokens >= MAX_LEN


def test_a_model_without_states_has_none() -> None:
    assert read_states(runner_of(SimpleNamespace())) is None


@pytest.mark.parametrize(
    ("spec", "options", "text"),
    [
        (MambaSpec(kind="KDA"), {}, "mamba_type KDA; MAMBA1, .* are seen"),
        (MambaSpec(mamba_cache_mode="all"), {}, "mamba_cache_mode all; use align or"),
        (MambaSpec(num_prefill_checkpoint_blocks=1), {}, "in the middle of a prefill"),
        (MambaSpec(num_speculative_blocks=2), {}, "speculative_config: the state that"),
        (MambaSpec(), {"use_replayssm": True}, "use_replayssm: inputs are folded"),
    ],
)
def test_states_that_cannot_be_seen_are_refused_by_name(
    spec: MambaSpec, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(Refusal, match="recurrent states: .*" + text):
        read_states(runner_of(spec, **options))


def test_a_second_runner_that_makes_its_metadata_elsewhere_is_refused() -> None:
    runner = runner_of(MambaSpec())
    runner.req_states, runner.model_state = None, SimpleNamespace()
    with pytest.raises(Refusal, match="looked for prepare_attn of the second runner's"):
        read_states(runner)


def test_groups_that_differ_are_refused() -> None:
    runner = runner_of(MambaSpec(), MambaSpec(block_size=64))
    with pytest.raises(Refusal, match="looked for one cache mode and block size"):
        read_states(runner)


def test_blocks_are_read_from_each_kind_of_metadata() -> None:
    """Decodes come before prefills; decodes in graphs are padded; a table of proposals
    begins with the running state."""
    on = torch.tensor
    for metadata in (
        SimpleNamespace(
            state_indices_tensor_d=on([[4, 9], [2, 8]]), state_indices_tensor_p=on([5])
        ),
        SimpleNamespace(state_indices_tensor=on([4, 2, 5])),
        SimpleNamespace(
            non_spec_state_indices_tensor=on([[4, 0], [2, 0], [5, 0]]),
            spec_state_indices_tensor=None,
        ),
        SimpleNamespace(
            state_indices_tensor_d=on([4, 2, 5, 0]), state_indices_tensor_p=None
        ),
    ):
        assert blocks_of(metadata)[:3] == [4, 2, 5]
    with pytest.raises(Refusal, match=r"mixer: looked for non_spec_state_indices"):
        blocks_of(SimpleNamespace(block_table=on([[4]])))


def blocks_of(metadata: Any) -> list[int]:
    runner = runner_of(MambaSpec())
    states: Any = SimpleNamespace(pool=read_states(runner))
    by_layer = {"model.layers.0.mixer": metadata}
    (blocks,) = state_blocks(runner, states, by_layer)
    return blocks.tolist()

"""Two engines over NIXL, where it is installed: the extra `nixl`."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from sglang.srt.arg_groups.tiers_hook import NIXL_MODULES
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.engine_pairs import engine_pair, serve_random
from sglang.test.scale import count, sampled
from sglang.test.tier_traffic import KINDS, VOCAB, tiers_of

register_cpu_ci(est_time=1, suite="cpu", full_time=300)
register_cuda_ci(est_time=60, suite="cuda")

pytestmark = pytest.mark.skipif(
    not any(find_spec(module) for module in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'sglang-canary[nixl]'",
)


@pytest.mark.parametrize(
    "kind", sampled(KINDS, key=lambda kind: "any kind", ci=1), ids=str
)
def test_random_requests(tmp_path, kind):
    with engine_pair(tmp_path, kind, backend="nixl", kv_canary="raise") as pair:
        serve_random(pair, kind, total=count(ci=30, full=1000), seed=3)


def test_units_that_were_replaced_while_they_were_read_are_noticed(tmp_path):
    """The sender announces one unit and lets the receiver read another one."""
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(5 * 64 + 2)] for _ in range(2)]
    with engine_pair(tmp_path, "plain", backend="nixl", kv_canary="none") as pair:
        outlet = pair.sender._outlet
        send, sent = outlet.send, []

        def send_other(link, unit, data, on_sent):
            sent.append(data)
            other = sent[1] if len(sent) > 5 and unit.position == 2 else data
            send(link, unit, other, on_sent)

        outlet.send = send_other
        for prompt in prompts:
            pair.generate(prompt, max_new_tokens=4, ignore_eos=True)
        incidents = pair.scheduler.own_incidents()
        assert tiers_of(pair.decode).stats.loaded == (5 + 2) * 64, incidents
        pair.settle()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

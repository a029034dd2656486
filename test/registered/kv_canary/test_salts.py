"""KV of equal tokens in another namespace is found when it is read, and the report says
which salt differs."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.base_prefix_cache import RadixKey
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.harness import EngineHarness
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=4, suite="cpu")


def share_with_everybody(cache, tokens, *, namespace=None):
    return RadixKey(tokens, None, cache.bigram)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("aaaa", "bbbb", "tenant aaaa, not bbbb"),
        (None, "bbbb", "tenant none, not bbbb"),
        ("aaaa", None, "tenant aaaa, not none"),
    ],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_report_names_the_tenants(
    tmp_path, monkeypatch, page_size, first, second, said
):
    harness = EngineHarness(
        write_mock_model(tmp_path),
        skip_tokenizer_init=True,
        kv_canary="log",
        page_size=page_size,
    )
    monkeypatch.setattr(RadixCache, "key", share_with_everybody)
    prompt = list(range(40))
    harness.generate(prompt, extra_key=first, max_new_tokens=2)
    answer = harness.generate(prompt, extra_key=second, max_new_tokens=2)
    assert answer.cached_tokens >= 32
    violations = harness.scheduler.own_incidents()[0]["violations"]
    assert {each["rid"] for each in violations} == {"r1"}
    assert {label for each in violations for label in each["reasons"]} >= {
        "verify_lineage"
    }
    assert all(said in each["look_at"] for each in violations), violations


def test_other_tokens_are_not_taken_for_another_salt(tmp_path, monkeypatch):
    harness = EngineHarness(
        write_mock_model(tmp_path), skip_tokenizer_init=True, kv_canary="log"
    )
    harness.generate(list(range(40)), extra_key="aaaa", max_new_tokens=2)
    harness.generate(list(range(1, 40)), extra_key="bbbb", max_new_tokens=2)
    # A key of other tokens.
    monkeypatch.setattr(
        RadixCache,
        "key",
        lambda cache, tokens, *, namespace=None: RadixKey(
            list(range(len(tokens))), "aaaa", cache.bigram
        ),
    )
    harness.generate(list(range(100, 140)), extra_key="cccc", max_new_tokens=2)
    found = harness.scheduler.own_incidents()[-1]["violations"]
    assert found and all("tenant" not in each["look_at"] for each in found)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""The sample of configurations covers every pair of levels."""

from __future__ import annotations

import pytest

from sglang.srt.configs.draft_layout import TreeShape
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spec_matrix import (
    LEVELS,
    SAMPLE,
    most_covering,
    pairs,
    possible_pairs,
    whole_matrix,
)

register_cpu_ci(est_time=2, suite="cpu")


def test_the_sample_covers_every_pair():
    assert len(SAMPLE) <= 24 and len(set(SAMPLE)) == len(SAMPLE)
    covered = set().union(*map(pairs, SAMPLE))
    assert not possible_pairs() - covered
    assert not covered - possible_pairs()


def test_every_configuration_is_a_tree_and_has_no_idle_choice():
    for config in (*SAMPLE, *whole_matrix()):
        assert config == config.canonical()
        TreeShape(
            topk=config.topk,
            num_steps=config.num_steps,
            num_draft_tokens=config.num_draft_tokens,
        )
        assert config.num_draft_tokens <= 64


def test_the_whole_matrix_has_every_tree_and_every_level():
    matrix = whole_matrix()
    trees = {(c.algorithm, c.topk, c.page_size, c.num_steps) for c in matrix}
    assert len(trees) == len(matrix) == 3 * 4 * 4 * 6
    covered = set().union(*map(pairs, matrix))
    assert not possible_pairs() - covered


def test_twelve_configurations_have_every_level():
    chosen = most_covering(SAMPLE, 12)
    assert len(chosen) == 12
    for field, levels in LEVELS.items():
        assert {getattr(c, field) for c in chosen} >= set(levels), field


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

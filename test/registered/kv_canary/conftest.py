"""Models and forwards for the tests of the canary."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.test.canary_traffic import CONTEXT, VOCAB
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_mock_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mock model for `canary_traffic`; files with other needs have a fixture of this
    name themselves."""
    return write_mock_model(
        tmp_path_factory.mktemp("mock"),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


@pytest.fixture
def harness(model: Path) -> ForwardHarness:
    """Forwards of the mock model under a canary in mode `log`."""
    built = ForwardHarness(model, slots=512, kv_canary="log", kv_canary_real_data="all")
    assert built.canary is not None
    built.canary.mark_init_finished()
    return built

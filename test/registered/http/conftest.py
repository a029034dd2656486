"""Fixtures: one tiny model per session, servers on it per module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from live_server import CONTEXT, Server
from openai_world import KEY

from sglang.test.tiny_models import write_mock_model


@pytest.fixture(scope="session")
def mock_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token per byte; the output is an exact function of the KV cache."""
    return write_mock_model(
        tmp_path_factory.mktemp("model") / "mock",
        vocab_size=257,
        max_position_embeddings=CONTEXT,
    )


@pytest.fixture(scope="module")
def start_server(mock_model: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers; whatever still runs at the end of the module is stopped."""
    servers: list[Server] = []

    def start(
        *flags: str, model: Path | None = mock_model, is_forked: bool = True
    ) -> Server:
        servers.append(Server(model, flags, is_forked=is_forked))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the module's own `server`."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made

"""`--kv-events-config`: JSON that says where events of the prefix cache are
published.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from sglang.srt.utils.quoting import quoted

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

FLAG = "--kv-events-config"
_EXAMPLE = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}'
# Maximum length of a unix socket path.
_MAX_IPC_BYTES = 107
_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/\s]+):(\d+)")
_MAX_PORT = 65535

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class TcpAddress(NamedTuple):
    """The parts of `tcp://host:port`; `host` may be `*`, without brackets."""

    host: str
    port: int


class KVEventsConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Where KV events are published.

    Fields:
        publisher: "zmq", or "null" for nowhere.
        endpoint: endpoint of the PUB socket.
        replay_endpoint: endpoint of the ROUTER socket, or None for no replays.
        topic: first frame of every message.
        buffer_steps: number of batches kept for replays.
        hwm: maximum batches that wait for one subscriber, which misses further ones.
        max_queue_size: maximum batches that wait for the publisher's thread.
        enable_kv_cache_events: vLLM's switch; True makes "zmq" the publisher.
        allow: networks that may connect by TCP, such as 10.0.0.0/8. By default, anyone
            who can reach the endpoints.
    """

    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: _Count = 10_000
    hwm: _Count = 10_000
    max_queue_size: _Count = 10_000
    enable_kv_cache_events: bool | None = None
    allow: tuple[str, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        if self.publisher is None:
            return bool(self.enable_kv_cache_events)
        return self.publisher == "zmq"


def parse_kv_events_config(text: str) -> KVEventsConfig:
    """Read and check the flag's value.

    Raises:
        ValueError: names the key, its value and the fix.
    """
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        keys = ", ".join(KVEventsConfig.__struct_fields__)
        raise ValueError(
            f"{FLAG} {quoted(text)}: {error}; write JSON such as {_EXAMPLE}, with the "
            f'keys {keys}; publisher is "zmq" or "null"'
        ) from None
    if config.enable_kv_cache_events is not None and config.publisher is not None:
        _check_switch(config)
    if not config.is_on:
        _refuse_keys_without_effect(text)
        return config
    for key in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, key)
        if endpoint is not None:
            _check_endpoint(key, endpoint)
    for network in config.allow:
        _check_network(network)
    if config.endpoint == config.replay_endpoint:
        raise ValueError(
            f"{FLAG}: endpoint and replay_endpoint are both {config.endpoint}; give "
            "replay_endpoint another port"
        )
    return config


def handle_kv_events(server_args: ServerArgs) -> None:
    """Check the flag, and that there is a prefix cache.

    Raises:
        ValueError: names the flag, its value and the fix.
    """
    if kv_events_config(server_args) is not None and server_args.disable_radix_cache:
        raise ValueError(
            f"{FLAG} publishes events of the prefix cache, which --disable-radix-cache "
            f"turns off; remove one of them"
        )


def kv_events_config(server_args: ServerArgs) -> KVEventsConfig | None:
    """Return the flag's value, or None if nothing is published.

    Raises:
        ValueError: see `parse_kv_events_config`.
    """
    if server_args.kv_events_config is None:
        return None
    config = parse_kv_events_config(server_args.kv_events_config)
    return config if config.is_on else None


def describe_kv_events(server_args: ServerArgs) -> dict[str, Any] | None:
    """Return the entry `kv_events` of /server_info, which routers use to subscribe, or
    None if nothing is published.
    """
    config = kv_events_config(server_args)
    if config is None:
        return None
    address = tcp_address(config.endpoint)
    return {
        "publisher": "zmq",
        "endpoint": config.endpoint,
        "endpoint_host": None if address is None else address.host,
        "endpoint_port_base": None if address is None else address.port,
        "replay_endpoint": config.replay_endpoint,
        "topic": config.topic,
        "block_size": server_args.page_size,
        "dp_size": 1,
    }


def tcp_address(endpoint: str) -> TcpAddress | None:
    """Return the address of a checked endpoint, or None if it is not tcp."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return None
    return TcpAddress(match[1].strip("[]"), int(match[2]))


def _check_switch(config: KVEventsConfig) -> None:
    if config.enable_kv_cache_events != (config.publisher == "zmq"):
        state = "true" if config.enable_kv_cache_events else "false"
        raise ValueError(
            f"{FLAG}: enable_kv_cache_events {state} contradicts publisher "
            f'"{config.publisher}"; remove one of them'
        )


def _refuse_keys_without_effect(text: str) -> None:
    given = set(msgspec.json.decode(text)) - {"publisher", "enable_kv_cache_events"}
    if given:
        raise ValueError(
            f"{FLAG}: {', '.join(sorted(given))} without effect, for nothing is "
            'published; add "publisher": "zmq"'
        )


def _check_network(network: str) -> None:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ValueError(
            f"{FLAG}: allow {network!r}: {error}; write networks such as 10.0.0.0/8"
        ) from None


def _check_endpoint(key: str, endpoint: str) -> None:
    problem = _endpoint_problem(endpoint)
    if problem is not None:
        raise ValueError(f"{FLAG}: {key} {endpoint!r} {problem}")


def _endpoint_problem(endpoint: str) -> str | None:
    """Return why an endpoint is unusable, with the fix, or None if it is usable."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/"):
            return "must name a file by its full path, such as ipc:///run/kv-events"
        if len(path.encode()) > _MAX_IPC_BYTES:
            return f"is longer than a socket's path may be, {_MAX_IPC_BYTES} bytes"
        return None
    address = tcp_address(endpoint)
    if address is None:
        return "must look like tcp://127.0.0.1:5557 or ipc:///run/kv-events"
    if not 0 < address.port <= _MAX_PORT:
        return f"has no port between 1 and {_MAX_PORT}, by which to find it"
    return None

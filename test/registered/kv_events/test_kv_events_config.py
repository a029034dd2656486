"""`--kv-events-config`: its values, and the messages about wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.arg_groups.kv_events_hook import (
    KVEventsConfig,
    describe_kv_events,
    kv_events_config,
    parse_kv_events_config,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")


def args(config: dict[str, Any] | str, **more: Any) -> ServerArgs:
    text = config if isinstance(config, str) else json.dumps(config)
    return ServerArgs(kv_events_config=text, **more)


def test_defaults_are_those_of_this_host() -> None:
    config = kv_events_config(args({"publisher": "zmq"}))
    assert config == KVEventsConfig(
        publisher="zmq",
        endpoint="tcp://127.0.0.1:5557",
        replay_endpoint=None,
        topic="",
        buffer_steps=10_000,
        hwm=10_000,
        max_queue_size=10_000,
        allow=(),
    )


def test_the_example_of_sglang_and_vllm_is_understood() -> None:
    config = parse_kv_events_config(
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558", "buffer_steps": 1, "hwm": 2, '
        '"max_queue_size": 3, "topic": "kv@10.0.0.1:8000@model"}'
    )
    assert config.is_on and config.topic == "kv@10.0.0.1:8000@model"
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (1, 2, 3)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"publisher": "null"},
        {"enable_kv_cache_events": False},
    ],
)
def test_nothing_is_published_unless_asked_for(config: dict[str, Any] | None) -> None:
    off = ServerArgs() if config is None else args(config)
    assert kv_events_config(off) is None and describe_kv_events(off) is None
    # Then there is nothing that could contradict it.
    if config is not None:
        args(config, disable_radix_cache=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "Input data was truncated.*write JSON such as"),
        ("5557", "Expected `object`, got `int`"),
        ("tcp://127.0.0.1:5557", "malformed"),
        ({"publisher": "zmq", "port": 1}, "unknown field `port`.*the keys publisher, "),
        ({"publisher": "kafka"}, r"Invalid enum value 'kafka' - at `\$.publisher`"),
        ({"publisher": "zmq", "hwm": "9"}, r"got `str` - at `\$.hwm`"),
        ({"publisher": "zmq", "hwm": 0}, r">= 1 - at `\$.hwm`"),
        ({"publisher": "zmq", "buffer_steps": 2.5}, r"`float` - at `\$.buffer_steps`"),
        ({"publisher": "zmq", "max_queue_size": -1}, r"at `\$.max_queue_size`"),
        ({"publisher": "zmq", "topic": None}, r"got `null` - at `\$.topic`"),
        ({"endpoint": "tcp://*:1"}, 'endpoint without effect.*"publisher": "zmq"'),
        (
            {"publisher": "null", "hwm": 1, "endpoint": "x"},
            "endpoint, hwm without effect",
        ),
        (
            {"publisher": "zmq", "enable_kv_cache_events": False},
            'enable_kv_cache_events false contradicts publisher "zmq"',
        ),
        (
            {"publisher": "null", "enable_kv_cache_events": True},
            'enable_kv_cache_events true contradicts publisher "null"',
        ),
        (
            {"publisher": "zmq", "endpoint": "127.0.0.1:1"},
            "endpoint '127.0.0.1:1' must",
        ),
        ({"publisher": "zmq", "endpoint": "tcp://:1"}, "must look like tcp://"),
        ({"publisher": "zmq", "endpoint": "tcp://h:*"}, "must look like tcp://"),
        ({"publisher": "zmq", "endpoint": "tcp://h:0"}, "no port between 1 and 65535"),
        ({"publisher": "zmq", "endpoint": "tcp://h:65536"}, "no port between"),
        ({"publisher": "zmq", "endpoint": "inproc://x"}, "must look like tcp://"),
        ({"publisher": "zmq", "endpoint": "ipc://x"}, "by its full path"),
        ({"publisher": "zmq", "endpoint": "ipc:///" + "x" * 107}, "107 bytes"),
        (
            {"publisher": "zmq", "replay_endpoint": "udp://h:1"},
            "replay_endpoint 'udp://h:1' must",
        ),
        (
            {"publisher": "zmq", "replay_endpoint": "tcp://127.0.0.1:5557"},
            "are both tcp://127.0.0.1:5557; give replay_endpoint another port",
        ),
        (
            {"publisher": "zmq", "allow": ["10.0.0.1/8"]},
            "allow '10.0.0.1/8': 10.0.0.1/8 has host bits set; write networks",
        ),
        ({"publisher": "zmq", "allow": ["router"]}, "allow 'router': "),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--kv-events-config.*{message}") as caught:
        args(config)
    assert "\n" not in str(caught.value)


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    with pytest.raises(ValueError, match="--disable-radix-cache turns off; remove one"):
        args({"publisher": "zmq"}, disable_radix_cache=True)


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:5557", "127.0.0.1", 5557),
        ("tcp://*:1", "*", 1),
        ("tcp://[::1]:65535", "::1", 65535),
        ("ipc:///run/events", None, None),
    ],
)
def test_routers_are_told_where_to_subscribe(
    endpoint: str, host: str | None, port: int | None
) -> None:
    config = {"publisher": "zmq", "endpoint": endpoint, "topic": "t"}
    assert describe_kv_events(args(config, page_size=16)) == {
        "publisher": "zmq",
        "endpoint": endpoint,
        "endpoint_host": host,
        "endpoint_port_base": port,
        "replay_endpoint": None,
        "topic": "t",
        "block_size": 16,
        "dp_size": 1,
    }


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""Arguments and resources of replicas under Ray Serve, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sglang.srt.ray.options import (
    RayHost,
    Resources,
    ServeOptions,
    prefill_values,
    replica_resources,
    split_options,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="cpu")

PAIRS = {"prefill_replicas": "1"}
SMALL, LARGE = RayHost(cpus=2, gpus=0), RayHost(cpus=16, gpus=4)


def test_texts_of_the_command_line_become_values() -> None:
    options, values = split_options(
        {
            "num_replicas": "2",
            "routing": "prefix",
            "num_cpus": "0.5",
            "wait_for_resources": "true",
            "tp": "2",
            "enable_metrics": "true",
            "mem_fraction_static": "0.5",
            "cuda_graph_bs": "1,2 4",
            "kv_canary": "raise",
            "context_length": "null",
            "trust_remote_code": "true",
            "grammar_backend": "xgrammar",
        }
    )
    assert options == ServeOptions(
        num_replicas=2, routing="prefix", num_cpus=0.5, wait_for_resources=True
    )
    assert values == {
        "tp_size": 2,
        "enable_metrics": True,
        "mem_fraction_static": 0.5,
        "cuda_graph_bs": [1, 2, 4],
        "kv_canary": "raise",
        "context_length": None,
        "grammar_backend": "llguidance",
    }


def test_values_of_yaml_are_taken_as_they_are() -> None:
    given_values = {
        "cuda_graph_bs": [1, 2],
        "disable_radix_cache": True,
        "dtype": "auto",
    }
    options, values = split_options(given_values)
    assert (options, values) == (ServeOptions(), given_values)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"num_replica": "2"},
            "'num_replica' is no argument; did you mean num_replicas",
        ),
        ({"tp_size": "two"}, "tp_size='two': Expected `int`, got `str`"),
        ({"tp_size": "0"}, "tp_size 0 must be at least 1"),
        ({"kv_canary": "on"}, "kv_canary 'on' is unknown; choose from none, log,"),
        ({"enable_metrics": "perhaps"}, "enable_metrics='perhaps': Expected `bool`"),
        ({"port": "8000"}, "port='8000' has no effect under Ray Serve"),
        ({"timeout_keep_alive": "9"}, "timeout_keep_alive='9' has no effect"),
        ({"num_replicas": "0"}, "num_replicas 0 must be at least 1"),
        ({"num_replicas": "2", "max_replicas": "3"}, "num_replicas=2 cannot be fixed"),
        ({"min_replicas": "3", "max_replicas": "2"}, "min_replicas=3 is above"),
        ({"routing": "random"}, "routing 'random' is unknown; choose from load,"),
        ({"tp": "2", "tp_size": "2"}, "tp_size sets tp_size a second time"),
        ({"kv_events_config": "{}", "num_replicas": "2"}, "kv_events_config has one"),
        ({"dp_size": "2"}, "--dp-size 2: data parallelism is not served"),
        (
            {"disaggregation_mode": "prefill"},
            "disaggregation_mode='prefill' has no effect under Ray Serve, which pairs",
        ),
        ({"prefill_args": "{}"}, "prefill_args has no effect without prefill_replicas"),
        (PAIRS | {"prefill_args": "{"}, "prefill_args='{': Input data was truncated"),
        (PAIRS | {"prefill_args": "[1]"}, "prefill_args=[1]: Expected `object | null`"),
        (PAIRS | {"prefill_args": {"tp": "x"}}, "tp_size='x': Expected `int`"),
        (PAIRS | {"prefill_args": {"port": 1}}, "port=1 has no effect under Ray"),
        (PAIRS | {"kv_events_config": "{}"}, "kv_events_config has one address"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        split_options(args)
    assert str(error.value).startswith(message), error.value


def test_prefill_replicas_have_arguments_of_their_own() -> None:
    options, values = split_options(
        {
            **PAIRS,
            "prefill_args": '{"chunked_prefill_size": 512, "kv_events_config": null}',
            "kv_events_config": "{}",
            "tp_size": "2",
        }
    )
    assert prefill_values(options, values) == {
        "tp_size": 2,
        "chunked_prefill_size": 512,
        "kv_events_config": None,
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 0,
    }
    assert values == {"tp_size": 2, "kv_events_config": "{}"}


@pytest.mark.parametrize(
    ("values", "hosts", "wanted"),
    [
        ({}, [SMALL], Resources(1, 0)),
        ({}, [SMALL, LARGE], Resources(1, 1)),
        ({"tp_size": 4}, [LARGE], Resources(4, 4)),
        ({"tp_size": 2, "device": "cpu"}, [LARGE], Resources(2, 0)),
    ],
)
def test_a_replica_takes_a_gpu_per_rank(
    values: Mapping[str, Any], hosts: list[RayHost], wanted: Resources
) -> None:
    assert replica_resources(ServeOptions(), values, hosts) == wanted


@pytest.mark.parametrize(
    ("options", "values", "hosts", "message"),
    [
        ({}, {"device": "cuda"}, [SMALL], "1 replica(s) of 1 GPU(s) each do not fit: "),
        ({}, {"tp_size": 8}, [LARGE, LARGE], "Ray's hosts have 4 + 4 GPUs; "),
        (
            {"num_replicas": 3},
            {"tp_size": 4},
            [LARGE, LARGE],
            "3 replica(s) of 4 GPU(s)",
        ),
        ({"num_replicas": 3}, {}, [SMALL], "3 replica(s) of 1 CPU(s)"),
        ({"min_replicas": 3}, {}, [SMALL], "3 replica(s) of 1 CPU(s)"),
        ({"prefill_replicas": 2}, {}, [SMALL], "3 replica(s) of 1 CPU(s)"),
    ],
)
def test_replicas_that_would_wait_for_ever_are_refused(
    options: dict[str, Any], values: dict[str, Any], hosts: list[RayHost], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        replica_resources(ServeOptions(**options), values, hosts)
    assert message in str(error.value) and "\n" not in str(error.value)
    patient = ServeOptions(**options, wait_for_resources=True)
    assert replica_resources(patient, values, hosts)


def test_replicas_that_fit_are_not_refused() -> None:
    options = ServeOptions(num_replicas=2, max_replicas=None, num_cpus=1.0)
    assert replica_resources(options, {}, [SMALL]) == Resources(1.0, 0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

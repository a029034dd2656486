"""`/metrics` of a running server: every series from the start, as dashboards ask.

What SGLang's dashboard selects is in `sglang_dashboard.yaml`; our own dashboard and
alerts are in `docs/deploy/`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_server import Server
from prometheus_client.parser import text_string_to_metric_families

from kv_canary.checks import EVERY_REASON
from sglang.srt.managers.scheduler.heal_stats import EVERY_DIAGNOSIS
from sglang.srt.metrics.scheduler_series import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="cpu")

HERE = Path(__file__).parent
DEPLOY = HERE.parents[2] / "docs" / "deploy"
# Set by Prometheus when it scrapes.
SCRAPED = {"instance": "127.0.0.1:30000", "job": "sglang"}
SELECTOR = re.compile(r"\b(sglang:\w+|up)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|=)\s*"([^"]*)"')
AGGREGATED = re.compile(r"\bby \(([^)]*)\)")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing"
)


class Scrape:
    """The samples of an exposition text, as Prometheus would store them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [
            (sample.name, {**sample.labels, **SCRAPED}, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
        self.samples.append(("up", SCRAPED, 1.0))

    def select(self, name: str, matchers: str = "") -> list[float]:
        """The values that a selector finds; variables of a dashboard match all."""
        wanted = {
            label: ".*" if value.startswith("$") else value
            for label, _, value in MATCHER.findall(matchers)
        }
        return [
            value
            for sample, labels, value in self.samples
            if sample == name
            and all(re.fullmatch(w, labels.get(k, "")) for k, w in wanted.items())
        ]

    def check(self, expression: str) -> None:
        """Every selector of a PromQL expression finds finite values, and every label by
        which it aggregates is one of theirs."""
        found = SELECTOR.findall(expression)
        assert found, expression
        for name, matchers in found:
            values = self.select(name, matchers)
            assert values and all(map(math.isfinite, values)), (name, matchers)
        names = {name for name, _ in found}
        labels = {key for n, of, _ in self.samples if n in names for key in of}
        for group in AGGREGATED.findall(expression):
            assert {label.strip() for label in group.split(",")} <= labels, expression

    def value(self, name: str, matchers: str = "") -> float:
        return sum(self.select(name, matchers))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A server, and what it showed before its first request."""

    server: Server
    first: Scrape

    def scrape(self) -> Scrape:
        return Scrape(self.server.get("/metrics").text)


@pytest.fixture(scope="module")
def measured(start_server: Callable[..., Server]) -> Measured:
    server = start_server("--enable-metrics", "--kv-canary", "heal").wait_ready()
    return Measured(server=server, first=Scrape(server.get("/metrics").text))


def sglang_selectors() -> list[str]:
    known = yaml.safe_load((HERE / "sglang_dashboard.yaml").read_text())
    panels = [selector for each in known["panels"].values() for selector in each]
    return [*panels, *known["documented"]]


def panels(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def own_expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    variables = [entry["query"] for entry in dashboard["templating"]["list"][1:]]
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    return [*panels(dashboard), *variables, *alerts]


@pytest.mark.parametrize("expression", [*sglang_selectors(), *own_expressions()])
def test_every_query_finds_series_before_the_first_request(
    measured: Measured, expression: str
) -> None:
    measured.first.check(expression)


def test_all_labels_are_there_with_0(measured: Measured) -> None:
    first = measured.first
    names = [name for name, _ in (GAUGES | HISTOGRAMS).values()]
    for name in (*(f"{n}_total" for n, _ in COUNTERS.values()), *names):
        suffix = "_count" if name in dict(HISTOGRAMS.values()) else ""
        due = 0.0 if name != "sglang:max_total_num_tokens" else None
        (value,) = first.select(name + suffix)
        assert value == due or due is None and value > 0, name
    for name, label, _ in LABELLED_COUNTERS.values():
        assert first.value(f"{name}_total") == 0, (name, label)
    for reason in EVERY_REASON:
        assert first.select("sglang:kv_canary_violations_total", f'reason="{reason}"')
    for name in EVERY_DIAGNOSIS:
        assert first.select("sglang:kv_canary_heals_total", f'diagnosis="{name}"')
    modes = {
        mode: first.value("sglang:kv_canary_mode", f'mode="{mode}"')
        for mode in (
            *("none", "log", "raise"),
            "heal",
        )
    }
    assert modes == {"none": 0, "log": 0, "raise": 0, "heal": 1}


def test_requests_are_counted(measured: Measured) -> None:
    before = measured.scrape()
    body = {
        "text": "count me",
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
    }
    measured.server.post("/generate", body)
    deadline = time.monotonic() + 20
    while (after := measured.scrape()).value("sglang:num_requests_total") < 1:
        assert time.monotonic() < deadline
    for name, more in {
        "queue_time_seconds_count": 1,
        "time_to_first_token_seconds_count": 1,
        "time_per_output_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 1,
        "generation_tokens_total": 5,
    }.items():
        name = f"sglang:{name}"
        assert after.value(name) - before.value(name) == more, name
    assert 0 < after.value("sglang:queue_time_seconds_sum") < 20


def test_a_whole_answer_has_a_first_token(measured: Measured) -> None:
    """It came before the answer."""

    def seconds(scrape: Scrape, name: str) -> float:
        return scrape.value(f"sglang:{name}_seconds_sum")

    names = ("time_to_first_token", "e2e_request_latency")
    before = measured.scrape()
    measured.server.generate("a whole answer", max_new_tokens=100)
    after = measured.scrape()
    count = "sglang:time_to_first_token_seconds_count"
    assert after.value(count) - before.value(count) == 1
    first, whole = (seconds(after, name) - seconds(before, name) for name in names)
    assert 0 < first < whole


def test_no_series_comes_or_goes(measured: Measured) -> None:
    def series(scrape: Scrape) -> set[tuple[str, ...]]:
        return {(name, *sorted(of.values())) for name, of, _ in scrape.samples}

    measured.server.generate("x", max_new_tokens=2)
    assert series(measured.scrape()) == series(measured.first)


@needs_promtool
def test_promtool_checks_the_metrics(measured: Measured) -> None:
    """SGLang's names have a colon, which is all that promtool finds wrong."""

    def complaints(text: str) -> list[str]:
        ran = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
        )
        assert ran.returncode in (0, 3), ran.stderr
        return ran.stderr.splitlines()

    text = measured.scrape().text
    assert {line.partition(" ")[2] for line in complaints(text)} == {
        "metric names should not contain ':'"
    }
    assert complaints(text.replace("sglang:", "sglang_")) == []


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", str(DEPLOY / "alerts.yml")],
        ["check", "config", str(DEPLOY / "prometheus.yml")],
        ["test", "rules", str(HERE / "alerts_test.yaml")],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool_checks_the_files(command: list[str]) -> None:
    ran = subprocess.run(["promtool", *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_selector_that_finds_nothing_is_noticed(measured: Measured) -> None:
    for wrong in (
        "sglang:num_running_requests",
        'sglang:num_running_reqs{tp_rank="1"}',
        "sum by (dp_rank) (sglang:num_running_reqs)",
    ):
        with pytest.raises(AssertionError):
            measured.first.check(wrong)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

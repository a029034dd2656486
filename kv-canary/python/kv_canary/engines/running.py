"""Whether a live server is checked, asked from outside by its metrics."""

from __future__ import annotations

import re
import time
import urllib.request

TIMEOUT_SECONDS = 10.0
_CLOCK = "%Y-%m-%dT%H:%M:%SZ"
_SAMPLE = re.compile(r"^(kv_canary_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def report_running(url: str) -> tuple[list[str], int]:
    """Return lines about the server whose metrics are at `url`, and an exit code: 0 if
    it is checked, 1 if it is not or that cannot be told."""
    address = (
        url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    )
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return [
            f"NOT CHECKED, as far as can be told: {address}: {error}. The canary's "
            "metrics have a port of their own: KV_CANARY_METRICS_PORT"
        ], 1
    return _lines(address, text)


def _lines(address: str, text: str) -> tuple[list[str], int]:
    values: dict[str, dict[str, float]] = {}
    reasons: dict[str, dict[str, float]] = {}
    for name, labels, value in _SAMPLE.findall(text):
        of = dict(_LABEL.findall(labels))
        rank = of.get("rank", "0")
        if name == "kv_canary_violations_total":
            reasons.setdefault(rank, {})[of.get("reason", "")] = float(value)
        else:
            values.setdefault(rank, {})[name] = float(value)
    if not values:
        return [f"NOT CHECKED: no metrics of a canary at {address}"], 1
    lines, code = [], 0
    for rank, of_rank in sorted(values.items()):
        forwards = int(of_rank.get("kv_canary_forwards_total", 0))
        slots = int(of_rank.get("kv_canary_verified_slots_total", 0))
        since = of_rank.get("kv_canary_attached_since_seconds")
        found = [f"{n} {int(v)}" for n, v in sorted(reasons.get(rank, {}).items()) if v]
        code = code or int(not forwards)
        state = "checked" if forwards else "attached, no forward yet"
        lines.append(
            f"rank {rank}: {state}{'' if since is None else f', since {_clock(since)}'}"
            f"; {forwards} forwards, {slots} slot reads verified, violations: "
            f"{', '.join(found) or 'none'}"
        )
    return lines, code


def _clock(seconds: float) -> str:
    return time.strftime(_CLOCK, time.gmtime(seconds))

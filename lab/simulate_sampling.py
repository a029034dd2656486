"""How long a fleet that verifies a sample of its requests takes to name damage.

    PYTHONPATH=kv-canary/python python lab/simulate_sampling.py

Requests come to all hosts at equal rates, and are damaged independently of each other.
Whether a damaged request is verified is the plugin's own choice, of ids as engines make
them. Prints medians and 95 % points beside those of the formula in `docs/fleet.md`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics

from kv_canary.engines.chosen import is_chosen


def hours_to_first_name(
    rng: random.Random, *, damaged: float, per_hour: float, probability: float
) -> float:
    """Return when the first damaged request is verified.

    Args:
        damaged: part of the requests that is damaged.
        per_hour: requests of the whole fleet.
    """
    hours = 0.0
    while True:
        hours += rng.expovariate(damaged * per_hour)
        if is_chosen(f"chatcmpl-{rng.getrandbits(128):032x}", probability):
            return hours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10.0, help="requests/s of a host")
    parser.add_argument("--trials", type=int, default=2000)
    args = parser.parse_args()
    rng = random.Random(0)
    per_hour = args.hosts * args.rate * 3600
    print(
        "| damaged requests | `KV_CANARY_SAMPLE` | half of the fleets, simulated "
        "| formula | 95 %, simulated | formula |\n|---|---|---|---|---|---|"
    )
    for damaged in (1e-6, 1e-5):
        for probability in (1.0, 0.1, 0.02):
            found = [
                hours_to_first_name(
                    rng, damaged=damaged, per_hour=per_hour, probability=probability
                )
                for _ in range(args.trials)
            ]
            points = statistics.quantiles(found, n=20)
            mean = 1 / (damaged * per_hour * probability)
            columns = [points[9], mean * math.log(2), points[18], mean * math.log(20)]
            hours = " | ".join(f"{hours:.2f} h" for hours in columns)
            print(f"| 1 in {1 / damaged:,.0f} | {probability:g} | {hours} |")


if __name__ == "__main__":
    main()

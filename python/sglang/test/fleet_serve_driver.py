"""Runs Ray Serve for a test, in an environment that has Ray; commands come on stdin.

Each line is JSON: `{"deploy": {...}}` replaces the application by `build_app` with
these arguments, `{"status": "NAME"}` returns a deployment's replicas in each state.
Each is answered with a JSON line on stdout; logs of all processes go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from sglang.srt.ray import app

APPLICATION = "sglang"
START_ATTEMPTS = 3
# A file with variables, which the next replica that starts removes and applies.
PLANT = "SGLANG_TEST_FLEET_PLANT"


class PlantedReplica(app.ServedReplica):
    """A replica whose scheduler gets planted faults if the test asks for them."""

    async def __init__(  # type: ignore[misc]
        self, values: Mapping[str, Any]
    ) -> None:
        file = Path(os.environ[PLANT])
        taken = file.with_suffix(f".{os.getpid()}")
        try:
            file.rename(taken)
        except FileNotFoundError:
            await super().__init__(values)
            return
        planted: dict[str, str] = json.loads(taken.read_text())
        os.environ.update(planted)
        await super().__init__(values)


def main() -> None:
    # Ray writes its workers' output to stdout, in the middle of lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    port, cpus = int(sys.argv[1]), int(sys.argv[2])
    _start_ray(cpus)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    answer({"port": port})
    for line in sys.stdin:
        ((command, value),) = json.loads(line).items()
        answer(_COMMANDS[command](value))
    serve.shutdown()
    ray.shutdown()


def _start_ray(cpus: int) -> None:
    """Start Ray, which allows itself 30 seconds; a busy machine may need another
    try.
    """
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, namespace="serve")
            return
        except Exception as error:
            ray.shutdown()
            if attempt == START_ATTEMPTS - 1 or "timed out" not in str(error):
                raise


def _deploy(args: dict[str, Any]) -> dict[str, Any]:
    try:
        if APPLICATION in serve.status().applications:
            serve.delete(APPLICATION)
        built = app.bind_replicas(args, replica=PlantedReplica)
        serve.run(built, name=APPLICATION, route_prefix="/")
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    return _status(app.ENGINE)


def _status(deployment: str) -> dict[str, Any]:
    deployments = serve.status().applications[APPLICATION].deployments
    return dict(deployments[deployment].replica_states)


_COMMANDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "deploy": _deploy,
    "status": _status,
}


if __name__ == "__main__":
    main()

"""Replicas of this engine under Ray Serve (extra `ray`).

    serve run sglang.srt.ray.app:app
    serve run sglang.srt.ray.app:build_app model_path=/models/x num_replicas=2

Each replica has its own engine and is an ingress: it serves the HTTP server's routes.
With `prefill_replicas` others compute the prompts, and a front pairs them.
`docs/fleet.md` has the options.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from sglang.srt.ray.front import (
    Answers,
    Replicas,
    body_limits,
    create_front,
    key_by,
)
from sglang.srt.ray.options import (
    RayHost,
    ServeOptions,
    prefill_values,
    replica_resources,
    split_options,
)
from sglang.srt.ray.pairs import PairedReplicas
from sglang.srt.ray.replica import EngineReplica, ReplicaFailed
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.devices import cuda_device_count

if TYPE_CHECKING:
    from sglang.srt.ray.http_call import HttpCall

logger = logging.getLogger(__name__)

ENGINE = "SGLang"
PREFILL = "Prefill"
FRONT = "Front"
# Ships with `ray[serve]`; PrefixCacheAffinityRouter needs `ray[llm]` and typed prompts.
SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def build_app(args: dict[str, Any]) -> serve.Application:
    """Return the application for `serve run` and `serve deploy`.

    Args:
        args: fields of `ServeOptions` and `ServerArgs`; strings are converted.

    Raises:
        ValueError: a name or a value is not allowed, or the replicas fit on no host of
            the cluster.
    """
    return bind_replicas(args, replica=ServedReplica)


def bind_replicas(
    args: dict[str, Any], *, replica: type[ServedReplica]
) -> serve.Application:
    """`build_app` with another class of replicas."""
    options, values = split_options(args)
    if not options.has_front:
        ingress = serve.deployment(serve.ingress()(replica))
        return ingress.options(**_replicas(options, values)).bind(values)
    engines = serve.deployment(replica)
    prefill = None
    if options.prefill_replicas:
        mine = prefill_values(options, values)
        values = {**values, "disaggregation_mode": "decode"}
        fixed = {"name": PREFILL, "num_replicas": options.prefill_replicas}
        deployment = {**_replicas(options, mine), **fixed}
        deployment.pop("autoscaling_config", None)
        prefill = engines.options(**deployment).bind(mine)
    front = serve.deployment(serve.ingress()(RequestFront)).options(
        name=FRONT,
        num_replicas=options.front_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=options.max_ongoing_requests * options.most_replicas,
    )
    return front.bind(
        engines.options(**_replicas(options, values)).bind(values),
        prefill,
        routing=options.routing,
        prefix_bytes=options.prefix_bytes,
        **body_limits(values, ServerArgs),
    )


def _replicas(options: ServeOptions, values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a deployment of engines with `values`."""
    deployment = {
        "name": ENGINE,
        **_scale(options),
        **_actor(options, values),
        "max_ongoing_requests": options.max_ongoing_requests,
        "health_check_period_s": options.health_check_period_s,
        "graceful_shutdown_timeout_s": values.get(
            "drain_timeout", ServerArgs.drain_timeout
        ),
    }
    if options.routing != "load":
        deployment["request_router_config"] = RequestRouterConfig(
            request_router_class=SESSION_ROUTER
        )
    return deployment


def __getattr__(name: str) -> serve.Application:
    """Create `app` on first access."""
    if name == "app":
        return build_app({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ServedReplica(EngineReplica):
    """The engine of one replica, created and ended by Ray Serve."""

    async def __init__(  # type: ignore[misc]
        self, values: Mapping[str, Any]
    ) -> None:
        if values.get("disaggregation_mode") == "prefill":
            # Where it is asked for KV.
            values = {**values, "host": ray.util.get_node_ip_address()}
        await super().__init__(values)

    async def __del__(self) -> None:
        # Serve awaits it after the requests in flight have ended or timed out.
        if hasattr(self, "_tasks"):
            await self.close()


class RequestFront:
    """The deployment in front of the engines if requests are read before their replica
    is chosen.
    """

    def __init__(
        self,
        engine: DeploymentHandle,
        prefill: DeploymentHandle | None,
        *,
        routing: str,
        prefix_bytes: int,
        **limits: int,
    ) -> None:
        replicas: Replicas = _ByHandle(engine, "answer")
        if prefill is not None:
            replicas = PairedReplicas(_ByHandle(prefill, "prefill"), replicas)
        key_of = key_by(routing, prefix_bytes=prefix_bytes)
        self._app = create_front(replicas, key_of=key_of, **limits)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class _ByHandle:
    """The replicas behind a Ray Serve handle, asked by one of their methods."""

    lost: tuple[type[Exception], ...] = (RayActorError, ReplicaFailed)

    def __init__(self, engine: DeploymentHandle, method: str) -> None:
        self._engine = engine.options(method_name=method, stream=True)

    def ask(self, call: HttpCall, *, key: str) -> Answers:
        chosen = self._engine.options(session_id=key) if key else self._engine
        answers: Answers = chosen.remote(call)
        return answers


def _scale(options: ServeOptions) -> dict[str, Any]:
    if not options.is_autoscaling:
        return {"num_replicas": options.num_replicas or 1}
    return {
        "autoscaling_config": {
            "min_replicas": options.fewest_replicas,
            "max_replicas": options.most_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
        }
    }


def _actor(options: ServeOptions, values: Mapping[str, Any]) -> dict[str, Any]:
    wanted = replica_resources(options, values, _hosts())
    logger.info("replicas take %g CPUs and %d GPUs each", *wanted)
    return {"ray_actor_options": wanted._asdict()}


def _hosts() -> list[RayHost]:
    """Return the hosts of the cluster, or this host if Ray has not been started yet,
    which `serve run` does later.
    """
    if not ray.is_initialized():
        return [RayHost(cpus=os.cpu_count() or 1, gpus=cuda_device_count())]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [RayHost(cpus=node.get("CPU", 0), gpus=node.get("GPU", 0)) for node in nodes]

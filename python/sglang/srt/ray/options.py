"""Arguments of `build_app`: Serve's deployment options and the engine's own arguments.

Values may be strings, as from `serve run ... key=value`, or typed, as from YAML and
Python. Knows nothing about Ray.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from sglang.srt.arg_groups.arg_parser import (
    Arg,
    Declared,
    check_value,
    declared_fields,
)
from sglang.srt.arg_groups.upstream_flags import judge, upstream_flags
from sglang.srt.server_args import ServerArgs

ROUTINGS = ("load", "session", "prefix")
LISTENERS = frozenset(
    {
        *("host", "port", "max_connections", "keep_alive_timeout", "header_timeout"),
        *("body_timeout", "write_timeout", "min_transfer_rate", "max_header_bytes"),
    }
)
ROLES = frozenset({"disaggregation_mode", "disaggregation_bootstrap_port"})
# The engine's arguments that are none of a replica's.
NOT_HERE = (
    (
        LISTENERS,
        "Serve, which holds the connections; remove it and set Serve's http_options",
    ),
    (ROLES, "Serve, which pairs replicas itself; remove it and set prefill_replicas"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How Ray Serve runs the replicas."""

    num_replicas: Annotated[
        int | None, Arg("Number of replicas; unset: 1, or min_replicas.", low=1)
    ] = None
    min_replicas: Annotated[
        int | None, Arg("Minimum replicas; turns autoscaling on.", low=0)
    ] = None
    max_replicas: Annotated[
        int | None, Arg("Maximum replicas; turns autoscaling on.", low=1)
    ] = None
    target_ongoing_requests: Annotated[
        float, Arg("Target requests per replica for autoscaling.", low=0.001)
    ] = 32.0
    max_ongoing_requests: Annotated[
        int, Arg("Maximum concurrent requests per replica; others wait.", low=1)
    ] = 256
    prefill_replicas: Annotated[
        int,
        Arg(
            "Number of replicas that compute the prompts of the others; 0: each "
            "computes its own.",
            low=0,
        ),
    ] = 0
    prefill_args: Annotated[
        dict[str, Any] | None,
        Arg("Engine arguments of these replicas alone, as JSON or a mapping."),
    ] = None
    num_cpus: Annotated[
        float | None, Arg("CPUs per replica; unset: 1 per rank.", low=0.0)
    ] = None
    routing: Annotated[
        str,
        Arg(
            "How a replica is chosen. load: the less busy of two replicas; session: by "
            "the header x-session-id; prefix: by the beginning of the prompt.",
            ROUTINGS,
        ),
    ] = "load"
    prefix_bytes: Annotated[
        int, Arg("With routing=prefix: number of prompt bytes used to choose.", low=1)
    ] = 1024
    front_replicas: Annotated[
        int,
        Arg(
            "With routing=prefix or prefill_replicas: number of processes that read "
            "the requests.",
            low=1,
        ),
    ] = 1
    health_check_period_s: Annotated[
        float, Arg("Seconds between two health checks of a replica.", low=0.05)
    ] = 1.0
    wait_for_resources: Annotated[
        bool,
        Arg("Deploy even if no host has the CPUs and GPUs, because others may join."),
    ] = False

    def __post_init__(self) -> None:
        for declared in declared_fields(ServeOptions):
            value = getattr(self, declared.field.name)
            if value is not None:
                check_value(declared.field.name, value, declared.arg)
        if self.is_autoscaling and self.num_replicas is not None:
            raise ValueError(
                f"num_replicas={self.num_replicas} cannot be fixed and scaled between "
                "min_replicas and max_replicas; remove one of them"
            )
        if self.prefill_args is not None and not self.prefill_replicas:
            raise ValueError("prefill_args has no effect without prefill_replicas")
        if self.fewest_replicas > self.most_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas} is above "
                f"max_replicas={self.most_replicas}; swap them"
            )

    @property
    def is_autoscaling(self) -> bool:
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def fewest_replicas(self) -> int:
        """Number of replicas that must run before anything is served."""
        if self.is_autoscaling:
            return 1 if self.min_replicas is None else self.min_replicas
        return self.num_replicas or 1

    @property
    def has_front(self) -> bool:
        """Whether requests are read before their replica is chosen."""
        return self.routing == "prefix" or self.prefill_replicas > 0

    @property
    def most_replicas(self) -> int:
        if self.max_replicas is not None:
            return self.max_replicas
        return max(self.fewest_replicas, 1)


class RayHost(NamedTuple):
    """Resources of a host in the cluster."""

    cpus: float
    gpus: float


def split_options(
    args: Mapping[str, Any],
) -> tuple[ServeOptions, dict[str, Any]]:
    """Return Serve's options and the engine's arguments, with typed values.

    Raises:
        ValueError: a name is unknown or has no meaning under Ray Serve, or a value is
            not allowed; names it and the fix.
    """
    serve = _by_name(ServeOptions)
    options = {
        name: _convert(serve[name], value)
        for name, value in args.items()
        if name in serve
    }
    serve_options = ServeOptions(**options)
    values = _engine_values(
        {name: value for name, value in args.items() if name not in serve}
    )
    # The prefill replicas' arguments are checked before any replica starts.
    everyone = [(serve_options.most_replicas, values)]
    if serve_options.prefill_replicas:
        mine = prefill_values(serve_options, values)
        everyone.append((serve_options.prefill_replicas, mine))
    publishers = sum(count for count, of in everyone if of.get("kv_events_config"))
    if publishers > 1:
        raise ValueError(
            "kv_events_config has one address, which only one replica of a host can "
            f"have; there may be {publishers}: remove it"
        )
    return serve_options, values


def prefill_values(options: ServeOptions, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments of the prefill replicas: those of the others, and
    prefill_args.

    Raises:
        ValueError: as `split_options`, for prefill_args.
    """
    own = _engine_values(options.prefill_args or {})
    role = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 0}
    return {**values, **own, **role}


def _engine_values(args: Mapping[str, Any]) -> dict[str, Any]:
    engine = _by_name(ServerArgs)
    values: dict[str, Any] = {}
    for name, value in args.items():
        if name in engine:
            field = engine[name].field.name
            for fields, why in NOT_HERE:
                if field in fields:
                    raise ValueError(f"{name}={value!r} has no effect under Ray {why}")
            if field in values:
                raise ValueError(f"{name} sets {field} a second time; keep one of them")
            values[field] = engine[name].choice_meant(_convert(engine[name], value))
            if values[field] is not None:
                check_value(name, values[field], engine[name].arg)
        elif name in upstream_flags():
            judge(upstream_flags()[name], value)
        else:
            raise ValueError(_unknown(name, (*_by_name(ServeOptions), *engine)))
    return values


def _by_name(cls: type) -> dict[str, Declared]:
    """Return the fields by their flag names and aliases in Python spelling."""
    return {
        flag.removeprefix("--").replace("-", "_"): declared
        for declared in declared_fields(cls)
        for flag in (declared.flag, *declared.arg.aliases)
    }


def _convert(declared: Declared, value: Any) -> Any:
    kind: Any = declared.kind
    if isinstance(value, str) and declared.is_list:
        value = value.replace(",", " ").split()
    try:
        if isinstance(value, str) and declared.field.name == "prefill_args":
            value = msgspec.json.decode(value)
        return msgspec.convert(value, kind, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"{declared.field.name}={value!r}: {error}") from error


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"{name!r} is no argument; {hint}there are the server's flags with underscores "
        "(docs/server_arguments.md) and those of docs/fleet.md"
    )


class Resources(NamedTuple):
    """Resources that one replica takes."""

    num_cpus: float
    num_gpus: int


def replica_resources(
    options: ServeOptions, values: Mapping[str, Any], hosts: Iterable[RayHost]
) -> Resources:
    """Return what a replica takes: a GPU per rank on CUDA, none on the CPU.

    Args:
        values: the engine's arguments.
        hosts: hosts of the cluster.

    Raises:
        ValueError: the replicas would wait forever; names the missing resource and the
            fix.
    """
    hosts = list(hosts)
    tp_size = values.get("tp_size") or 1
    device = values.get("device") or "auto"
    if device == "auto":
        device = "cuda" if any(host.gpus for host in hosts) else "cpu"
    wanted = Resources(
        num_cpus=tp_size if options.num_cpus is None else options.num_cpus,
        num_gpus=tp_size if device == "cuda" else 0,
    )
    if not options.wait_for_resources:
        fewest = options.fewest_replicas + options.prefill_replicas
        _check_fit(wanted, fewest, hosts)
    return wanted


def _check_fit(wanted: Resources, replicas: int, hosts: Sequence[RayHost]) -> None:
    for what, flag, count, offers in (
        ("GPU", "device=cpu or a smaller tp_size", wanted.num_gpus, _column(hosts, 1)),
        ("CPU", "a smaller num_cpus", wanted.num_cpus, _column(hosts, 0)),
    ):
        if not count:
            continue
        fit = sum(int(offer // count) for offer in offers)
        if fit < replicas:
            raise ValueError(
                f"{replicas} replica(s) of {count:g} {what}(s) each do not fit: Ray's "
                f"hosts have {_shown(offers)} {what}s; use {flag}, fewer replicas, or "
                "wait_for_resources=true where hosts will join"
            )


def _column(hosts: Sequence[RayHost], index: int) -> list[float]:
    return [host[index] for host in hosts]


def _shown(offers: Sequence[float]) -> str:
    return " + ".join(f"{offer:g}" for offer in offers) or "0"

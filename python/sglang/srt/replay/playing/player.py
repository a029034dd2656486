"""Drives a scheduler through the rounds of a record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kv_canary.reporter import CanaryViolation
from sglang.srt.arg_groups.rooms import load_room
from sglang.srt.environ import FAULTS_ROOM, only_variables
from sglang.srt.managers.batch.req import namespace_of
from sglang.srt.managers.messages.io_struct import (
    AbortReq,
    FlushCacheReq,
    GenerateReq,
    PauseReq,
)
from sglang.srt.managers.scheduler.build import build_scheduler
from sglang.srt.managers.scheduler.draft_shapes import FixedShape
from sglang.srt.managers.scheduler.scheduler_io import ListIO
from sglang.srt.replay.playing.forced import ForcedEnd, force_tokens
from sglang.srt.replay.playing.restore import restore
from sglang.srt.replay.playing.states import State, show_difference, watch_states
from sglang.srt.replay.recording.identity import VARIABLES
from sglang.srt.replay.recording.recorder import Recorder
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.salt_chain import Namespace

if TYPE_CHECKING:
    from sglang.srt.managers.batch.req import Req
    from sglang.srt.mem_cache.page_ledger import IntArray
    from sglang.srt.replay.recording.log import LoggedLaunch
    from sglang.srt.replay.recording.record_file import (
        Checkpoint,
        RecordedLaunch,
        RecordedRequest,
        RecordedRound,
        RecordFile,
    )

logger = logging.getLogger(__name__)

# A generation in the player's own log never ends.
_ENDLESS = 1 << 62
_FAULTS = ("SGLANG_KV_CANARY_PERTURB_", "SGLANG_DEBUG_REVERT_PR")
_ORACLE = "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE"


class CannotReplay(ValueError):
    """The record cannot be replayed, here or at all; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how a record is replayed.

    Fields:
        model_path, draft_model_path: paths to use, or None for the recorded ones.
        device: device to use, or None for the recorded one.
        with_faults: whether to plant the recorded faults again.
        with_states: whether to keep the state of every forward.
    """

    model_path: str | None = None
    draft_model_path: str | None = None
    device: str | None = None
    with_faults: bool = True
    with_states: bool = False

    def target_path(self, flags: dict[str, Any]) -> str:
        """Return the target's path for a record with these flags."""
        path: str = self.model_path or flags["model_path"]
        return path

    def draft_path(self, flags: dict[str, Any]) -> str | None:
        """Return the draft's path for a record with these flags. A draft in the
        target's folder follows the target.
        """
        recorded: str | None = flags.get("speculative_draft_model_path")
        if recorded == flags["model_path"]:
            recorded = self.target_path(flags)
        return self.draft_model_path or recorded


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A launch that differs from the record, with the first field that differs."""

    forward: int
    field: str
    recorded: str
    replayed: str


@dataclass(kw_only=True)
class Played:
    """Result of a replay.

    Fields:
        num_launches: number of launches compared. difference: the first difference.
        incidents: incidents of the replay's own canary.
        error: error that stopped it, other than a violation.
        other_tokens: number of forced tokens that the model would have chosen
            differently, or None if it got other tokens than were recorded.
        states: states of all forwards.
    """

    num_launches: int = 0
    difference: Difference | None = None
    incidents: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    other_tokens: int | None = None
    states: list[State] = field(default_factory=list)


def play(record: RecordFile, setting: Setting) -> Played:
    """Replay `record` to its end, or until the scheduler stops.

    Raises:
        CannotReplay: it cannot be replayed; says why.
    """
    if record.obstacle is not None:
        raise CannotReplay(
            f"the record reaches back to no point to go on from: {record.obstacle}"
        )
    origin = record.origin
    uses_oracle = origin.environment.get(_ORACLE, "0") not in ("", "0")
    if uses_oracle and not origin.has_tokens:
        raise CannotReplay(
            "the token oracle's tokens cannot be replaced: record with "
            "--kv-canary-report-tokens"
        )
    variables = {
        name: text
        for name, text in origin.environment.items()
        if setting.with_faults or not name.startswith(_FAULTS)
    }
    try:
        with only_variables(VARIABLES, variables):
            if any(record.armed):
                load_room(FAULTS_ROOM).join_recording()
            player = _Player(record, setting, forces=not uses_oracle)
            return player.play()
    except (ValueError, MemoryError) as error:
        raise CannotReplay(str(error)) from error


def replay_args(record: RecordFile, setting: Setting) -> ServerArgs:
    """Return the recorded flags, adapted for a replay.

    Raises:
        ValueError: the flags do not fit this machine.
    """
    origin = record.origin
    known = {field_.name for field_ in fields(ServerArgs)}
    flags = {name: v for name, v in origin.server_args.items() if name in known}
    flags |= {
        "tp_size": 1,
        "max_total_tokens": origin.num_slots,
        "skip_tokenizer_init": True,
        "tool_call_parser": None,
        "reasoning_parser": None,
        "chat_template": None,
        "grammar_backend": "none",
        "enable_metrics": False,
        "kv_canary_report_dir": None,
        "kv_canary_record": None,
        "kv_events_config": None,
        "log_level": "error",
    }
    if flags.get("kv_canary") == "heal":
        # A replay may take less time than the recorded run.
        flags["kv_canary_heal_limit"] = 0
    if setting.device not in (None, origin.device):
        flags |= {
            "device": setting.device,
            "dtype": "auto",
            "attention_backend": None,
            "disable_cuda_graph": True,
            "disable_piecewise_cuda_graph": True,
            "enable_breakable_cuda_graph": False,
            "cuda_graph_bs": None,
            "cuda_graph_max_bs": None,
        }
    if setting.model_path or setting.draft_model_path:
        flags["tokenizer_path"] = None
    flags |= {
        "model_path": setting.target_path(origin.server_args),
        "speculative_draft_model_path": setting.draft_path(origin.server_args),
    }
    return ServerArgs(**flags)


class _Follower(Recorder):
    """The replay's own log, which tells the player about each request."""

    player: _Player

    def on_request(self, request: GenerateReq, req: Req) -> None:
        super().on_request(request, req)
        self.player.on_request(req)


def _message(recorded: RecordedRequest) -> GenerateReq:
    """Return the message of a request, without its tokens."""
    return msgspec.msgpack.decode(recorded.message, type=GenerateReq)


class _Player:
    """One replay of one record.

    Args:
        forces: whether to force the recorded tokens.
    """

    def __init__(self, record: RecordFile, setting: Setting, *, forces: bool) -> None:
        self._record = record
        self._setting = setting
        self._requests = {request.serial: request for request in record.requests}
        self._io = ListIO()
        # The newest request by id, and all requests by their serial in the replay.
        self._by_rid: dict[str, int] = {}
        self._recorded: dict[int, int] = {}
        self._scheduler = build_scheduler(replay_args(record, setting), self._io)
        self._check_pool()
        self._check_adapters()
        self._scheduler.max_in_flight = record.origin.max_in_flight
        self._managers = self._scheduler.worker.canary_managers()
        self._differing: list[int] = []
        if forces:
            self._differing = force_tokens(self._scheduler.worker, self._tokens_of)
        self._played = Played()

    def _check_adapters(self) -> None:
        """Check that the adapters of all requests and of the tree are loaded."""
        used = {namespace_of(None, _message(r).lora) for r in self._requests.values()}
        checkpoint = self._record.checkpoint
        if checkpoint is not None and checkpoint.tree is not None:
            used |= {Namespace.of(run.namespace) for run in checkpoint.tree.runs}
        adapters = self._scheduler.worker.model_runner.adapters
        for name in used:
            if name.adapter is None:
                continue
            if adapters is None or name.revision not in adapters.pool:
                raise CannotReplay(
                    f"revision {name.revision} of the adapter {name.adapter} was "
                    "recorded, but its folder now has another one or none"
                )

    def _check_pool(self) -> None:
        runner, origin = self._scheduler.worker.model_runner, self._record.origin
        own = (runner.max_total_num_tokens, runner.allocator.page_size)
        if own != (origin.num_slots, origin.page_size):
            raise CannotReplay(
                f"{origin.num_slots} KV slots in pages of {origin.page_size} were "
                f"recorded, but this machine gives {own[0]} in pages of {own[1]}"
            )
        if runner.model_config.vocab_size != origin.vocab_size:
            raise CannotReplay(
                f"a vocabulary of {origin.vocab_size} tokens was recorded, but this "
                f"model has {runner.model_config.vocab_size}"
            )

    # -- the rounds ----------------------------------------------------------------

    def play(self) -> Played:
        played, record = self._played, self._record
        follower = _Follower(self._scheduler, num_forwards=_ENDLESS, has_tokens=True)
        follower.player = self
        self._scheduler.attach_recorder(follower)
        checkpoint = record.checkpoint
        if checkpoint is not None:
            if not self._setting.with_faults:
                checkpoint = _without_faults(checkpoint)
            restore(self._scheduler, checkpoint, self._create)
        num_restored = len(self._differing)
        if self._setting.with_states:
            played.states = watch_states(self._scheduler)
        recorded = [launch for round_ in record.rounds for launch in round_.launches]
        try:
            for round_ in record.rounds:
                self._play_round(round_)
        except CanaryViolation:
            pass
        except Exception as error:
            played.error = f"{type(error).__name__}: {error}"
            logger.debug("the replay failed", exc_info=error)
        self._compare(recorded, follower.launches)
        played.incidents = list(self._managers[0].reporter.incidents)
        if record.origin.has_tokens and self._differing:
            played.other_tokens = sum(self._differing[num_restored:])
        return played

    def _play_round(self, round_: RecordedRound) -> None:
        if round_.resolves:
            self._scheduler.resolve_all()
        for kind, value in round_.events:
            self._deliver(kind, value)
        if round_.shape is not None:
            self._scheduler.shapes.policy = FixedShape(round_.shape)
        self._scheduler.step()
        self._io.responses.clear()

    def _deliver(self, kind: str, value: int | str) -> None:
        requests = self._io.requests
        if kind in ("arrive", "ready") and isinstance(value, int):
            request = self._requests[value]
            # A request with a grammar was queued when the grammar was ready.
            is_new = request.waits_for_grammar == (kind == "ready")
            if is_new and value not in self._recorded.values():
                requests.append(self._message(value))
        elif kind == "abort" and isinstance(value, str):
            requests.append(AbortReq(rid=value))
        elif kind == "abort_all":
            requests.append(AbortReq(abort_all=True))
        elif kind == "flush":
            requests.append(FlushCacheReq(call_id=0))
        elif kind == "pause" and isinstance(value, str):
            requests.append(PauseReq(call_id=0, is_pause=True, mode=value))
        elif kind == "continue":
            requests.append(PauseReq(call_id=0, is_pause=False))
        else:
            raise CannotReplay(f"an event {kind!r} is not known to this version")

    # -- requests ------------------------------------------------------------------

    def _message(self, serial: int) -> GenerateReq:
        """Return the message of a recorded request; its end is forced."""
        recorded = self._requests[serial]
        message = _message(recorded)
        params = msgspec.structs.replace(
            message.sampling_params,
            ignore_eos=True,
            min_new_tokens=0,
            stop=[],
            stop_regex=[],
            stop_token_ids=[],
            json_schema=None,
            regex=None,
            ebnf=None,
            structural_tag=None,
        )
        self._by_rid[message.rid] = serial
        return msgspec.structs.replace(
            message,
            input_ids=recorded.tokens[: recorded.prompt_len].tolist(),
            sampling_params=params,
        )

    def _create(self, serial: int) -> Req:
        """Create a request of the checkpoint with all of its tokens."""
        if serial not in self._requests:
            raise CannotReplay(
                f"request {serial} of the checkpoint is not in the record"
            )
        req = self._scheduler.intake.readmit(self._message(serial))
        recorded = self._requests[serial]
        req.tokens.extend(recorded.tokens[recorded.prompt_len :].tolist())
        return req

    def on_request(self, req: Req) -> None:
        """Make an accepted request end as it did."""
        serial = self._recorded[req.serial] = self._by_rid[req.rid]
        recorded = self._requests[serial]
        if recorded.is_own and recorded.end_len:
            req.stop_matcher = ForcedEnd(recorded.end_len)

    def _tokens_of(self, req: Req) -> IntArray | None:
        serial = self._recorded.get(req.serial)
        return None if serial is None else self._requests[serial].tokens

    # -- comparison ----------------------------------------------------------------

    def _compare(
        self, recorded: Sequence[RecordedLaunch], own: Sequence[LoggedLaunch]
    ) -> None:
        played = self._played
        for old, new in zip(recorded, own, strict=False):
            played.num_launches += 1
            after = _facts(new, self._own_rid)
            for name, value in _facts(old, self._rid).items():
                if value != after[name]:
                    shown = show_difference(value, after[name])
                    played.difference = Difference(
                        forward=old.clocks[0],
                        field=name,
                        recorded=shown[0],
                        replayed=shown[1],
                    )
                    return
        if len(own) != len(recorded) and played.error is None:
            longer = recorded if len(recorded) > len(own) else own
            played.difference = Difference(
                forward=longer[min(len(own), len(recorded))].clocks[0],
                field="launches",
                recorded=str(len(recorded)),
                replayed=str(len(own)),
            )

    def _own_rid(self, serial: int) -> str:
        return self._rid(self._recorded.get(serial, -serial))

    def _rid(self, serial: int) -> str:
        recorded = self._requests.get(serial)
        return f"serial {serial}" if recorded is None else recorded.rid


def _facts(
    launch: LoggedLaunch | RecordedLaunch, rid_of: Callable[[int], str]
) -> dict[str, Sequence[object] | str]:
    """Return the compared values of a launch by name, in the order they were
    decided.
    """
    return {
        "mode": launch.mode,
        "requests": [rid_of(serial) for serial in launch.serials.tolist()],
        "tokens with KV before": launch.starts.tolist(),
        "tokens with KV after": launch.ends.tolist(),
        "pages given back": _pages(launch.given),
        "pages taken": _pages(launch.taken),
        "number of the forward": launch.clocks,
    }


def _pages(arrays: IntArray | Sequence[IntArray]) -> list[int]:
    if isinstance(arrays, list):
        return [page for array in arrays for page in array.tolist()]
    pages: list[int] = np.asarray(arrays).tolist()
    return pages


def _without_faults(checkpoint: Checkpoint) -> Checkpoint:
    canaries = [replace(canary, perturb=None) for canary in checkpoint.canaries]
    return replace(checkpoint, canaries=canaries)

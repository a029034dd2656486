"""The file format of a record: an engine's decisions in its last forwards, and their
starting point.

```
magic (8 bytes) | SHA-256 of the rest | zlib of one msgpack document
```
Structs of plain data; arrays are int64, little-endian. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

# msgspec resolves the annotations.
from sglang.srt.kv_canary.runner.canary_manager import SavedCanary  # noqa: TC001
from sglang.srt.managers.batch.saved_req import SavedReq  # noqa: TC001
from sglang.srt.managers.scheduler.batch_selector import SavedBatches  # noqa: TC001
from sglang.srt.mem_cache.groups.saved_states import SavedStates  # noqa: TC001
from sglang.srt.mem_cache.page_ledger import IntArray  # noqa: TC001
from sglang.srt.mem_cache.saved_tree import SavedTree  # noqa: TC001

FORMAT = 1
_MAGIC = b"KVRECORD"
_DIGEST_BYTES = 32
# Maximum size of an unpacked document; an untrusted file must not fill the memory.
MAX_BYTES = 1 << 30


class BadRecord(ValueError):
    """The file is not a record, or not a complete one."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a record comes from.

    Fields:
        version: version of this package. torch: version of torch.
        models: digests of configuration and weight index by role, "target" or "draft".
        device, rank: device and rank of the process. num_slots, page_size, vocab_size:
        sizes of the target's pool and model.
        max_in_flight: launched batches that a step may leave unresolved.
        server_args: resolved flags, without keys.
        environment: environment variables read by the canary and its faults.
        has_tokens: whether tokens are the requests' own, rather than others that share
            prefixes in the same way.
    """

    version: str
    torch: str
    models: dict[str, str]
    device: str
    rank: int
    num_slots: int
    page_size: int
    vocab_size: int
    max_in_flight: int
    server_args: dict[str, Any]
    environment: dict[str, str]
    has_tokens: bool


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The host's records between two steps with nothing in flight.

    Fields:
        tree: the prefix tree, or None if prefixes are not shared. free_pages,
        free_rows: free pages and rows, in reverse order of reuse.
        reqs: unfinished requests. created: number of requests so far.
        canaries: canary states of the pools, target first.
        states: checkpoints of recurrent state, or None without any.
    """

    tree: SavedTree | None
    free_pages: IntArray
    free_rows: list[int]
    reqs: list[SavedReq]
    batches: SavedBatches
    created: int
    idle_checked: bool
    canaries: list[SavedCanary]
    is_paused: bool = False
    states: SavedStates | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """A request, its prompt and all of its output.

    Fields:
        message: a `GenerateReq` without its prompt, as msgpack.
        tokens: prompt and output tokens. prompt_len: length of the prompt.
        end: type of the finish, after `end_len` output tokens, or None if unfinished.
            is_own: whether the request ended by itself, rather than by its client.
        waits_for_grammar: whether it was queued later than it arrived, waiting for its
            grammar.
    """

    serial: int
    rid: str
    message: bytes
    tokens: IntArray
    prompt_len: int
    end: str | None = None
    end_len: int = 0
    is_own: bool = False
    waits_for_grammar: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedLaunch:
    """A launched batch.

    Fields:
        clocks: number of its first forward in each pool.
        serials: serials of its rows. starts, ends: tokens with KV before and after it.
        taken, given: pages taken and given back since the previous launch.
    """

    mode: str
    clocks: list[int]
    serials: IntArray
    starts: IntArray
    ends: IntArray
    taken: IntArray
    given: IntArray


@dataclass(frozen=True, kw_only=True)
class RecordedRound:
    """A round of the scheduler.

    Fields:
        resolves: whether it began by processing the results in flight.
        events: (kind, value) in order: "arrive" and "ready" with a serial, "abort" with
            a request id, "abort_all", "flush", "pause" with a mode, "continue".
        launches: at most one launch.
        shape: as in `StepInput`; None in records of versions without it.
    """

    resolves: bool = False
    events: list[tuple[str, int | str]] = field(default_factory=list)
    launches: list[RecordedLaunch] = field(default_factory=list)
    shape: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecordFile:
    """The steps of an engine from `checkpoint`, or from its start if None.

    Fields:
        obstacle: why it cannot be replayed, or None if it can.
        armed: faults requested from the faults' room by pool, as plain data.
    """

    origin: Origin
    checkpoint: Checkpoint | None
    requests: list[RecordedRequest]
    rounds: list[RecordedRound]
    armed: list[list[dict[str, Any]]]
    obstacle: str | None = None
    format: int = FORMAT

    @property
    def num_launches(self) -> int:
        return sum(len(round_.launches) for round_ in self.rounds)


def encode_record(record: RecordFile) -> bytes:
    document = msgspec.msgpack.encode(record, enc_hook=_array_bytes)
    packed = zlib.compress(document, 1)
    return _MAGIC + hashlib.sha256(packed).digest() + packed


def read_record(path: Path) -> RecordFile:
    """Read a file written by `encode_record`.

    Raises:
        BadRecord: the file cannot be read, is not a record, is truncated or damaged, or
            has another format version.
    """
    try:
        if path.exists() and not path.is_file():
            raise BadRecord(f"{path}: not a regular file")
        data = path.read_bytes()
    except OSError as error:
        raise BadRecord(f"{path}: cannot be read: {error}") from error
    return decode_record(data, name=str(path))


def decode_record(data: bytes, *, name: str) -> RecordFile:
    """Decode the record in `data`; see `read_record`."""
    head = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        raise BadRecord(f"{name}: not a record of the KV canary")
    packed = data[head:]
    if hashlib.sha256(packed).digest() != data[len(_MAGIC) : head]:
        raise BadRecord(f"{name}: truncated or damaged")
    unpacker = zlib.decompressobj()
    try:
        document = unpacker.decompress(packed, MAX_BYTES)
        if unpacker.unconsumed_tail:
            raise BadRecord(f"{name}: larger than {MAX_BYTES} bytes unpacked")
        found = msgspec.msgpack.decode(document, type=_Formatted)
        if found.format != FORMAT:
            raise BadRecord(
                f"{name}: format {found.format}, but this version reads {FORMAT}"
            )
        return msgspec.msgpack.decode(document, type=RecordFile, dec_hook=_array)
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise BadRecord(f"{name}: not a record of this version: {error}") from error


class _Formatted(msgspec.Struct):
    format: int


def _array_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype="<i8").tobytes()
    raise NotImplementedError(f"{type(value).__name__} in a record")


def _array(type_: Any, value: Any) -> Any:
    if not isinstance(value, bytes) or len(value) % 8:
        raise ValueError("no array of int64")
    return np.frombuffer(value, dtype="<i8").astype(np.int64)

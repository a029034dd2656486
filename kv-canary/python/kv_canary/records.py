"""Words of the canary's records, ring and counters, and the lineage hash.

The torch reference and the Triton kernels import these words, and
`scripts/generate_canary_header.py` writes them as a header for the C++ ops. `checks.py`
has the reasons. Imports no torch.

A record is four int64 words (`Record`):
    0  token (low 32 bits) and position (high 32); -1: poison
    1  lineage of the row up to and including this token
    2  fingerprint of the slot's bytes: K (low 32 bits), V (high 32), or 0 if sums are
       kept instead (`Fingerprint.sums`); in `head` 0, or the last forward in which
       attention found that they had changed
    3  forward counter (36 bits, high), writer kind (4), request serial mod 2^24 (24)
Poisoning changes only words 0 and 3. Word 3 keeps the serial of the last owner and
takes the counter of the freeing forward and the kind POISON. Words 1 and 2 stay, so
that a report can still say whose history lay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kv_canary.hashing import MASK64, mix64, mix64_array, mix64_int, to_signed64

if TYPE_CHECKING:
    from torch import Tensor

POISON_WORD = -1
HALF_BITS = 32
TOKEN_MASK = (1 << HALF_BITS) - 1
SERIAL_BITS = 24
SERIAL_MASK = (1 << SERIAL_BITS) - 1
KIND_MASK = 15
CLOCK_SHIFT = 28
CLOCK_MASK = (1 << 36) - 1
# Keeps an unsalted term from being a plain hash of the packed token.
SALT_KEY = 0x5EEDCA11AB1E0B0E
FIRST_CLOCK = 1
# Tokens whose lineages are computed in one pass: a few such arrays fit a cache.
HASHED_AT_ONCE = 1 << 14
# In the high half of the fingerprints that attention reports: a head, below its layer.
PLACE_LAYER_SHIFT = 16
NO_HEAD = (1 << PLACE_LAYER_SHIFT) - 1
"""The head of a place that is a whole layer."""
TAG_LAUNCH_MASK = 255
TAG_MANAGER_SHIFT = 8
TAG_MANAGER_MASK = 255
TAG_POOL_SHIFT = 16


class Record(IntEnum):
    """Words of a record."""

    WORD0 = 0
    LINEAGE = 1
    FINGERPRINT = 2
    WORD3 = 3


RECORD_WORDS = len(Record)


class Request(IntEnum):
    """Words about the request in a row of the request table; -1 if unknown. NEXT_WORD0
    is word 0 of the row's next new token: the host's at prefill, later the one that the
    sampler drew."""

    SERIAL = 0
    NEXT_WORD0 = 1


class Expected(IntEnum):
    """Rows that the host announces about request rows before a prefill."""

    LINEAGE = 0
    SEED = 1
    SERIAL = 2


UNKNOWN = -1
"""An unknown word of `Request`."""

NOBODY = -2
"""The announced serial of a row that no request may write."""

SENTINEL = to_signed64(0xFFA5FFA5FFA5FFA5)
"""Fills the bytes of new slots before the model runs if all bytes are covered. In every
float format except 8-bit ones these words are NaN, which no model computes."""


class WriterKind(IntEnum):
    """Who wrote a record; four bits of word 3."""

    NONE = 0
    EXTEND = 1
    DECODE = 2
    VERIFY = 3
    DRAFT = 4
    DRAFT_EXTEND = 5
    MOVE = 6
    TRANSFER = 7
    POISON = 15


class Phase(IntEnum):
    """The last launch of a forward manager."""

    IDLE = 0
    AFTER_VERIFY = 1
    AFTER_HEAD = 2


class Launch(IntEnum):
    """The launch that wrote a ring entry; low byte of the tag."""

    VERIFY = 0
    HEAD = 1
    TAIL = 2
    SWEEP = 3
    ACCEPT = 4
    RESULT = 5
    CARRIED = 6
    ATTENTION = 7
    IDLE = 8
    DRAWN = 9
    TIER = 10


class Ring(IntEnum):
    """Columns of a ring entry. Columns that do not apply to a reason are 0, slots -1.

    EXPECTED_WORD0 has all ones in its token half if the token is unknown.
    EXPECTED_SLOT is the slot of the row's columns, or -1 if unknown.
    Fingerprints of ATTENTION hold a sum of the bytes of a head, or of a layer, and, in
    the high half, layer and head (`unpack_place`).
    TAG comes from `ring_tag`.
    An entry of DRAWN with GRAMMAR_MASK has the words of the mask row in the WORD0
    columns, serial and tokens accepted. LOGITS_ROW has sums of rows as lineages.
    An entry of TIER is about a unit that the host compared, whose first slot it names.
    A PHASE entry has the due phase in EXPECTED_WORD0, the phase found in FOUND_WORD0,
    and -1 as SLOT, POSITION and BATCH_ROW.
    """

    REASONS = 0
    REQ_ROW = 1
    SERIAL = 2
    SLOT = 3
    POSITION = 4
    EXPECTED_WORD0 = 5
    FOUND_WORD0 = 6
    EXPECTED_LINEAGE = 7
    FOUND_LINEAGE = 8
    FOUND_WORD3 = 9
    CLOCK = 10
    BATCH_ROW = 11
    EXPECTED_SLOT = 12
    FOUND_FINGERPRINT = 13
    COMPUTED_FINGERPRINT = 14
    TAG = 15


RING_WORDS = len(Ring)


def ring_tag(launch: Launch, manager: int, pool: int) -> int:
    """Return launch | manager << 8 | pool << 16, with 255 for no manager."""
    manager &= TAG_MANAGER_MASK
    return launch | manager << TAG_MANAGER_SHIFT | pool << TAG_POOL_SHIFT


class Counter(IntEnum):
    """Indices of `CanaryState.counters`, which only ever grow.

    VERIFIED_SLOTS counts the prefix elements that were visited, whatever their slot.
    REHASHED_SLOTS counts elements whose bytes were compared whole or, if layers take
    turns, in the layer whose turn it was. Sweeps have their own counters.
    """

    VERIFIED_SLOTS = 0
    REHASHED_SLOTS = 1
    HEAD_SLOTS = 2
    TAIL_SLOTS = 3
    VERIFY_LAUNCHES = 4
    HEAD_LAUNCHES = 5
    TAIL_LAUNCHES = 6
    SWEPT_SLOTS = 7
    SWEEP_LAUNCHES = 8


NUM_COUNTERS = len(Counter)


def pack_word0(token: int, position: int) -> int:
    return to_signed64(((position << 32) | (token & TOKEN_MASK)) & MASK64)


def unpack_word0(word: int) -> tuple[int, int]:
    """Return (token, position); the token is unsigned."""
    return word & TOKEN_MASK, word >> 32


def pack_word3(clock: int, kind: int, serial: int) -> int:
    word = (clock & CLOCK_MASK) << CLOCK_SHIFT
    return to_signed64(
        word | ((kind & KIND_MASK) << SERIAL_BITS) | serial & SERIAL_MASK
    )


class Provenance(NamedTuple):
    """The parts of word 3; `serial` is the request's serial modulo 2^24."""

    clock: int
    kind: WriterKind | int
    serial: int


def unpack_word3(word: int) -> Provenance:
    kind: WriterKind | int = (word >> SERIAL_BITS) & KIND_MASK
    if kind in WriterKind._value2member_map_:
        kind = WriterKind(kind)
    return Provenance((word >> CLOCK_SHIFT) & CLOCK_MASK, kind, word & SERIAL_MASK)


def pack_place(layer: int, head: int) -> int:
    """Return the high half of a fingerprint that names a layer and head."""
    return (layer << PLACE_LAYER_SHIFT | head) << HALF_BITS


def unpack_place(fingerprint: int) -> tuple[int, int]:
    """Return (layer, KV head) of a fingerprint that attention reports. The head is
    `NO_HEAD` if whole layers were compared."""
    place = fingerprint >> HALF_BITS
    return place >> PLACE_LAYER_SHIFT, place & ((1 << PLACE_LAYER_SHIFT) - 1)


def salt_key(salt: int) -> int:
    """Return a salt's part of every term."""
    return mix64_int(salt ^ SALT_KEY)


def lineage_term(token: int, position: int, salt: int) -> int:
    """mix64(mix64(token | position << 32) ^ mix64(salt ^ SALT_KEY)), signed."""
    return mix64_int(mix64_int(pack_word0(token, position)) ^ salt_key(salt))


def draft_seed(first_token: int, salt: int) -> int:
    """Return the lineage before position 0 of a draft pool, whose slot p holds token
    p + 1."""
    return lineage_term(first_token, -1, salt)


def extend_lineage(
    previous: int,
    tokens: list[int] | npt.NDArray[np.int64],
    *,
    start_position: int,
    salt: int,
) -> int:
    """Return the signed lineage after `tokens` at consecutive positions from
    `start_position` on."""
    values = np.asarray(tokens, dtype=np.int64)
    positions = np.arange(start_position, start_position + len(values), dtype=np.int64)
    terms = _terms(values, positions, np.uint64(salt_key(salt) & MASK64))
    return to_signed64((previous + int(terms.sum(dtype=np.uint64))) & MASK64)


def _terms(
    tokens: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64] | np.uint64,
) -> npt.NDArray[np.uint64]:
    """Return `lineage_term` of each token; `keys`: keys of their salts."""
    words = (tokens & TOKEN_MASK) | (positions << HALF_BITS)
    mixed = mix64_array(words.view(np.uint64))
    mixed ^= keys
    return mix64_array(mixed)


class TokenRun(NamedTuple):
    """Tokens at consecutive positions from `start_position` on, int64, and the lineage
    before them."""

    previous: int
    tokens: npt.NDArray[np.int64]
    start_position: int
    salt: int


def extend_lineages(runs: Sequence[TokenRun]) -> list[int]:
    """Return the signed lineages after each run. Short runs are hashed together,
    because the calls for a run of a thousand tokens cost as much as its tokens."""
    found: list[int] = []
    begin = size = 0
    for end, run in enumerate(runs):
        if size and size + len(run.tokens) > HASHED_AT_ONCE:
            found += _extend_lineages(runs[begin:end])
            begin, size = end, 0
        size += len(run.tokens)
    return found + _extend_lineages(runs[begin:])


def _extend_lineages(runs: Sequence[TokenRun]) -> list[int]:
    if len(runs) < 2:
        return [
            extend_lineage(
                run.previous,
                run.tokens,
                start_position=run.start_position,
                salt=run.salt,
            )
            for run in runs
        ]
    lens = np.array([len(run.tokens) for run in runs])
    ends = np.cumsum(lens)
    begins = ends - lens
    positions = np.arange(int(ends[-1]))
    positions += np.repeat([run.start_position for run in runs] - begins, lens)
    keys = np.array([salt_key(run.salt) for run in runs]).view(np.uint64)
    tokens = np.concatenate([run.tokens for run in runs])
    # Sums of all terms so far wrap around, and so do their differences.
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum(_terms(tokens, positions, np.repeat(keys, lens)), out=sums[1:])
    gained = (sums[ends] - sums[begins]).tolist()
    return [
        to_signed64((run.previous + more) & MASK64)
        for run, more in zip(runs, gained, strict=True)
    ]


def request_lineage(tokens: list[int] | npt.NDArray[np.int64], salt: int) -> int:
    """Return the lineage of a request with these tokens at positions 0, 1, ..."""
    return extend_lineage(0, tokens, start_position=0, salt=salt)


def prefix_lineages(
    tokens: npt.NDArray[np.int64], *, salt: int, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Return the signed lineages after each of these tokens at positions 0, 1, ...;
    `seed` is the lineage before the first."""
    positions = np.arange(len(tokens), dtype=np.int64)
    terms = _terms(tokens, positions, np.uint64(salt_key(salt) & MASK64))
    sums = np.cumsum(terms, dtype=np.uint64) + np.uint64(seed & MASK64)
    signed: npt.NDArray[np.int64] = sums.view(np.int64)
    return signed


def pack_word0_tensor(tokens: Tensor, positions: Tensor) -> Tensor:
    return (positions << 32) | (tokens & TOKEN_MASK)


def lineage_terms(tokens: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
    """Return `lineage_term` of int64 tensors that broadcast."""
    words = pack_word0_tensor(tokens, positions)
    return mix64(mix64(words) ^ mix64(salts ^ SALT_KEY))


def pack_word3_tensor(clock: Tensor, kind: int, serials: Tensor) -> Tensor:
    low = (kind << SERIAL_BITS) | (serials & SERIAL_MASK)
    return (clock << CLOCK_SHIFT) | low


def fingerprint_keys(layers: Tensor, indices: Tensor) -> Tensor:
    """Return keys that tell the words of a slot apart: mix64(layer << 32 | index)."""
    return mix64((layers << 32) | indices)


def sample_place(
    lineages: Tensor, *, layers: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """Return the (layer, 16-byte chunk) that `partial` covers of slots with these
    lineages."""
    spread = mix64(lineages)
    low, high = spread & TOKEN_MASK, (spread >> 32) & TOKEN_MASK
    return (low * layers) >> 32, (high * chunks) >> 32

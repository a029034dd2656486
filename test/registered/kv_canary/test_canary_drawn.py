"""Whose logits gave whose token, on every implementation that runs here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from canary_world import (
    DEVICE,
    REQ_ROWS,
    Backend,
    backends,
    each_backend,
    entries,
    long,
)
from drawn_world import (
    KINDS,
    PADDING,
    Kind,
    Shape,
    announced,
    copied,
    draw,
    float_word,
    set_word,
)

from kv_canary.checks import Reason
from kv_canary.drawn import (
    MASK_WORDS,
    DrawnTokens,
    MaskWord,
    Sampling,
    SamplingFlag,
    noise_key,
    uniform,
)
from kv_canary.findings import RING, STATUS_WORDS
from kv_canary.records import UNKNOWN, Launch, Ring, pack_word0
from kv_canary.state import CanaryState, create_state
from sglang.srt.sampling.ops import noise
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.scale import count, is_full

register_cpu_ci(est_time=50, suite="cpu", full_time=400)
register_cuda_ci(est_time=60, suite="cuda")

GROUPS = {
    "plain": [KINDS["greedy"], PADDING, KINDS["greedy"], KINDS["greedy"]],
    "drawn": [KINDS[name] for name in ("drawn", "cold", "greedy", "drawn")],
    "filtered": [
        *(KINDS[name] for name in ("top k", "top p", "min p")),
        PADDING,
        *(KINDS[name] for name in ("filters", "drawn", "greedy")),
    ],
    "edited": [
        KINDS[name] for name in ("bias", "greedy bias", "penalties", "young", "drawn")
    ],
    "grammars": [
        *(KINDS[name] for name in ("grammar", "drawn grammar", "filtered grammar")),
        *(KINDS[name] for name in ("penal grammar", "drawn", "greedy")),
    ],
}
SHAPES = [
    Shape(vocab=1, width=5),
    Shape(vocab=31, width=1, dtype=torch.bfloat16),
    Shape(vocab=33, width=5, dtype=torch.float16, is_strided=True),
    Shape(vocab=1000, width=1, is_strided=True),
    Shape(vocab=1000, width=5, dtype=torch.bfloat16, hidden=1090),
    Shape(vocab=2700, width=1, spread=0.1),
]
WIDE = Shape(vocab=1000, spread=1.0)
each_group = pytest.mark.parametrize("kinds", GROUPS.values(), ids=GROUPS)


def check(
    backend: Backend, drawn: DrawnTokens, findings: torch.Tensor | None = None
) -> CanaryState:
    """A new state after the check."""
    state = create_state(
        num_slots=8,
        req_rows=REQ_ROWS,
        ring_capacity=256,
        num_managers=1,
        device=DEVICE,
    )
    backend.launch.check_drawn(state, drawn, findings)
    return state


def found(state: CanaryState) -> dict[int, Reason]:
    """The reasons of each row of the batch."""
    rows: dict[int, Reason] = {}
    for entry in entries(state):
        row = entry[Ring.BATCH_ROW]
        rows[row] = rows.get(row, Reason(0)) | Reason(entry[Ring.REASONS])
    return rows


def test_noise_is_the_samplers() -> None:
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (1000,))
    positions = torch.randint(0, 1 << 20, (1000,))
    assert torch.equal(uniform(keys, positions), noise.uniform(keys, positions))
    for seed in (0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 64, *keys[:50].tolist()):
        assert noise_key(seed) == noise.mix_seed(seed)


# -- silence -------------------------------------------------------------------


@each_backend
@each_group
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drawn_tokens_are_sound(
    backend: Backend, kinds: list[Kind], shape: Shape
) -> None:
    assert found(check(backend, draw(kinds, shape))) == {}


@each_backend
@each_group
def test_thousands_of_draws_are_sound(backend: Backend, kinds: list[Kind]) -> None:
    many = 600 if backend.name == "native" or DEVICE == "cuda" else 60
    for seed in range(count(ci=many // 20, full=many)):
        shape = Shape(
            vocab=[1, 2, 40, 129, 700][seed % 5],
            width=1 + seed % 3,
            dtype=[torch.float32, torch.bfloat16, torch.float16][seed % 3],
            spread=[0.01, 0.3, 1.0, 3.0, 20.0][seed // 5 % 5],
        )
        assert found(check(backend, draw(kinds, shape, seed=seed))) == {}, seed


@each_backend
def test_what_is_optional_may_be_missing(backend: Backend) -> None:
    """Row i by default, and nothing is compared with what is not given."""
    drawn = draw(GROUPS["drawn"], WIDE)
    assert drawn.logits_rows is not None
    at = drawn.logits_rows
    plain = replace(
        drawn,
        **dict.fromkeys(("logits_rows", "inputs", "hidden_ends", "kept")),
        logits=drawn.logits[at].contiguous(),
        masks=None,
    )
    assert found(check(backend, plain)) == {}
    assert drawn.inputs is not None
    rows = drawn.inputs[at].contiguous()
    assert found(check(backend, replace(plain, inputs=rows, hidden=None))) == {}
    assert found(check(backend, replace(plain, inputs=rows, hidden=rows))) == {}
    none = replace(drawn, **{name: long([]) for name in ("req_rows", "serials")})
    empty = {"prefix_lens": long([]), "extend_lens": long([]), "tokens": long([])}
    none = replace(none, **empty, logits_rows=None, hidden_ends=None)
    assert found(check(backend, none)) == {}


@each_backend
def test_rows_that_are_left_out_or_padded(backend: Backend) -> None:
    """Whatever they hold: padding, tokens that were not drawn, rows without logits."""
    drawn = draw(GROUPS["filtered"], replace(WIDE, width=2))
    drawn.logits.fill_(torch.nan)
    drawn.req_rows[:2] = 0
    drawn.tokens[4:8] = -1
    assert drawn.logits_rows is not None
    drawn.logits_rows[8:] = -1
    assert found(check(backend, drawn)) == {}


@each_backend
def test_equal_logits_are_all_the_best(backend: Backend) -> None:
    drawn = draw(GROUPS["plain"], Shape(vocab=40))
    drawn.logits.fill_(0.25)
    for token in (0, 17, 39):
        drawn.tokens.fill_(token)
        assert found(check(backend, drawn)) == {}


@each_backend
def test_a_token_that_is_not_drawn_by_position(backend: Backend) -> None:
    """`draws` leaves out the choice, and nothing else."""
    drawn = draw(GROUPS["grammars"], WIDE)
    drawn.tokens[4] = (drawn.tokens[4] + 500) % 1000
    other = replace(drawn, draws=False)
    assert found(check(backend, other)) == {}
    assert found(check(backend, drawn)) == {4: Reason.SAMPLED_TOKEN}
    assert other.logits_rows is not None
    other.logits[other.logits_rows[5], 3] = torch.nan
    _old_mask(other)
    _unannounced(other)
    assert found(check(backend, other)) == {
        1: Reason.GRAMMAR_MASK,
        2: Reason.SAMPLED_TOKEN,
        5: Reason.LOGITS_NOT_FINITE,
    }


@each_backend
def test_a_grammar_that_failed(backend: Backend) -> None:
    """Its token is not looked at; what the head read is."""
    drawn = draw(GROUPS["grammars"], WIDE)
    at = _at(drawn, 1)
    _mask(drawn, 1)[MaskWord.ACCEPTED - MASK_WORDS] = -1
    drawn.tokens[1] = 2_000
    drawn.logits[at] = torch.nan
    assert found(check(backend, drawn)) == {}
    assert drawn.inputs is not None
    drawn.inputs[at, 0] += 1
    assert found(check(backend, drawn)) == {1: Reason.LOGITS_ROW}
    # A failed mask of another request excuses nothing.
    _mask(drawn, 1)[MaskWord.SERIAL - MASK_WORDS] += 1
    assert found(check(backend, drawn))[1] & Reason.GRAMMAR_MASK


# -- faults ---------------------------------------------------------------------


def _at(drawn: DrawnTokens, row: int) -> int:
    assert drawn.logits_rows is not None
    return int(drawn.logits_rows[row * drawn.width])


def _mask(drawn: DrawnTokens, row: int) -> torch.Tensor:
    assert drawn.masks is not None
    return drawn.masks[_at(drawn, row)]


def _swap(t: torch.Tensor | None, a: int, b: int) -> None:
    assert t is not None
    t[[a, b]] = t[[b, a]]


def _other_hidden(d: DrawnTokens) -> None:
    _swap(d.inputs, _at(d, 0), _at(d, 1))


def _last_hidden(d: DrawnTokens) -> None:
    assert d.hidden_ends is not None
    d.hidden_ends[1] = d.hidden_ends[3]


def _no_hidden(d: DrawnTokens) -> None:
    assert d.hidden is not None and d.hidden_ends is not None
    d.hidden_ends[0] = 0
    d.hidden_ends[1] = len(d.hidden) + 1


def _no_logits(d: DrawnTokens) -> None:
    assert d.logits_rows is not None
    d.logits_rows[1] = len(d.logits)


def _other_logits(d: DrawnTokens) -> None:
    _swap(d.logits, _at(d, 0), _at(d, 1))


def _other_parameters(d: DrawnTokens) -> None:
    _swap(d.sampling, int(d.req_rows[1]), int(d.req_rows[2]))


def _unannounced(d: DrawnTokens) -> None:
    announced(d, 2).fill_(UNKNOWN)


def _other_seed(d: DrawnTokens) -> None:
    announced(d, 0)[Sampling.KEY] += 1
    announced(d, 3)[Sampling.KEY] ^= 1 << 40


def _other_temperature(d: DrawnTokens) -> None:
    set_word(d, 1, Sampling.TEMPERATURE, float_word(5.0))


def _not_greedy(d: DrawnTokens) -> None:
    announced(d, 2)[Sampling.FLAGS] ^= SamplingFlag.GREEDY


def _late_draw(d: DrawnTokens) -> None:
    d.prefix_lens[0] += 1
    d.extend_lens[3] -= 1


def _no_id(d: DrawnTokens) -> None:
    d.tokens[1] = d.logits.shape[1]


def _nan(d: DrawnTokens) -> None:
    d.logits[_at(d, 0), -1] = torch.nan
    d.logits[_at(d, 2), 0] = torch.nan


def _inf(d: DrawnTokens) -> None:
    d.logits[_at(d, 1), 7] = torch.inf
    d.logits[_at(d, 2), int(d.tokens[2])] = torch.inf


def _no_value(d: DrawnTokens) -> None:
    d.logits[_at(d, 0), int(d.tokens[0])] = -torch.inf


def _fewer_ids(d: DrawnTokens) -> None:
    """Row 0 draws from its 5 best; the token's rank is found first."""
    values = d.logits[_at(d, 0)]
    d.tokens[0] = int(values.argsort(descending=True)[5])


def _less_mass(d: DrawnTokens) -> None:
    set_word(d, 1, Sampling.TOP_P, float_word(1e-4))
    d.tokens[1] = int(d.logits[_at(d, 1)].argsort(descending=True)[1])


def _higher_floor(d: DrawnTokens) -> None:
    set_word(d, 2, Sampling.MIN_P, float_word(0.999))
    d.tokens[2] = int(d.logits[_at(d, 2)].argsort(descending=True)[1])


def _not_kept(d: DrawnTokens) -> None:
    assert d.kept is not None
    d.kept[_at(d, 0), int(d.tokens[0])] = 0
    d.kept[_at(d, 4)] = d.kept[_at(d, 4)].flip(0)


def _kept(d: DrawnTokens, row: int) -> torch.Tensor:
    assert d.kept is not None
    return d.kept[_at(d, row)]


def _keeps_more(d: DrawnTokens) -> None:
    """Each row keeps the best id that its filter removed."""
    for row in (0, 1, 2, 4):
        kept = _kept(d, row)
        logits = d.logits[_at(d, row)].float()
        temperature = announced(d, row)[Sampling.TEMPERATURE].int().view(torch.float32)
        right = (logits / temperature).softmax(dim=0)
        removed = int(right.masked_fill(kept > 0, 0).argmax())
        kept[removed] = right[removed]


def _keeps_less(d: DrawnTokens) -> None:
    """Each row loses ids that its filter kept."""
    for row in (0, 1, 2, 4):
        kept = _kept(d, row)
        own = float(kept[d.tokens[row]])
        kept[(kept < 2 * kept[kept > 0].min()) & (kept < own)] = 0


def _keeps_other_shares(d: DrawnTokens) -> None:
    for row in (0, 1):
        kept = _kept(d, row)
        worst = int(kept.masked_fill(kept == 0, 2.0).argmin())
        kept[worst] *= 1 + 2.0**-9


def _edit(d: DrawnTokens, row: int) -> torch.Tensor:
    assert d.edited is not None and d.edited_rows is not None
    return d.edited[int(d.edited_rows[row * d.width])]


def _other_edit(d: DrawnTokens) -> None:
    best = _edit(d, 1)
    best[(int(d.tokens[1]) + 1) % len(best)] = 1e3
    _edit(d, 0).copy_(_edit(d, 0).flip(0))


def _edit_with_nan(d: DrawnTokens) -> None:
    _edit(d, 1)[3] = torch.nan
    _edit(d, 2)[3] = torch.nan


def _no_edit(d: DrawnTokens) -> None:
    assert d.edited is not None and d.edited_rows is not None
    d.edited_rows[0] = -1
    d.edited_rows[2] = len(d.edited)


def _other_mask(d: DrawnTokens) -> None:
    _swap(d.masks, _at(d, 0), _at(d, 1))


def _old_mask(d: DrawnTokens) -> None:
    _mask(d, 1)[MaskWord.ACCEPTED - MASK_WORDS] -= 1


def _mask_of_none(d: DrawnTokens) -> None:
    _mask(d, 1)[MaskWord.SERIAL - MASK_WORDS] = 0
    _mask(d, 4)[MaskWord.SERIAL - MASK_WORDS] = 9


def _forbidden(d: DrawnTokens) -> None:
    for row in (0, 3):
        token = int(d.tokens[row])
        clear = ~(1 << token % 32)
        word = int(_mask(d, row)[token // 32]) & clear
        _mask(d, row)[token // 32] = word + (1 << 32) if word < -(1 << 31) else word


def _forbidden_nan(d: DrawnTokens) -> None:
    _forbidden(d)
    d.logits[_at(d, 3), int(d.tokens[3])] = torch.nan


S, G = Reason.SAMPLED_TOKEN, Reason.GRAMMAR_MASK
WILD, HEAD = Reason.LOGITS_NOT_FINITE, Reason.LOGITS_ROW
FAULTS: list[tuple[str, Callable[[DrawnTokens], None], dict[int, Reason]]] = [
    ("drawn", _other_hidden, {0: HEAD, 1: HEAD}),
    ("drawn", _last_hidden, {1: HEAD}),
    ("drawn", _no_hidden, {0: HEAD, 1: HEAD}),
    ("drawn", _no_logits, {1: HEAD}),
    ("drawn", _other_logits, {0: S, 1: S}),
    ("drawn", _other_parameters, {1: S, 2: S}),
    ("drawn", _unannounced, {2: S}),
    ("drawn", _other_seed, {0: S, 3: S}),
    ("drawn", _other_temperature, {1: S}),
    ("drawn", _not_greedy, {2: S}),
    ("drawn", _late_draw, {0: S, 3: S}),
    ("drawn", _no_id, {1: S}),
    ("drawn", _nan, {0: WILD, 2: WILD}),
    ("drawn", _inf, {1: WILD, 2: WILD}),
    ("drawn", _no_value, {0: WILD}),
    ("plain", _other_logits, {0: S}),
    ("filtered", _fewer_ids, {0: S}),
    ("filtered", _less_mass, {1: S}),
    ("filtered", _higher_floor, {2: S}),
    ("filtered", _not_kept, {0: S, 4: S}),
    ("filtered", _keeps_more, {0: S, 1: S, 2: S, 4: S}),
    ("filtered", _keeps_less, {0: S, 1: S, 2: S, 4: S}),
    ("filtered", _keeps_other_shares, {0: S, 1: S}),
    ("filtered", _nan, {0: WILD, 2: WILD}),
    ("edited", _other_edit, {0: S, 1: S}),
    ("edited", _edit_with_nan, {1: S, 2: S}),
    ("edited", _no_edit, {0: S, 2: S}),
    ("edited", _nan, {0: WILD, 2: WILD}),
    ("grammars", _other_mask, {0: G, 1: G}),
    ("grammars", _old_mask, {1: G}),
    ("grammars", _mask_of_none, {1: G, 4: G}),
    ("grammars", _forbidden, {0: G, 3: G}),
    ("grammars", _forbidden_nan, {0: G, 3: WILD}),
]
each_fault = pytest.mark.parametrize(
    ("group", "fault", "due"), FAULTS, ids=lambda v: getattr(v, "__name__", None)
)


@each_backend
@each_fault
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fault_is_named(
    backend: Backend,
    group: str,
    fault: Callable[[DrawnTokens], None],
    due: dict[int, Reason],
    dtype: torch.dtype,
) -> None:
    """By its reason, and no row beside it is."""
    drawn = draw(GROUPS[group], replace(WIDE, dtype=dtype))
    fault(drawn)
    state = check(backend, drawn)
    rows = found(state)
    assert rows.keys() == due.keys()
    assert all(rows[row] & reason for row, reason in due.items()), rows
    verdicts = {r: int(state.verdict[drawn.req_rows[r]]) for r in rows}
    assert verdicts == rows and int(state.verdict.ne(0).sum()) == len(rows)


@each_backend
@pytest.mark.parametrize("name", ["kept", "edited", "masks"])
def test_what_is_needed_and_missing(backend: Backend, name: str) -> None:
    group, rows, reason = {
        "kept": ("filtered", (0, 1, 2, 4), S),
        "edited": ("edited", (0, 1, 2, 3), S),
        "masks": ("grammars", (0, 1, 2, 3), G),
    }[name]
    names = (name, "edited_rows") if name == "edited" else (name,)
    missing = replace(draw(GROUPS[group], WIDE), **dict.fromkeys(names))
    by_row = found(check(backend, missing))
    assert by_row.keys() == set(rows)
    assert all(found & reason for found in by_row.values())


# -- entries --------------------------------------------------------------------


@each_backend
def test_an_entry_says_what_was_due(backend: Backend) -> None:
    drawn = draw(GROUPS["grammars"], replace(WIDE, width=2))
    due = copied(drawn)
    assert drawn.inputs is not None and drawn.logits_rows is not None
    drawn.inputs[drawn.logits_rows[3], 0] += 1
    drawn.tokens[9] = (drawn.tokens[9] + 500) % 1000
    _old_mask(drawn)
    state = check(backend, drawn)
    starts = (due.prefix_lens + due.extend_lens).tolist()
    mask, row, token = (
        next(e for e in entries(state) if e[Ring.REASONS] & reason)
        for reason in (G, HEAD, S)
    )
    for entry, r, position in (
        (mask, 1, starts[1]),
        (row, 1, starts[1] + 1),
        (token, 4, starts[4] + 1),
    ):
        assert entry[Ring.BATCH_ROW] == r and entry[Ring.POSITION] == position
        assert entry[Ring.REQ_ROW] == int(due.req_rows[r])
        assert entry[Ring.SERIAL] == int(due.serials[r])
        assert entry[Ring.SLOT] == entry[Ring.EXPECTED_SLOT] == -1
        assert entry[Ring.TAG] & 255 == Launch.DRAWN
        assert entry[Ring.CLOCK] == int(state.clock) - 1
    serial = int(due.serials[1]) & ((1 << 31) - 1)
    gained = starts[1] - int(announced(due, 1)[Sampling.PROMPT_LEN])
    assert mask[Ring.EXPECTED_WORD0] == pack_word0(serial, gained)
    assert mask[Ring.FOUND_WORD0] == pack_word0(serial, gained - 1)
    assert row[Ring.EXPECTED_LINEAGE] != row[Ring.FOUND_LINEAGE]
    assert token[Ring.EXPECTED_WORD0] == pack_word0(-1, starts[4] + 1)
    assert token[Ring.FOUND_WORD0] == pack_word0(int(drawn.tokens[9]), starts[4] + 1)
    assert token[Ring.EXPECTED_LINEAGE] == token[Ring.FOUND_LINEAGE] == 0


@each_backend
def test_findings_take_the_verdicts(backend: Backend) -> None:
    """And the next gather does not tell them again."""
    drawn = draw(GROUPS["drawn"], WIDE)
    _unannounced(drawn)
    findings = long([5] * RING + [0] + [0, 0, 1, 0])
    state = check(backend, drawn, findings)
    assert findings[:RING].tolist() == [5] * RING
    assert findings[RING:].tolist() == [1, 0, 0, 1 | Reason.SAMPLED_TOKEN, 0]
    assert not state.verdict.any() and int(state.ring_count) == 1
    findings[RING] = 7
    backend.launch.check_drawn(state, drawn, findings)
    assert int(findings[RING]) == 7 and int(state.ring_count) == 2
    sound = long([0] * (STATUS_WORDS + 4))
    backend.launch.check_drawn(state, draw(GROUPS["drawn"], WIDE), sound)
    assert not sound.any()


# -- implementations ------------------------------------------------------------


def damaged() -> Iterator[DrawnTokens]:
    """Batches of every shape and kind with several faults at once."""
    for number, shape in enumerate(SHAPES):
        for kinds in GROUPS.values():
            drawn = draw(kinds, shape, seed=number)
            rng = torch.Generator().manual_seed(number)
            drawn.tokens[0] = (drawn.tokens[0] + 1) % shape.vocab
            drawn.tokens[-1] = -1
            drawn.logits[_at(drawn, 1), shape.vocab // 2] = torch.nan
            assert drawn.inputs is not None and drawn.masks is not None
            drawn.inputs[_at(drawn, 0), -1] += 1
            drawn.masks[_at(drawn, 2), MaskWord.ACCEPTED - MASK_WORDS] += 1
            flips = torch.randint(0, 2, drawn.tokens.shape, generator=rng)
            drawn.tokens.add_(flips.to(DEVICE))
            drawn.prefix_lens[3] += 1
            yield drawn


@pytest.mark.parametrize("backend", backends()[1:], ids=lambda b: b.name)
@pytest.mark.parametrize("with_findings", [False, True])
def test_findings_are_those_of_the_reference(
    backend: Backend, with_findings: bool
) -> None:
    batches = list(damaged())
    if not is_full():  # Every other one with findings, the others without.
        batches = batches[with_findings::2]
    for drawn in batches:
        rows = STATUS_WORDS + drawn.num_rows
        due, own = (long([0] * rows) if with_findings else None for _ in range(2))
        expected = check(backends()[0], drawn, due)
        state = check(backend, drawn, own)
        assert entries(state) == entries(expected)
        assert torch.equal(state.verdict, expected.verdict)
        assert due is None or (own is not None and torch.equal(due, own))


@pytest.mark.skipif(DEVICE == "cuda", reason="native kernels run on the CPU")
@pytest.mark.parametrize("level", ["avx512", "avx2", "baseline"])
def test_every_simd_level(level: str) -> None:
    native = next((b for b in backends() if b.name == "native"), None)
    if native is None:
        pytest.skip("no native kernels")
    from sglang_kernels import ops

    try:
        ops.set_simd_level(level)
    except RuntimeError:
        pytest.skip(f"this processor has no {level}")
    try:
        for drawn in damaged():
            expected = check(backends()[0], drawn)
            assert entries(check(native, drawn)) == entries(expected)
    finally:
        ops.set_simd_level("auto")


@each_backend
def test_programs_that_share_a_row(backend: Backend) -> None:
    """A long row of one greedy token, with a fault in each part; each is found, and in
    the token's own row only."""
    shape = Shape(vocab=40_003, dtype=torch.bfloat16)
    sound = draw([KINDS["greedy"], KINDS["drawn"]], shape)
    assert found(check(backend, sound)) == {}
    at = _at(sound, 0)
    for place in (0, 8_191, 8_192, 20_000, 40_002):
        for value, reason in ((torch.nan, WILD), (torch.inf, WILD), (90.0, S)):
            drawn = copied(sound)
            drawn.logits[at, place] = value
            assert found(check(backend, drawn)) == {0: reason}
    nan = copied(sound)
    nan.logits[at, int(nan.tokens[0])] = torch.nan
    assert len(entries(check(backend, nan))) == 1


OTHER_LAYOUTS: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("req_rows", lambda t: t.int()),
    ("serials", lambda t: t[:-1]),
    ("tokens", lambda t: t.repeat_interleave(2)[::2]),
    ("logits_rows", lambda t: t[:-1]),
    ("hidden_ends", lambda t: t.int()),
    ("logits", lambda t: t.double()),
    ("logits", lambda t: t.t().contiguous().t()),
    ("edited", lambda t: t[:, :-1]),
    ("edited_rows", lambda t: t[:-1]),
    ("edited_rows", lambda t: t.int()),
    ("edited_rows", lambda t: None),
    ("kept", lambda t: t.half()),
    ("masks", lambda t: t[:, : 1000 // 32 + 1]),
    ("masks", lambda t: t.long()),
    ("sampling", lambda t: t[:, :-1]),
    ("hidden", lambda t: t[:, :-1]),
    ("inputs", lambda t: t[:-1]),
]


@each_backend
@pytest.mark.parametrize(("name", "change"), OTHER_LAYOUTS)
def test_another_layout_is_refused(
    backend: Backend, name: str, change: Callable[[torch.Tensor], Any]
) -> None:
    drawn = draw(GROUPS["edited"], WIDE)
    other = replace(drawn, **{name: change(getattr(drawn, name))})
    with pytest.raises((ValueError, RuntimeError), match=name):
        check(backend, other)


@each_backend
def test_rows_that_are_no_whole_words_are_refused(backend: Backend) -> None:
    drawn = draw(GROUPS["drawn"], replace(WIDE, hidden=25, dtype=torch.bfloat16))
    with pytest.raises((ValueError, RuntimeError), match="32-bit words"):
        check(backend, drawn)


def test_every_field_is_copied() -> None:
    """The world's helpers know all tensors of a batch."""
    drawn = draw(GROUPS["grammars"], WIDE)
    other = copied(drawn)
    for f in dataclasses.fields(DrawnTokens):
        own, copy = getattr(drawn, f.name), getattr(other, f.name)
        assert own is copy or torch.equal(own.nan_to_num(), copy.nan_to_num())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

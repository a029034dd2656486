"""Compiles the canary's Triton kernels for sm_90; run by test_canary_kernels_aot.

Compiles the launches of `kernels/triton` for batches, views and pools of every
kind, on tensors that need not hold anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))

import torch
import triton
import triton.language as tl
from canary_aot_checks import lonely_branches, unguarded_stores
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_canary.accepted import AcceptedPath, AcceptedWords, SampledTokens
from kv_canary.carried import CandidateGroups, CarriedRows, CarriedState
from kv_canary.drawn import MASK_WORDS, SAMPLING_WORDS, DrawnTokens
from kv_canary.findings import STATUS_WORDS
from kv_canary.kernels.triton import (
    accepted,
    before,
    carried,
    drawn,
    ends,
    notes,
    records,
    slot_sums,
    state_parts,
    verify,
    write,
)
from kv_canary.kernels.triton.args import state_args
from kv_canary.kernels.triton.report import agree_across_warps
from kv_canary.layout import Fingerprint, FingerprintMode
from kv_canary.pool_checks import PoolChecks
from kv_canary.records import WriterKind
from kv_canary.state import CanaryState, create_state
from kv_canary.state_parts import StateParts
from kv_canary.view import ForwardView, KVReadView
from sglang.test.scale import sampled

# SGLang puts a function of its own in this place, which no kernel may name.
triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()
TARGET = GPUTarget("cuda", 90, 32)
MODULES = (
    *(accepted, before, carried, drawn, ends, notes, records),
    *(slot_sums, state_parts, verify, write),
)
KERNELS = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if name.endswith("_kernel")
}
# Whose warps look at the same elements; in the others a thread has its own.
GUARDED = {"verify_kernel", "before_kernel", "write_kernel"}
# Records, which other programs of the launch may be writing: how the compiler names the
# first two elements of the tuple `state`, head and tail.
VOLATILE = ("state", "state_0")
ROWS, WIDTH = 5, 320


class Variant(NamedTuple):
    name: str
    kernel: str
    arguments: dict[str, Any]
    warps: int


class Recorder:
    """Takes the place of a kernel, and notes the arguments of launches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.launches: list[tuple[dict[str, Any], int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, num_warps: int = 4, **kwargs: Any) -> None:
        named = dict(zip(KERNELS[self.name].arg_names, args, strict=False))
        self.launches.append((named | kwargs, num_warps))


# -- launches ----------------------------------------------------------------------


def longs(count: int = ROWS) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def create_rows(*, tokens: int = ROWS, **fields: Any) -> ForwardView:
    return ForwardView(
        req_rows=longs(),
        prefix_lens=longs(),
        extend_lens=longs(),
        input_ids=longs(tokens),
        positions=longs(tokens),
        out_cache_loc=longs(tokens),
        serials=longs(),
        salts=longs(),
        **fields,
    )


def decode_rows() -> ForwardView:
    return create_rows()


def extend_rows(**fields: Any) -> ForwardView:
    return create_rows(tokens=600, qo_indptr=longs(ROWS + 1), **fields)


def branch_rows() -> ForwardView:
    """Branches of a draft, which go on from lineages of their own."""
    return create_rows(
        seed_table=longs(8),
        lineage_rows=longs(),
        publish_rows=longs(),
        shift_from=longs(),
        column_shift=longs(4 * ROWS),
    )


ALL_ROWS = {
    "decode": decode_rows(),
    "extend": extend_rows(),
    "tree": extend_rows(
        parent_index=longs(600),
        tree_mask=torch.zeros(600, 120, dtype=torch.bool),
        max_depth=5,
    ),
    "branches": branch_rows(),
    "draft extend": extend_rows(seed_table=longs(8), stay_lens=longs()),
    "seeds": create_rows(seeds=longs()),
}
VIEWS = {
    "tokens": KVReadView(
        read_lens=longs(), page_table=ints(8, WIDTH), row_index=longs()
    ),
    "pages": KVReadView(
        read_lens=longs(),
        page_table=ints(8, WIDTH)[:, ::16],
        row_index=longs(),
        page_size=16,
    ),
    "flat": KVReadView(
        read_lens=longs(), indptr=ints(ROWS + 1), slot_indices=ints(2000)
    ),
    "numbers": KVReadView(
        read_lens=longs(),
        indptr=ints(ROWS + 1),
        page_indices=ints(200),
        page_size=16,
    ),
    "window": KVReadView(
        read_lens=longs(),
        page_table=ints(ROWS, WIDTH),
        first_position=longs(),
        prefix_lens=longs(),
        positions=longs(600),
        page_size=4,
    ),
}
SWEEP = KVReadView(
    read_lens=longs(),
    indptr=longs(ROWS + 1),
    slot_indices=longs(2000),
    prev_slots=longs(),
)


def create_canary() -> CanaryState:
    return create_state(
        num_slots=64, req_rows=8, ring_capacity=64, num_managers=2, device="cpu"
    )


def pool_of(
    mode: FingerprintMode, *, is_scattered: bool = False, has_sums: bool = False
) -> Fingerprint:
    """K and V of Llama-3.1-8B, 2048 bytes per slot and layer, in a pool so large that
    strides need 64 bits; `has_sums`: of its 8 KV heads. Scattered layers that are
    sampled have K and V side by side in each page, as in vLLM."""
    if mode is FingerprintMode.NONE:
        return Fingerprint()
    words = torch.empty(32, 1 << 24, 256, dtype=torch.int64, device="meta")
    places = longs(32) if is_scattered else None
    return Fingerprint(
        mode=mode,
        k_words=words,
        v_words=words,
        rotation_period=1024,
        k_places=places,
        v_places=places,
        page_size=16 if is_scattered and mode is FingerprintMode.PARTIAL else 0,
        page_gap=16 * 256,
        run_words=32 if is_scattered and mode is FingerprintMode.PARTIAL else 0,
        run_gap=16 * 64 - 32,
        sums=ints(1, 32, 8) if has_sums else None,
    )


def launch_reads(
    mode: FingerprintMode, view: str, rows: str, *, is_attended: bool = False
) -> None:
    tokens = ints(8, WIDTH + 1) if view == "window" else None
    forward = replace(
        ALL_ROWS[rows],
        reads=[VIEWS[view]],
        writer_kind=WriterKind.DECODE,
        manager=0,
        oracle=(longs(), longs()) if view == "flat" else None,
    )
    checks = PoolChecks(
        page_size=VIEWS[view].page_size,
        fingerprint=pool_of(mode, has_sums=is_attended),
        compares_bytes=not is_attended,
        req_to_token=ints(8, WIDTH),
        tokens=tokens,
        token_offset=0 if rows == "tree" else 1,  # no draft is given trees
        published=ints(8, WIDTH) if view != "window" else None,
    )
    before.before_model(create_canary(), forward, checks)


def launch_verify(
    mode: FingerprintMode,
    view: KVReadView,
    *,
    is_scattered: bool = False,
    has_sums: bool = False,
) -> None:
    checks = PoolChecks(
        fingerprint=pool_of(mode, is_scattered=is_scattered, has_sums=has_sums),
        skips_new=is_scattered,
        req_to_token=None if view is SWEEP else ints(8, WIDTH),
    )
    forward = replace(ALL_ROWS["decode"], manager=0)
    verify.verify(create_canary(), forward, checks, view)


def launch_head(rows: str) -> None:
    forward = replace(
        ALL_ROWS[rows],
        writer_kind=WriterKind.EXTEND,
        manager=0,
        oracle=(longs(600), longs(600)) if rows == "extend" else None,
    )
    checks = PoolChecks(
        page_size=16,
        req_to_token=ints(8, WIDTH),
        published=ints(8, WIDTH) if rows in ("decode", "tree") else None,
    )
    write.write_head(create_canary(), forward, checks)


def launch_tail(
    mode: FingerprintMode,
    rows: str,
    *,
    is_scattered: bool = False,
    has_sums: bool = False,
) -> None:
    fingerprint = pool_of(mode, is_scattered=is_scattered, has_sums=has_sums)
    write.write_tail(
        create_canary(),
        replace(ALL_ROWS[rows], writer_kind=WriterKind.EXTEND, manager=0),
        PoolChecks(page_size=16, fingerprint=fingerprint),
        rows != "tree",
        longs(64) if rows in ("decode", "extend") else None,
    )


def launch_note(groups: int) -> None:
    """Notes alone, or with the findings of so many groups of slots."""
    sampled_tokens = SampledTokens(*(longs() for _ in SampledTokens._fields))
    findings = [longs(STATUS_WORDS + ROWS) if i < groups else None for i in range(2)]
    notes.send_tokens(create_canary(), sampled_tokens, *findings, longs(64))


def launch_accepted(*, with_choices: bool, checks: bool) -> None:
    nodes, path = longs(ROWS * 8).view(ROWS, 8), longs(ROWS * 4).view(ROWS, 4)
    tree_path = AcceptedPath(
        req_rows=longs(),
        serials=longs(),
        prefix_lens=longs(),
        tokens=nodes,
        parent_index=nodes,
        predict=nodes,
        accept_index=path,
        accept_lens=longs(),
        gained=path,
        choices=nodes if with_choices else None,
    )
    accepted.finish_accepted(
        create_canary(),
        create_canary(),
        tree_path,
        longs(),
        checks,
        AcceptedWords.of(tree_path),
    )


def carried_rows(kind: str, group: int) -> CarriedRows:
    """Rows of one of the kinds that a cycle checks or notes."""
    count = ROWS * group
    hidden = torch.zeros(count, 64, dtype=torch.bfloat16)
    places = longs(count).view(ROWS, group)
    if kind == "copied":
        return CarriedRows(places=places, hidden=hidden, source=hidden, lens=longs())
    if kind == "chosen":
        groups = CandidateGroups(num_groups=9, topk=2)
        return CarriedRows(places=places, hidden=hidden, sums=longs(), groups=groups)
    has_known = kind in ("started", "unhidden")
    return CarriedRows(
        places=places,
        hidden=None if kind == "unhidden" else hidden,
        ids=longs(count * 2).view(count, 2) if has_known else None,
        probs=torch.zeros(count, 2) if has_known else None,
        sums=longs(),
    )


def launch_carried(checked: str | None, noted: str | None) -> None:
    def rows_of(kind: str | None) -> CarriedRows | None:
        if kind is None:
            return None
        return carried_rows(kind, 4 if kind in ("chosen", "hidden") else 1)

    requests = CarriedState(
        req_rows=longs(),
        serials=longs(),
        positions=longs(),
        checked=rows_of(checked),
        noted=rows_of(noted),
    )
    carried.carry(create_canary(), requests)


def launch_drawn(*, has_all: bool, draws: bool, vocab: int) -> None:
    """With every matrix, or with the logits alone."""
    floats = torch.zeros(ROWS, vocab)
    halves = torch.zeros(ROWS, 64, dtype=torch.bfloat16)
    tokens = DrawnTokens(
        req_rows=longs(),
        serials=longs(),
        prefix_lens=longs(),
        extend_lens=longs(),
        tokens=longs(),
        logits_rows=longs() if has_all else None,
        logits=floats.to(torch.bfloat16),
        inputs=halves if has_all else None,
        hidden=halves if has_all else None,
        hidden_ends=longs() if has_all else None,
        edited=floats if has_all else None,
        edited_rows=longs() if has_all else None,
        kept=floats if has_all else None,
        masks=ints(ROWS, vocab // 32 + 1 + MASK_WORDS) if has_all else None,
        sampling=longs(8 * SAMPLING_WORDS).view(8, SAMPLING_WORDS),
        draws=draws,
    )
    drawn.check_drawn(create_canary(), tokens, longs(64) if has_all else None)


def launch_sums(dtype: torch.dtype, *, layers: int) -> None:
    """K and V of 8 heads of 128 channels, in pages of 16."""
    slot_sums.sum_slots(
        torch.zeros(64, dtype=dtype),
        longs(layers),
        longs(16 * 2048).view(16, 2048),
        longs(2048),
        longs(),
        16 * 2048,
        longs(ROWS * layers).view(ROWS, layers),
    )


def launch_state_sums() -> None:
    """A convolution and the matrices of a layer."""
    states = [torch.zeros(3, 4, 64), torch.zeros(3, 2, 32, 32)]
    parts = StateParts([states], FingerprintMode.ROTATE)
    found = longs(2 * ROWS * 2).view(2, ROWS, 2)
    state_parts.sum_states(longs(), longs(), longs(), parts, found)


def launches() -> Iterator[tuple[str, Any]]:
    """Names, and what launches one kernel each."""
    for rows in ALL_ROWS:
        yield f"head {rows}", lambda rows=rows: launch_head(rows)
    for mode in FingerprintMode:
        for rows in ALL_ROWS:
            name = f"tail {rows} {mode.name}"
            yield name, lambda mode=mode, rows=rows: launch_tail(mode, rows)
    for mode in (FingerprintMode.PARTIAL, FingerprintMode.ALL):
        yield (
            f"verify scattered {mode.name}",
            lambda mode=mode: launch_verify(mode, VIEWS["tokens"], is_scattered=True),
        )
        yield (
            f"tail scattered {mode.name}",
            lambda mode=mode: launch_tail(mode, "extend", is_scattered=True),
        )
    yield (
        "before attended",
        lambda: launch_reads(FingerprintMode.ALL, "pages", "decode", is_attended=True),
    )
    for mode in (FingerprintMode.ROTATE, FingerprintMode.ALL):
        yield (
            f"verify sums {mode.name}",
            lambda mode=mode: launch_verify(mode, VIEWS["tokens"], has_sums=True),
        )
        for rows in ("decode", "extend"):
            yield (
                f"tail {rows} sums {mode.name}",
                lambda mode=mode, rows=rows: launch_tail(mode, rows, has_sums=True),
            )
    for dtype in (torch.int8, torch.int16, torch.int32):
        for layers in (1, 32):
            yield (
                f"sums {dtype} {layers}",
                lambda dtype=dtype, layers=layers: launch_sums(dtype, layers=layers),
            )
    yield "state sums", launch_state_sums
    state = create_canary()
    for live in (None, longs(1)):
        name = f"poison {live is not None}"
        yield name, lambda live=live: records.poison(state, longs(200), live)
    for moves in (1, 50, records.MAX_MOVES):
        dst = longs(moves)
        yield (
            f"move {moves}",
            lambda dst=dst: records.move_records(state, dst, dst),
        )
    for count in (1, 200):
        yield (
            f"announce {count}",
            lambda count=count: records.announce_heads(state, longs(count)),
        )
    for groups in range(3):
        yield f"note tokens {groups}", lambda groups=groups: launch_note(groups)
    for seeds in (None, longs(8)):
        yield (
            f"expect {seeds is not None}",
            lambda seeds=seeds: notes.expect_rows(
                create_canary(), longs(), longs(3 * ROWS).view(3, ROWS), seeds
            ),
        )
    for choices, checks in ((False, True), (True, True), (False, False)):
        yield (
            f"finish accepted {choices} {checks}",
            lambda choices=choices, checks=checks: launch_accepted(
                with_choices=choices, checks=checks
            ),
        )
    for checked, noted in (
        *(("started", "hidden"), ("chosen", "hidden"), ("chosen", None)),
        *(("copied", "started"), ("copied", "unhidden"), ("unhidden", None)),
        *(("hidden", "hidden"), ("hidden", None), ("copied", None)),
    ):
        yield (
            f"carried {checked} {noted}",
            lambda checked=checked, noted=noted: launch_carried(checked, noted),
        )
    for has_all, draws, vocab in (
        *((False, True, 128_256), (True, False, 128_256)),
        *((True, True, 4_096), (True, True, 128_256)),
    ):
        yield (
            f"drawn {has_all} {draws} {vocab}",
            lambda has_all=has_all, draws=draws, vocab=vocab: launch_drawn(
                has_all=has_all, draws=draws, vocab=vocab
            ),
        )
    rows = ALL_ROWS["draft extend"]
    yield "finish", lambda: ends.finish_step(state, rows, longs(64))
    yield "gather", lambda: ends.gather_findings(state, longs(), longs(64))
    for mode in FingerprintMode:
        for name, view in {"tokens": VIEWS["tokens"], "sweep": SWEEP}.items():
            yield (
                f"verify {name} {mode.name}",
                lambda mode=mode, view=view: launch_verify(mode, view),
            )
        for name in VIEWS:
            if mode is FingerprintMode.PARTIAL or name == "tokens":
                for rows in ALL_ROWS:
                    yield (
                        f"before {name} {rows} {mode.name}",
                        lambda mode=mode, name=name, rows=rows: launch_reads(
                            mode, name, rows
                        ),
                    )


def variants() -> list[Variant]:
    found = []
    recorders = {name: Recorder(name) for name in KERNELS}
    with ExitStack() as stack:
        for name, recorder in recorders.items():
            module = sys.modules[KERNELS[name].fn.__module__]
            stack.enter_context(patch.object(module, name, recorder))
        for name, launch in launches():
            launch()
            (kernel,) = (r for r in recorders.values() if r.launches)
            ((arguments, warps),) = kernel.launches
            kernel.launches.clear()
            found.append(Variant(name, kernel.name, arguments, warps))
    assert {variant.kernel for variant in found} == set(KERNELS)
    return found


# -- compilation -------------------------------------------------------------------


# Triton's names of the pointers.
TYPES = {
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}


class Signature:
    """How Triton sees arguments: types, what it compiles in, which are aligned."""

    def __init__(self) -> None:
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[object]]] = {}

    def type_of(self, value: Any, path: tuple[int, ...], *, specialized: bool) -> Any:
        if isinstance(value, tuple):
            types = [
                self.type_of(part, (*path, i), specialized=True)
                for i, part in enumerate(value)
            ]
            return type(value)(*types)
        if value is None or (specialized and isinstance(value, int) and value == 1):
            return self.constant(value, path)
        is_tensor = isinstance(value, Tensor)
        number = value.data_ptr() if is_tensor else value
        if specialized and number % 16 == 0:
            self.attributes[path] = [["tt.divisibility", 16]]
        if is_tensor:
            return TYPES[value.dtype]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    def constant(self, value: Any, path: tuple[int, ...]) -> str:
        self.constants[path] = value
        return "constexpr"


def compile_kernel(kernel: Any, arguments: dict[str, Any], warps: int) -> Any:
    signature, types = Signature(), {}
    for i, param in enumerate(kernel.params):
        value = arguments.get(param.name, param.default)
        if param.is_constexpr:
            types[param.name] = signature.constant(value, (i,))
        else:
            types[param.name] = signature.type_of(
                value, (i,), specialized=not param.do_not_specialize
            )
    source = ASTSource(
        kernel, types, constexprs=signature.constants, attrs=signature.attributes
    )
    options = {"num_warps": warps, "launch_pdl": True}
    return triton.compile(source, target=TARGET, options=options)


@triton.jit
def lonely_kernel(state, BLOCK: tl.constexpr, AGREED: tl.constexpr):
    """Each warp decides for itself, unless AGREED: a control of the check."""
    word = tl.load(state.tail + tl.arange(0, BLOCK))
    if AGREED:
        word = agree_across_warps(word)
    if tl.sum(word, axis=0) != 0:
        tl.store(state.clock, tl.load(state.clock) + 1)


def check_controls() -> None:
    state = state_args(create_canary())
    for block in (1, 8, 32, 128):
        for agreed in (False, True):
            arguments = {"state": state, "BLOCK": block, "AGREED": agreed}
            ttgir = compile_kernel(lonely_kernel, arguments, 4).asm["ttgir"]
            is_lonely = block < 128 and not agreed
            assert bool(lonely_branches(ttgir, VOLATILE)) == is_lonely, arguments


def main() -> None:
    chosen = sampled(variants(), key=lambda variant: variant.kernel, ci=2)
    for variant in chosen:
        kernel = KERNELS[variant.kernel]
        compiled = compile_kernel(kernel, variant.arguments, variant.warps)
        if variant.kernel in GUARDED and variant.warps > 1:
            stores = unguarded_stores(compiled.asm["ttir"])
            assert not stores, f"{variant.name}: {stores}"
            # Nothing writes heads beside a tail launch, which reads no tails.
            volatile = () if variant.arguments.get("IS_TAIL") else VOLATILE
            branches = lonely_branches(compiled.asm["ttgir"], volatile)
            assert not branches, f"{variant.name}: {branches}"
        print(variant.name, "shared", compiled.metadata.shared, flush=True)
    check_controls()
    print(f"compiled {len(chosen)} variants for sm_90")


if __name__ == "__main__":
    main()

"""The canary around forwards: order, scopes, dispatch, health, moved records."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.distributed.parallel_state import (
    TensorParallelGroup,
)
from sglang.srt.kv_canary.api import (
    _extract_forward_batch,
    _patch_model_forward,
    _with_canary_bracketing,
)
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealData
from sglang.srt.kv_canary.kernels.finish import is_clean
from sglang.srt.kv_canary.kernels.records import (
    NUM_COUNTERS,
    POISON_WORD,
    Counter,
    Phase,
    Reason,
    Ring,
    WriterKind,
    lineage_of,
    unpack_word3,
)
from sglang.srt.kv_canary.kernels.state import CanaryState
from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
from sglang.srt.kv_canary.runner import health_checker
from sglang.srt.kv_canary.runner.canary_manager import (
    CanaryManager,
    CanaryScopes,
    context_tuple,
)
from sglang.srt.kv_canary.runner.health_checker import HealthChecker
from sglang.srt.kv_canary.runner.violation import parse_entry
from sglang.srt.kv_canary.single_forward_manager import manager as forward_manager
from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    HostLens,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.graph_capture import SideStream
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=10, suite="cpu")
register_cuda_ci(est_time=20, suite="cuda")

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(tmp_path_factory.mktemp("mock"))


def canary_of(harness: ForwardHarness) -> CanaryManager:
    manager = harness.runner.canary_manager
    assert manager is not None
    return manager


@pytest.fixture
def harness(model: Path) -> ForwardHarness:
    """In mode `log`; its runs go through `findings`."""
    built = ForwardHarness(model, slots=512, kv_canary="log", kv_canary_real_data="all")
    canary_of(built).mark_init_finished()
    return built


def findings(harness: ForwardHarness, batch: ForwardBatch) -> list[dict[str, Any]]:
    """Run a forward; what it reports, as incident documents."""
    reporter = canary_of(harness).reporter
    before = len(reporter.incidents)
    harness.run(batch)
    new = list(reporter.incidents)[before:]
    return [found for incident in new for found in incident["violations"]]


def reasons(harness: ForwardHarness, batch: ForwardBatch) -> set[str]:
    return {r for found in findings(harness, batch) for r in found["reasons"]}


def prefilled(harness: ForwardHarness, *lengths: int) -> list[int]:
    """Rows of these lengths, one token of each still to be decoded."""
    rng = random.Random(sum(lengths))
    rows = [
        harness.new_row([rng.randrange(1000) for _ in range(length + 1)])
        for length in lengths
    ]
    batch = harness.prepare(EXTEND, list(zip(rows, lengths, strict=True)))
    assert findings(harness, batch) == []
    return rows


def finish(manager: CanaryManager, batch: ForwardBatch) -> list[int]:
    """End a step: what it found, on the host."""
    return manager.finish_step(batch).tolist()


def decode_batch(harness: ForwardHarness, *rows: int) -> ForwardBatch:
    """One more token of each row; as in the engine, the host sends no lineages."""
    batch = harness.prepare(DECODE, [(row, None) for row in rows])
    return dataclasses.replace(batch, prefix_lineages=None)


def with_padded_row(batch: ForwardBatch, device: str) -> ForwardBatch:
    """A decode batch and one row as graphs pad it."""
    padding = {"extend_lens": 1, "seq_lens": 1}
    names = (
        "input_ids",
        "positions",
        "out_cache_loc",
        "req_pool_indices",
        "prefix_lens",
        "extend_lens",
        "seq_lens",
        "req_serial",
        "salt",
        "rids_int",
    )
    padded: dict[str, Any] = {
        name: torch.cat(
            (
                getattr(batch, name),
                torch.tensor([padding.get(name, 0)], device=device),
            )
        )
        for name in names
    }
    lens = batch.lens_cpu
    assert lens is not None
    lens = HostLens(
        prefix_lens=[*lens.prefix_lens, 0], extend_lens=[*lens.extend_lens, 1]
    )
    return dataclasses.replace(batch, lens_cpu=lens, **padded)


def phases(state: CanaryState) -> list[int]:
    """The phase words, once the launches beside the model are through."""
    if state.phase.is_cuda:
        torch.cuda.synchronize()
    found: list[int] = state.phase.tolist()
    return found


class TestManagerPerForward:
    """One forward: what is set before it, what runs around it, what is left."""

    def test_order_of_launches(
        self, harness: ForwardHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Verify and head, the model, tail; the phase word follows."""
        events: list[tuple[str, Phase]] = []
        state = canary_of(harness).target.buffers.state

        def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                output = function(*args, **kwargs)
                events.append((name, Phase(int(state.phase[0]))))
                return output

            return call

        for name in ("before_model", "write_tail", "set_lineage"):
            function = getattr(forward_manager, name)
            monkeypatch.setattr(forward_manager, name, recorded(name, function))
        backend = harness.runner.attn_backend
        monkeypatch.setattr(backend, "forward", recorded("layer", backend.forward))
        rows = prefilled(harness, 9, 4)
        around = [
            ("before_model", Phase.AFTER_HEAD),
            ("layer", Phase.AFTER_HEAD),
            ("layer", Phase.AFTER_HEAD),
            ("write_tail", Phase.IDLE),
        ]
        assert events == [("set_lineage", Phase.IDLE), *around]
        events.clear()
        harness.run(decode_batch(harness, *rows))
        assert events == around

    def test_counters_of_one_forward(self, harness: ForwardHarness) -> None:
        rows = prefilled(harness, 9, 4)
        before = canary_of(harness).counters
        harness.run(decode_batch(harness, *rows))
        after = canary_of(harness).counters
        grown = {c: after[c] - before[c] for c in Counter if after[c] != before[c]}
        assert grown == {
            Counter.VERIFIED_SLOTS: 13,
            Counter.REHASHED_SLOTS: 13,
            Counter.HEAD_SLOTS: 2,
            Counter.TAIL_SLOTS: 2,
            Counter.VERIFY_LAUNCHES: 1,
            Counter.HEAD_LAUNCHES: 1,
            Counter.TAIL_LAUNCHES: 1,
        }

    def test_records_say_who_wrote_them(self, harness: ForwardHarness) -> None:
        (row,) = prefilled(harness, 5)
        harness.run(decode_batch(harness, row))
        state = canary_of(harness).target.buffers.state
        slots = harness.pool.row_slots(row, 0, 6).to(state.head.device)
        tail = state.tail[slots].tolist()
        kinds = [unpack_word3(words[3]) for words in tail]
        assert [kind.kind for kind in kinds] == [WriterKind.EXTEND] * 5 + [
            WriterKind.DECODE
        ]
        assert {kind.serial for kind in kinds} == {row}
        assert kinds[-1].clock == kinds[0].clock + 1
        tokens = harness.tokens(row)
        for position, words in enumerate(tail):
            assert words[1] == lineage_of(tokens[: position + 1], 0)

    def test_lineages_are_set_for_extend_and_advanced_after_it(
        self, harness: ForwardHarness
    ) -> None:
        manager = canary_of(harness)
        expected = manager.target.buffers.state.expected_lineage
        tokens = list(range(100, 120))
        row = harness.new_row(tokens)
        harness.run(harness.prepare(EXTEND, [(row, 8)]))
        assert int(expected[row]) == lineage_of(tokens[:8], 0)
        expected[row] = 17  # what an earlier owner of the row may have left
        batch = harness.prepare(EXTEND, [(row, 19)])
        harness.runner.forward(batch)
        finish(manager, batch)
        assert int(expected[row]) == lineage_of(tokens[:19], 0)
        assert findings(harness, decode_batch(harness, row)) == []

    def test_a_wrong_lineage_of_the_host_is_found(
        self, harness: ForwardHarness
    ) -> None:
        row = harness.new_row(list(range(20)))
        harness.run(harness.prepare(EXTEND, [(row, 8)]))
        batch = harness.prepare(EXTEND, [(row, 19)])
        assert batch.prefix_lineages is not None
        batch = dataclasses.replace(batch, prefix_lineages=batch.prefix_lineages + 1)
        (found,) = findings(harness, batch)
        assert found["reasons"] == ["verify_token"]
        assert (found["position"], found["request_row"]) == (7, row)
        # No record is at fault.
        assert "first_wrong_position" not in found

    def test_the_first_wrong_position_is_that_of_the_device_s_table(
        self, harness: ForwardHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the host's copy of it says."""
        pool = harness.pool
        row, other = prefilled(harness, 9, 9)
        batch = decode_batch(harness, row)
        monkeypatch.setattr(pool, "_mirror", pool._mirror.copy())
        pool.req_to_token[row, 4:9] = pool.req_to_token[other, 4:9]
        found = findings(harness, batch)
        (last,) = [f for f in found if "verify_token" in f["reasons"]]
        assert (last["position"], last["first_wrong_position"]) == (8, 4)

    def test_a_slot_outside_of_the_pool_is_a_wrong_position(
        self, harness: ForwardHarness
    ) -> None:
        (row,) = prefilled(harness, 9)
        for position, slot in ((6, -1), (2, 10**6)):
            harness.pool.req_to_token[row, position] = slot
            violation = parse_entry(
                [int(Reason.VERIFY_TOKEN), row, row, 1, 8, *[0] * 11],
                page_size=1,
                rid_of={},
            )
            details = canary_of(harness)._details(violation, harness.tokens)
            assert details == {"first_wrong_position": position}

    @pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=lambda mode: mode.name)
    def test_an_incident_names_the_mode_of_its_forward(
        self, harness: ForwardHarness, mode: ForwardMode
    ) -> None:
        manager = canary_of(harness)
        (row,) = prefilled(harness, 9)
        slot = int(harness.pool.row_slots(row, 3, 4)[0])
        manager.target.buffers.state.tail[slot, 2] += 1
        (found,) = findings(harness, harness.prepare(mode, [(row, 10)]))
        assert found["forward_mode"] == mode.name.lower()
        assert manager.reporter.incidents[-1]["forward_mode"] == mode.name.lower()

    def test_frees_are_poisoned_before_the_next_verify(
        self, harness: ForwardHarness
    ) -> None:
        """A row reads slots that another one freed just before."""
        (owner,) = prefilled(harness, 8)
        borrower = harness.new_row(harness.tokens(owner), borrow=(owner, 8))
        state = canary_of(harness).target.buffers.state
        slots = harness.pool.row_slots(owner, 0, 8)
        on_device = slots.to(state.head.device)
        batch = harness.prepare(EXTEND, [(borrower, 9)])
        harness.runner.allocator.free(slots)
        assert not (state.head[on_device, 0] == POISON_WORD).any()
        found = findings(harness, batch)
        assert all("verify_freed" in f["reasons"] for f in found)
        assert [f["position"] for f in found] == list(range(8))
        assert (state.head[on_device, 0] == POISON_WORD).all()
        assert (state.tail[on_device, 0] == POISON_WORD).all()

    def test_a_slot_that_is_freed_and_taken_again_is_fine(
        self, harness: ForwardHarness
    ) -> None:
        (first,) = prefilled(harness, 400)
        harness.release(first)
        assert prefilled(harness, 400, 100)

    def test_padded_rows_are_silent(self, harness: ForwardHarness) -> None:
        rows = prefilled(harness, 9, 4)
        manager = canary_of(harness)
        state = manager.target.buffers.state
        before = manager.counters
        batch = decode_batch(harness, *rows)
        batch = with_padded_row(batch, harness.runner.device)
        assert findings(harness, batch) == []
        verified = manager.counters[Counter.VERIFIED_SLOTS]
        assert verified - before[Counter.VERIFIED_SLOTS] == 13
        for records in (state.head, state.tail):
            assert int(records[0, 0]) == POISON_WORD

    def test_a_live_row_on_the_scratch_page_is_not(
        self, harness: ForwardHarness
    ) -> None:
        (row,) = prefilled(harness, 6)
        batch = decode_batch(harness, row)
        batch.out_cache_loc[0] = 0
        assert "write_scratch" in reasons(harness, batch)

    def test_a_padded_row_that_writes_a_live_slot_is_found(
        self, harness: ForwardHarness
    ) -> None:
        """Its KV lands in another's slot; the next read of those bytes says so."""
        rows = prefilled(harness, 9, 4)
        batch = decode_batch(harness, rows[0])
        batch = with_padded_row(batch, harness.runner.device)
        victim = int(harness.pool.row_slots(rows[1], 2, 3)[0])
        batch.out_cache_loc[1] = victim
        batch.input_ids[1] = 3
        harness.run(batch)
        (found,) = findings(harness, decode_batch(harness, rows[1]))
        assert "verify_real_kv" in found["reasons"]
        assert (found["slot"], found["position"]) == (victim, 2)

    def test_more_rows_than_announced_are_refused(
        self, harness: ForwardHarness
    ) -> None:
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        too_many = harness.pool.size + 1
        repeated = batch.req_pool_indices.repeat(too_many)
        batch = dataclasses.replace(batch, req_pool_indices=repeated)
        message = f"{too_many} rows, but .* set up for {harness.pool.size}"
        with pytest.raises(RuntimeError, match=message):
            harness.runner.forward(batch)


class TestRecordsFollowTheBytes:
    """Moves and transfers."""

    def test_moved_slots_stay_true(self, harness: ForwardHarness) -> None:
        (row,) = prefilled(harness, 12)
        pool = harness.runner.token_to_kv_pool
        fresh = harness.runner.allocator.alloc(4)
        assert fresh is not None
        src = harness.pool.row_slots(row, 5, 9)
        pool.move_kv_cache(fresh.to(pool.device), src.to(pool.device))
        harness.pool.write(row, 5, fresh)
        harness.runner.allocator.free(src)
        assert findings(harness, decode_batch(harness, row)) == []

    @pytest.mark.parametrize("left_behind", ["records", "bytes"])
    def test_half_a_move_is_found(
        self, harness: ForwardHarness, left_behind: str
    ) -> None:
        (row,) = prefilled(harness, 12)
        pool = harness.runner.token_to_kv_pool
        fresh = harness.runner.allocator.alloc(1)
        assert fresh is not None
        dst = fresh.to(pool.device)
        src = harness.pool.row_slots(row, 5, 6).to(pool.device)
        if left_behind == "records":
            pool._move(dst, src)
        else:
            for hook in pool._on_move:
                hook(dst, src)
        harness.pool.write(row, 5, fresh)
        found = reasons(harness, decode_batch(harness, row))
        expected = "verify_freed" if left_behind == "records" else "verify_real_kv"
        assert expected in found

    def test_transfers_send_head_first_and_tail_last(
        self, harness: ForwardHarness
    ) -> None:
        pool = harness.runner.token_to_kv_pool
        state = canary_of(harness).target.buffers.state
        first, *own, last = pool.transfer_descriptors()
        assert (first.name, last.name) == ("canary.head", "canary.tail")
        assert first.buffer is state.head
        assert last.buffer is state.tail
        assert first.bytes_per_slot == last.bytes_per_slot == 32
        assert len(own) == 2 * pool.layer_num
        assert not any("canary" in descriptor.name for descriptor in own)

    def test_a_transfer_that_stops_halfway_is_torn(
        self, harness: ForwardHarness
    ) -> None:
        """The receiver's slot was used before; head and some layers arrive."""
        (row, source) = prefilled(harness, 8, 8)
        slots = harness.pool.row_slots(row, 0, 8).tolist()
        others = harness.pool.row_slots(source, 0, 8).tolist()
        for descriptor in harness.runner.token_to_kv_pool.transfer_descriptors()[:2]:
            descriptor.buffer[slots[3]] = descriptor.buffer[others[3]]
        (found,) = findings(harness, decode_batch(harness, row))
        assert "verify_torn" in found["reasons"]
        assert (found["slot"], found["position"]) == (slots[3], 3)


class TestLaunchEndpointsPerForward:
    """The scopes, and what stands between a model and its forward."""

    def test_launches_do_not_nest(self, harness: ForwardHarness) -> None:
        manager = canary_of(harness)
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        scopes = CanaryScopes(manager)
        with (
            scopes.launch(forward_batch=batch, steps=(0,)),
            pytest.raises(RuntimeError, match="launch is already open"),
            scopes.launch(forward_batch=batch, steps=(0,)),
        ):
            pass
        with (
            scopes.step(0),
            pytest.raises(RuntimeError, match="forward is already open"),
            scopes.step(0),
        ):
            pass
        assert findings(harness, batch) == []

    def test_scopes_close_after_an_error(self, harness: ForwardHarness) -> None:
        manager = canary_of(harness)
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        launch, step = context_tuple(manager, index=0, forward_batch=batch)
        before = manager.num_forwards
        with pytest.raises(KeyError), launch, step:
            raise KeyError
        assert manager.num_forwards == before
        assert findings(harness, batch) == []

    def test_without_a_manager_the_scopes_do_nothing(
        self, harness: ForwardHarness
    ) -> None:
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        launch, step = context_tuple(None, index=0, forward_batch=batch)
        with launch, step:
            pass

    def test_a_forward_outside_its_scope_is_an_assertion(
        self, harness: ForwardHarness
    ) -> None:
        manager = canary_of(harness)
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        context = ForwardContext(attn_backend=harness.runner.attn_backend)
        harness.runner.attn_backend.init_eager(batch)
        message = "outside with_active_single_forward_manager"
        with forward_context(context):
            with pytest.raises(AssertionError, match=message):
                manager.pre_ops_maybe_inside_graph(batch)
            with pytest.raises(AssertionError, match=message):
                manager.post_ops_maybe_inside_graph(batch)
            with pytest.raises(AssertionError, match=message), torch.inference_mode():
                harness.runner.model(batch.input_ids, batch.positions, batch)

    def test_the_batch_among_the_arguments(self, harness: ForwardHarness) -> None:
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        assert _extract_forward_batch((1, batch), {}) is batch
        assert _extract_forward_batch((1,), {"x": 2, "forward_batch": batch}) is batch
        with pytest.raises(RuntimeError, match="got 0 ForwardBatch"):
            _extract_forward_batch((1, "x"), {"y": None})
        with pytest.raises(RuntimeError, match="got 2 ForwardBatch"):
            _extract_forward_batch((batch,), {"again": batch})

    def test_only_this_model_is_patched(
        self, harness: ForwardHarness, model: Path
    ) -> None:
        patched = harness.runner.model
        other = ForwardHarness(model, kv_canary="none").runner.model
        assert "forward" in vars(patched)
        assert "forward" not in vars(other)
        assert type(patched).forward is type(other).forward

    def test_findings_of_a_launch_before_init_do_not_count_as_forwards(
        self, model: Path
    ) -> None:
        """Warm-ups and captures: checked, but no faults, sweeps or health checks."""
        harness = ForwardHarness(model, slots=512, kv_canary="log")
        manager = canary_of(harness)
        manager.perturb.arm("early_free", seed=0)
        (row,) = prefilled(harness, 5)
        assert findings(harness, decode_batch(harness, row)) == []
        assert manager.num_forwards == 0
        manager.mark_init_finished()
        harness.append(row, 7)
        assert "verify_freed" in reasons(harness, decode_batch(harness, row))
        assert manager.num_forwards == 1


def skip_the_tail(harness: ForwardHarness) -> None:
    """From now on the model runs without the launch behind it."""
    manager, model = canary_of(harness), harness.runner.model
    forward: Callable[..., Any] = type(model).forward

    def halfway(*args: Any, **kwargs: Any) -> Any:
        manager.pre_ops_maybe_inside_graph(_extract_forward_batch(args, kwargs))
        return forward(model, *args, **kwargs)

    model.__dict__["forward"] = halfway


class TestHealth:
    """The canary cannot be silently off."""

    @pytest.mark.parametrize("mode", ["log", "raise"])
    def test_a_skipped_tail_stops_at_once(self, model: Path, mode: str) -> None:
        """Nothing of a forward whose findings were not written is believed."""
        harness = ForwardHarness(model, slots=512, kv_canary=mode)
        row = harness.new_row([1] * 40)
        harness.run(harness.prepare(EXTEND, [(row, 5)]))
        for _ in range(3):
            harness.run(decode_batch(harness, row))
        skip_the_tail(harness)
        with pytest.raises(RuntimeError, match="not running: no tail launch"):
            harness.run(decode_batch(harness, row))

    def test_a_launch_out_of_order_is_a_phase_breach(
        self, harness: ForwardHarness
    ) -> None:
        row = harness.new_row([1] * 40)
        harness.run(harness.prepare(EXTEND, [(row, 5)]))
        canary_of(harness).target.buffers.state.phase.fill_(Phase.AFTER_HEAD)
        (found,) = findings(harness, decode_batch(harness, row))
        assert found["reasons"] == ["phase"]

    @pytest.mark.parametrize(
        "counter",
        [Counter.VERIFY_LAUNCHES, Counter.HEAD_LAUNCHES, Counter.TAIL_LAUNCHES],
    )
    def test_each_launch_is_watched(self, counter: Counter) -> None:
        def result(step: int) -> list[int]:
            counters = [step] * NUM_COUNTERS
            counters[counter] = min(step, 250)
            return counters

        checker = HealthChecker()
        for step in range(1, 300):
            checker.on_result(result(step))
        with pytest.raises(RuntimeError, match=f"{counter.name.lower()} advanced"):
            for step in range(300, 400):
                checker.on_result(result(step))

    def test_warm_up_is_not_judged(self) -> None:
        checker = HealthChecker()
        for _ in range(health_checker.WARM_UP_FORWARDS):
            checker.on_result([0] * NUM_COUNTERS)


class TestStats:
    """The periodic line."""

    def test_of_a_running_canary(
        self,
        model: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS", "5")
        harness = ForwardHarness(model, slots=512, kv_canary="raise")
        caplog.set_level(logging.INFO)
        row = harness.new_row([1] * 20)
        harness.run(harness.prepare(EXTEND, [(row, 4)]))
        for _ in range(9):
            harness.run(decode_batch(harness, row))
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.getMessage().startswith("[canary]")
        ]
        assert lines == [
            f"[canary] step={step} protected_tokens={protected} sweep_passes=0 "
            "violations=0 launch_tags_active=verify,head,tail pool=target"
            for step, protected in ((5, sum(range(4, 8))), (10, sum(range(4, 13))))
        ]


class TestCanaryManagerActiveSingleForwardManagerDispatch:
    """Two forwards of one launch, each with its own phase word."""

    @pytest.fixture
    def two(self, model: Path) -> tuple[ForwardHarness, CanaryManager]:
        harness = ForwardHarness(model, slots=512, kv_canary="none")
        runner = harness.runner
        config = CanaryConfig(mode=CanaryMode.LOG, real_data=RealData.ALL)
        rows = runner.req_to_token_pool.size
        buffers = attach_canary_buffers(
            pool=runner.token_to_kv_pool,
            config=config,
            device=runner.device,
            kv_token_id_vs_position_offset=0,
            req_rows=rows + 1,
            max_rows=rows,
            num_managers=2,
        )
        target = CanaryTarget(
            config=config,
            buffers=buffers,
            req_to_token_pool=runner.req_to_token_pool,
            kv_pool=runner.token_to_kv_pool,
            attn_backend=runner.attn_backend,
            page_size=runner.page_size,
            vocab_size=runner.model_config.vocab_size,
        )
        manager = CanaryManager(target, num_managers=2, group=TensorParallelGroup())
        _patch_model_forward(runner.model, manager)
        runner.scopes = CanaryScopes(manager)
        return harness, manager

    @staticmethod
    def run_model(
        harness: ForwardHarness, manager: CanaryManager, batch: ForwardBatch, index: int
    ) -> None:
        runner = harness.runner
        runner.attn_backend.init_eager(batch)
        context = ForwardContext(attn_backend=runner.attn_backend)
        with (
            torch.inference_mode(),
            forward_context(context),
            manager.with_active_single_forward_manager(index),
        ):
            runner.model(batch.input_ids, batch.positions, batch)

    def test_each_forward_goes_to_the_active_one(
        self, two: tuple[ForwardHarness, CanaryManager]
    ) -> None:
        harness, manager = two
        state = manager.target.buffers.state
        row = harness.new_row([1, 2, 3, 4, 5])
        batch = harness.prepare(EXTEND, [(row, 4)])
        seen: list[list[int]] = []
        before_model = vars(forward_manager)["before_model"]

        def watched(*args: Any, **kwargs: Any) -> None:
            before_model(*args, **kwargs)
            seen.append(state.phase.tolist())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward_manager, "before_model", watched)
            with manager.with_ops_outside_graph(
                single_forward_indices=[0, 1], maybe_inaccurate_forward_batch=batch
            ):
                self.run_model(harness, manager, batch, 1)
                self.run_model(harness, manager, batch, 0)
        assert seen == [[0, Phase.AFTER_HEAD], [Phase.AFTER_HEAD, 0]]
        assert state.phase.tolist() == [0, 0]
        assert is_clean(finish(manager, batch))

    def test_a_breach_names_its_manager(
        self, two: tuple[ForwardHarness, CanaryManager]
    ) -> None:
        harness, manager = two
        state = manager.target.buffers.state
        row = harness.new_row([1, 2, 3, 4, 5])
        batch = harness.prepare(EXTEND, [(row, 4)])
        state.phase[1] = Phase.AFTER_HEAD
        self.run_model(harness, manager, batch, 0)
        assert int(state.ring_count) == 0
        self.run_model(harness, manager, batch, 1)
        (entry,) = state.ring[: int(state.ring_count)].tolist()
        assert entry[Ring.TAG] >> 8 & 255 == 1

    def test_other_indices_do_not_exist(
        self, two: tuple[ForwardHarness, CanaryManager]
    ) -> None:
        _, manager = two
        with (
            pytest.raises(IndexError),
            manager.with_active_single_forward_manager(2),
        ):
            pass

    def test_the_bracket_calls_before_and_after(
        self, two: tuple[ForwardHarness, CanaryManager]
    ) -> None:
        """What the model returns passes through; an error skips what comes after."""
        harness, manager = two
        row = harness.new_row([1, 2, 3, 4, 5])
        batch = harness.prepare(EXTEND, [(row, 4)])
        state = manager.target.buffers.state

        def model_forward(value: str, forward_batch: ForwardBatch) -> str:
            assert phases(state) == [Phase.AFTER_HEAD, 0]
            if value == "fail":
                raise KeyError(value)
            return value

        bracketed = _with_canary_bracketing(model_forward, manager)
        harness.runner.attn_backend.init_eager(batch)
        context = ForwardContext(attn_backend=harness.runner.attn_backend)
        with (
            forward_context(context),
            manager.with_active_single_forward_manager(0),
        ):
            assert bracketed("value", forward_batch=batch) == "value"
            assert state.phase.tolist() == [0, 0]
            with pytest.raises(KeyError):
                bracketed("fail", batch)
            assert phases(state) == [Phase.AFTER_HEAD, 0]


class LoggedStream:
    """A stream that notes when it waits for another."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: LoggedStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=lambda mode: mode.name)
def test_the_tail_runs_beside_the_head(
    harness: ForwardHarness, mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream that has seen the stack's last layer, and that is waited for; behind
    the head of a small decode step."""
    log: list[str] = []
    manager, model = canary_of(harness), harness.runner.model
    main, side = LoggedStream("main", log), LoggedStream("side", log)
    forked = SideStream(side, current=lambda: main, entering=lambda _: nullcontext())
    (row,) = prefilled(harness, 9)
    one = manager._managers[0]
    monkeypatch.setattr(manager, "side", forked)

    def note(owner: object, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args: (log.append(name), function(*args))[1]
        )

    note(one, "post_ops_maybe_inside_graph")
    note(model, "forward_head")
    if mode is DECODE:
        assert findings(harness, decode_batch(harness, row)) == []
        assert log == ["forward_head", "post_ops_maybe_inside_graph"]
        return
    batch = harness.prepare(EXTEND, [(harness.new_row(list(range(7))), 7)])
    assert findings(harness, batch) == []
    assert log == [
        "side waits for main",
        "post_ops_maybe_inside_graph",
        "forward_head",
        "main waits for side",
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

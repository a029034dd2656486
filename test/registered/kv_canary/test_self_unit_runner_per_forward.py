"""The canary around forwards: order, scopes, dispatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_world import (
    canary_of,
    decode_batch,
    findings,
    finish,
    phases,
    prefilled,
    reasons,
    with_padded_row,
)

from kv_canary import launches
from kv_canary.checks import Reason
from kv_canary.findings import is_clean
from kv_canary.records import (
    POISON_WORD,
    Counter,
    Phase,
    Ring,
    WriterKind,
    request_lineage,
    unpack_word3,
)
from kv_canary.violation import parse_entry
from sglang.srt.forward.batch import ForwardBatch, ForwardMode
from sglang.srt.forward.context import ForwardContext, forward_context
from sglang.srt.kv_canary.api import (
    _extract_forward_batch,
    _patch_model_forward,
    _with_canary_bracketing,
)
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealData
from sglang.srt.kv_canary.perturb import driver_of
from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
from sglang.srt.kv_canary.runner.canary_manager import CanaryManager, context_tuple
from sglang.srt.kv_canary.runner.details import details
from sglang.srt.kv_canary.single_forward_manager.manager import CanaryTarget
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.forward_harness import ForwardHarness

register_cpu_ci(est_time=8, suite="cpu")
register_cuda_ci(est_time=12, suite="cuda")

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


class TestManagerPerForward:
    """One forward: its expectations, the launches around it, its results."""

    def test_per_forward_orchestrates_plan_head_tail(
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

        for name in ("before_model", "write_tail"):
            function = getattr(launches, name)
            monkeypatch.setattr(launches, name, recorded(name, function))
        backend = harness.runner.attn_backend
        monkeypatch.setattr(backend, "forward", recorded("layer", backend.forward))
        rows = prefilled(harness, 9, 4)
        around = [
            ("before_model", Phase.AFTER_HEAD),
            ("layer", Phase.AFTER_HEAD),
            ("layer", Phase.AFTER_HEAD),
            ("write_tail", Phase.IDLE),
        ]
        assert events == around
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
            assert words[1] == request_lineage(tokens[: position + 1], 0)

    def test_lineages_are_set_for_extend_and_advanced_after_it(
        self, harness: ForwardHarness
    ) -> None:
        manager = canary_of(harness)
        expected = manager.target.buffers.state.expected_lineage
        tokens = list(range(100, 120))
        row = harness.new_row(tokens)
        harness.run(harness.prepare(EXTEND, [(row, 8)]))
        assert int(expected[row]) == request_lineage(tokens[:8], 0)
        expected[row] = 17  # left by an earlier owner of the row, say
        batch = harness.prepare(EXTEND, [(row, 19)])
        harness.runner.forward(batch)
        finish(manager, batch)
        assert int(expected[row]) == request_lineage(tokens[:19], 0)
        assert findings(harness, decode_batch(harness, row)) == []

    def test_a_wrong_lineage_of_the_host_is_found(
        self, harness: ForwardHarness
    ) -> None:
        row = harness.new_row(list(range(20)))
        harness.run(harness.prepare(EXTEND, [(row, 8)]))
        batch = harness.prepare(EXTEND, [(row, 19)])
        canary_of(harness).target.buffers.state.expected_lineage[row] += 1
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
            found = details(
                violation,
                target=canary_of(harness).target,
                books=harness.books(),
            )
            assert found == {"first_wrong_position": position}

    @pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=lambda mode: mode.name)
    def test_an_incident_names_the_mode_of_its_forward(
        self, harness: ForwardHarness, mode: ForwardMode
    ) -> None:
        manager = canary_of(harness)
        (row,) = prefilled(harness, 9)
        slot = int(harness.pool.row_slots(row, 3, 4)[0])
        manager.target.buffers.state.tail[slot, 3] += 1
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
        """Its KV lands in another's slot; the next read of those bytes reports it."""
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


class TestLaunchEndpointsPerForward:
    """The scopes, and the wrapper around a model's forward."""

    def test_launch_endpoints_per_forward_keeps_padded_token_tensors(
        self, harness: ForwardHarness
    ) -> None:
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

    def test_launches_do_not_nest(self, harness: ForwardHarness) -> None:
        manager = canary_of(harness)
        (row,) = prefilled(harness, 3)
        batch = decode_batch(harness, row)
        launch, step = context_tuple(manager, index=0, forward_batch=batch)
        with launch:
            with pytest.raises(RuntimeError, match="launch is already open"), launch:
                pass
            manager.on_replay()
        with step, pytest.raises(RuntimeError, match="forward is already open"), step:
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
        driver_of(manager).arm("early_free", seed=0)
        (row,) = prefilled(harness, 5)
        assert findings(harness, decode_batch(harness, row)) == []
        assert manager.num_forwards == 0
        manager.mark_init_finished()
        harness.append(row, 7)
        assert "verify_freed" in reasons(harness, decode_batch(harness, row))
        assert manager.num_forwards == 1


class TestCanaryManagerActiveSingleForwardManagerDispatch:
    """Two forwards of one launch, each with its own phase word."""

    @pytest.fixture
    def two(self, model: Path) -> tuple[ForwardHarness, CanaryManager]:
        harness = ForwardHarness(model, slots=512, kv_canary="none")
        runner = harness.runner
        config = CanaryConfig(mode=CanaryMode.LOG, real_data=RealData.ALL)
        rows = runner.req_to_token_pool.size
        groups = attach_canary_buffers(
            pool=runner.token_to_kv_pool,
            config=config,
            device=runner.device,
            is_draft=False,
            kv_token_id_vs_position_offset=0,
            req_to_token_pool=runner.req_to_token_pool,
            max_rows=rows,
            num_managers=2,
        )
        target = CanaryTarget(
            config=config,
            groups=groups,
            req_to_token_pool=runner.req_to_token_pool,
            kv_pool=runner.token_to_kv_pool,
            attn_backend=runner.attn_backend,
            page_size=runner.page_size,
            vocab_size=runner.model_config.vocab_size,
        )
        manager = CanaryManager(target, num_managers=2, rank=0)
        _patch_model_forward(runner.model, manager)
        runner.scopes = manager
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

    def test_pre_ops_maybe_inside_graph_asserts_outside_bracket(
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

    def test_pre_ops_maybe_inside_graph_dispatches_to_bracketed_sfm(
        self, two: tuple[ForwardHarness, CanaryManager]
    ) -> None:
        harness, manager = two
        state = manager.target.buffers.state
        row = harness.new_row([1, 2, 3, 4, 5])
        batch = harness.prepare(EXTEND, [(row, 4)])
        seen: list[list[int]] = []
        before_model = vars(launches)["before_model"]

        def watched(*args: Any, **kwargs: Any) -> None:
            before_model(*args, **kwargs)
            seen.append(state.phase.tolist())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launches, "before_model", watched)
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
        """The model's result passes through; an error skips the launches after it."""
        harness, manager = two
        row = harness.new_row([1, 2, 3, 4, 5])
        batch = harness.prepare(EXTEND, [(row, 4)])
        state = manager.target.buffers.state

        def model_forward(value: str, forward_batch: ForwardBatch) -> str:
            assert phases(state) == [Phase.AFTER_HEAD, 0]
            # No layers.
            manager.calls.leave_out()
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""The canary under tensor parallelism: silent on clean traffic, and a fault on one rank
stops all of them in the same step."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sglang
from sglang.srt.managers.front.scheduler_process import SchedulerProcess
from sglang.srt.managers.messages.errors import EngineFailure
from sglang.srt.utils.devices import cuda_device_count
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.mock_oracle import next_tokens
from sglang.test.scale import count, sampled
from sglang.test.tiny_models import write_mock_draft, write_mock_model

register_cpu_ci(est_time=28, suite="cpu")
register_cuda_ci(est_time=180, suite="cuda-serial")

DEVICE = "cuda" if cuda_device_count() >= 2 else "cpu"
VOCAB = 1000
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = list(range(30))
FORWARD = 12
# Rank 0 has the say; a fault elsewhere must reach it.
RANKS = sampled([1, 0], key=type, ci=2 if DEVICE == "cuda" else 1)

# A rank's process: plants one fault in forward number `forward`, and is slow to report
# its findings. A driver that is never idle is called before every forward.
FAULTY_RANK = """
import time

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.kv_canary.perturb import PerturbDriver, drivers_of
from kv_canary.reporter import ViolationReporter
from sglang.srt.managers.scheduler import build, scheduler_main

report = ViolationReporter.report

def report_slowly(self, entries, **options):
    entries = list(entries)
    if entries and not self.incidents:
        time.sleep(1.0)
    return report(self, entries, **options)

ViolationReporter.report = report_slowly

before_forward, forwards = PerturbDriver.before_forward, []

def on_one_rank(self, forward_batch):
    if self.is_draft == {is_draft}:
        forwards.append(None)
        if get_tp_group().rank == {rank} and len(forwards) == {forward}:
            self.arm({fault!r}, seed=1)
    before_forward(self, forward_batch)

PerturbDriver.before_forward = on_one_rank
PerturbDriver.is_idle = property(lambda self: False, lambda self, is_idle: None)
build_scheduler = build.build_scheduler

def build_with_faults(*args):
    scheduler = build_scheduler(*args)  # warm: no made-up request is damaged
    drivers_of(scheduler)
    return scheduler

build.build_scheduler = build_with_faults
scheduler_main.main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mock_model(
        tmp_path_factory.mktemp("mock"), vocab_size=VOCAB, max_position_embeddings=400
    )


def start_engine(model: Path, **options: Any) -> sglang.Engine:
    return sglang.Engine(
        model_path=str(model),
        tp_size=2,
        device=DEVICE,
        max_total_tokens=1200,
        chunked_prefill_size=64,
        max_running_requests=24,
        schedule_conservativeness=0.3,
        kv_canary_real_data="all",
        **{"kv_canary": "raise"} | options,
    )


@pytest.fixture
def start_faulty(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., sglang.Engine]]:
    """An engine of which one rank damages its KV cache in forward `FORWARD`."""
    engines: list[sglang.Engine] = []
    start = SchedulerProcess.start

    def start_engine_with(
        *, rank: int, fault: str, in_draft: bool = False, **options: Any
    ) -> sglang.Engine:
        script = FAULTY_RANK.format(
            rank=rank, fault=fault, forward=FORWARD, is_draft=in_draft
        )

        def start_ranks(*args: Any, **kwargs: Any) -> SchedulerProcess:
            return start(*args, command=(sys.executable, "-c", script), **kwargs)

        monkeypatch.setattr(SchedulerProcess, "start", staticmethod(start_ranks))
        engines.append(start_engine(model, **options))
        return engines[-1]

    yield start_engine_with
    for engine in engines:
        engine.shutdown()


def test_clean_traffic_is_silent(model: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    stems = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(3)]
    prompts = [
        rng.choice(stems)[: rng.randrange(151)]
        + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        for _ in range(count(ci=24, full=400))
    ]
    params = [GREEDY | {"max_new_tokens": rng.choice((1, 5, 60))} for _ in prompts]
    with start_engine(
        model, kv_canary_sweep_interval=8, kv_canary_report_dir=str(tmp_path)
    ) as engine:
        answers: Any = engine.generate(input_ids=prompts, sampling_params=params)
        (stats,) = engine.get_server_info()["internal_states"]
    for prompt, answer in zip(prompts, answers, strict=True):
        output = answer["output_ids"]
        predicted = next_tokens(prompt + output, vocab_size=VOCAB)
        assert output == predicted[len(prompt) - 1 : -1]
    assert stats["kv_canary_protected_tokens_total"] > 0
    assert stats["kv_canary_sweep_passes_total"] > 0
    assert set(stats["kv_canary_violations_total"].values()) == {0}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "fault", "reason"),
    sampled(
        [
            (0, "real_kv_used", "verify_real_kv"),
            (0, "early_free", "verify_freed"),
            (1, "real_kv_used", "verify_real_kv"),
            (1, "early_free", "verify_freed"),
        ],
        key=type,
        ci=4 if DEVICE == "cuda" else 2,
    ),
)
def test_a_fault_on_one_rank_stops_both(
    start_faulty: Callable[..., sglang.Engine],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    rank: int,
    fault: str,
    reason: str,
) -> None:
    engine = start_faulty(rank=rank, fault=fault, kv_canary_report_dir=str(tmp_path))
    pids = engine.scheduler_pids
    said: list[int] = []
    with pytest.raises(EngineFailure, match="kv_canary violation: ") as failure:
        answers: Any = engine.generate(
            input_ids=PROMPT,
            sampling_params=GREEDY | {"max_new_tokens": 100},
            stream=True,
        )
        for answer in answers:
            said = answer["output_ids"]
    _wait_gone(pids)
    # Rank 0 answers, whoever found it.
    assert f"fail_reason={reason} " in str(failure.value)
    assert "another rank" not in str(failure.value)
    (report,) = tmp_path.glob("*.json")
    incident = json.loads(report.read_text())
    assert incident["rank"] == rank
    assert engine.canary_incidents() == [incident]
    assert all(reason in v["reasons"] for v in incident["violations"])
    # The step that failed said nothing, and nothing wrong was said before it.
    assert len(said) == FORWARD - 1
    if DEVICE == "cpu":  # elsewhere the capture of graphs counted, too
        assert incident["forward"] == FORWARD
    predicted = next_tokens(PROMPT + said, vocab_size=VOCAB)
    assert said == predicted[len(PROMPT) - 1 : -1]
    # The evidence is in the log, whichever rank has it.
    log = capfd.readouterr().err
    assert re.search(f"kv_canary violation: .*fail_reason={reason}", log), log
    assert f"The scheduler of rank {rank} failed" in log


@pytest.mark.parametrize("rank", RANKS)
def test_log_mode_serves_on(
    start_faulty: Callable[..., sglang.Engine], tmp_path: Path, rank: int
) -> None:
    engine = start_faulty(
        rank=rank,
        fault="early_free",
        kv_canary="log",
        kv_canary_report_dir=str(tmp_path),
    )
    params = GREEDY | {"max_new_tokens": 30}
    answer: Any = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert len(answer["output_ids"]) == 30
    (report,) = tmp_path.glob("*.json")
    incident = json.loads(report.read_text())
    assert incident["rank"] == rank
    # Rank 0 answers for all.
    assert engine.canary_incidents() == [incident]
    (stats,) = engine.get_server_info()["internal_states"]
    reasons = Counter(r for v in incident["violations"] for r in v["reasons"])
    assert Counter(stats["kv_canary_violations_total"]) == reasons


@pytest.mark.parametrize("rank", RANKS)
def test_a_fault_in_one_rank_s_draft_pool_stops_both(
    model: Path,
    start_faulty: Callable[..., sglang.Engine],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    rank: int,
) -> None:
    draft = _write_draft(tmp_path)
    reports = tmp_path / "reports"
    engine = start_faulty(
        rank=rank,
        fault="real_kv_used",
        in_draft=True,
        kv_canary_report_dir=str(reports),
        page_size=4,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(draft),
        speculative_num_steps=4,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=12,
    )
    pids = engine.scheduler_pids
    said: list[int] = []
    with pytest.raises(EngineFailure, match="kv_canary violation: ") as failure:
        answers: Any = engine.generate(
            input_ids=PROMPT,
            sampling_params=GREEDY | {"max_new_tokens": 200},
            stream=True,
        )
        for answer in answers:
            said = answer["output_ids"]
    _wait_gone(pids)
    line = "launch_tag=draft.verify group=full fail_reason=verify_real_kv "
    assert line in str(failure.value)
    (report,) = reports.glob("*.json")
    incident = json.loads(report.read_text())
    assert incident["rank"] == rank
    for violation in incident["violations"]:
        assert violation["worker"] == "draft"
        assert violation["reasons"] == ["verify_real_kv"]
    # A prefill and some verifications had been said, all of it right.
    assert len(said) >= 3
    predicted = next_tokens(PROMPT + said, vocab_size=VOCAB)
    assert said == predicted[len(PROMPT) - 1 : -1]
    log = capfd.readouterr().err
    assert "launch_tag=draft.verify group=full fail_reason=verify_real_kv" in log
    assert f"The scheduler of rank {rank} failed" in log


@pytest.mark.parametrize(
    ("rank", "in_draft"),
    sampled([(1, False), (1, True), (0, False), (0, True)], key=type, ci=1),
)
def test_a_fault_on_one_rank_is_healed_on_both(
    model: Path,
    start_faulty: Callable[..., sglang.Engine],
    tmp_path: Path,
    rank: int,
    in_draft: bool,
) -> None:
    """Ranks that took other steps would stop each other; several requests run on."""
    options: dict[str, Any] = {"page_size": 4}
    if in_draft:
        options |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(_write_draft(tmp_path)),
            "speculative_num_steps": 4,
            "speculative_eagle_topk": 4,
            "speculative_num_draft_tokens": 12,
        }
    reports = tmp_path / "reports"
    engine = start_faulty(
        rank=rank,
        fault="early_free",
        in_draft=in_draft,
        kv_canary="heal",
        kv_canary_report_dir=str(reports),
        **options,
    )
    prompts = [[(7 * i + j) % VOCAB for j in range(30)] for i in range(4)]
    answers: Any = engine.generate(
        input_ids=prompts,
        sampling_params=[
            GREEDY | {"max_new_tokens": 60},
            {"temperature": 1.0, "top_k": 5, "sampling_seed": 3, "max_new_tokens": 40},
            GREEDY | {"max_new_tokens": 40},
            GREEDY | {"max_new_tokens": 50},
        ],
    )
    (stats,) = engine.get_server_info()["internal_states"]
    for i in (0, 2, 3):
        output = answers[i]["output_ids"]
        predicted = next_tokens(prompts[i] + output, vocab_size=VOCAB)
        assert output == predicted[len(prompts[i]) - 1 : -1]
    assert sum(stats["kv_canary_heals_total"].values()) == 1
    assert stats["kv_canary_heals_total"]["found elsewhere"] == (rank == 1)
    assert stats["kv_canary_quarantined_pages"] == 0
    (report,) = reports.glob("*.json")
    incident = json.loads(report.read_text())
    assert incident["rank"] == rank
    assert incident["healing"]["num_recomputed"] >= 1
    assert engine.canary_incidents() == [incident]


def _write_draft(folder: Path) -> Path:
    return write_mock_draft(
        folder / "draft",
        kind="EAGLE",
        source="hidden",
        vocab_size=VOCAB,
        max_position_embeddings=400,
    )


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

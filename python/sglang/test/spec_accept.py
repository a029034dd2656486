"""Accept lengths of an engine, request by request, compared with the mock oracle's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.draft_slots import has_draft_region
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.batch.forward_result import GenerationBatchResult
from sglang.srt.managers.batch.req import Req
from sglang.srt.managers.batch.schedule_batch import LaunchRecord
from sglang.srt.managers.scheduler.result_processor import ProcessedBatch
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.models.mock_draft_math import DraftSettings
from sglang.test.harness import EngineHarness, Finished
from sglang.test.mock_draft_oracle import Answer, DraftOracle
from sglang.test.mock_oracle import next_tokens
from sglang.test.spec_parity import Ask


@dataclass(kw_only=True)
class Run:
    """The verifications of one request between two prefills.

    Fields:
        start: tokens that had KV at the beginning.
        accept_lens: accept length of each verification.
        tokens: all tokens of the request at the end.
    """

    start: int
    accept_lens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class AcceptRecorder:
    """Records the result of every verification of a scheduler from now on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._process = scheduler._results.process
        # By request id and number of its retractions.
        self.runs: dict[tuple[str, int], Run] = {}
        self.verifications: Counter[str] = Counter()
        self.finished: dict[str, Req] = {}
        scheduler._results.process = self._record  # type: ignore[method-assign]

    def _record(
        self,
        launched: LaunchRecord,
        result: GenerationBatchResult,
        rows: Sequence[int] | None = None,
        **options: Any,
    ) -> ProcessedBatch:
        before = [
            (row, req, len(req.tokens))
            for row, req in enumerate(launched.reqs)
            if launched.shape is not None and not req.is_finished
        ]
        processed = self._process(launched, result, rows, **options)
        for row, req, length in before:
            if len(req.tokens) == length:
                continue  # aborted
            assert result.accept_lens is not None
            key = (req.rid, req.num_restarts)
            run = self.runs.setdefault(key, Run(start=length - 1))
            run.accept_lens.append(result.accept_lens[row])
            run.tokens = list(req.tokens[: req.prompt_len + req.output_len])
            self.verifications[req.rid] += 1
            self.finished[req.rid] = req
        return processed

    def lens(self) -> Counter[int]:
        return Counter(n for run in self.runs.values() for n in run.accept_lens)

    def mean(self) -> float:
        lens = self.lens()
        return sum(n * times for n, times in lens.items()) / lens.total()

    def check_counters(self) -> None:
        """Check `spec_verify_ct` and `spec_accept_tokens` against the recorded ones."""
        for rid, req in self.finished.items():
            assert req.verifications.count == self.verifications[rid], rid
            assert req.verifications.accepted_tokens <= req.output_len


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Accept lengths of a set of runs.

    Fields:
        lens: histogram of accept lengths.
        off_first_branch: accepted drafts off the first branch.
        differing: runs that the oracle does not explain.
    """

    lens: Counter[int]
    off_first_branch: int
    differing: list[tuple[str, int]]


def predicted_acceptance(
    recorder: AcceptRecorder, harness: EngineHarness, rids: Sequence[str]
) -> Acceptance:
    """Compare the runs of the requests `rids` with the mock draft's oracle.

    They must be plain greedy requests.
    """
    draft = harness.server_args.speculative_draft_model_path
    assert draft is not None
    oracle = DraftOracle(
        shape=harness.server_args.tree_shape,
        settings=DraftSettings.from_config(ModelConfig.from_path(Path(draft))),
        is_exact=has_draft_region(harness.server_args),
    )
    wanted = set(rids)
    keys = [key for key in recorder.runs if key[0] in wanted]
    runs = [recorder.runs[key] for key in keys]
    predictions = oracle.predict(
        [Answer(tokens=run.tokens, prompt_len=run.start) for run in runs],
        followed=[run.accept_lens for run in runs],
    )
    return Acceptance(
        lens=Counter(n for run in runs for n in run.accept_lens),
        off_first_branch=sum(sum(p.off_first_branch) for p in predictions),
        differing=[
            key
            for key, run, prediction in zip(keys, runs, predictions, strict=True)
            if not prediction.explains(run.accept_lens)
        ],
    )


def assert_oracle(
    asks: Sequence[Ask], answers: dict[str, Finished], *, vocab_size: int
) -> None:
    """Check that plain answers equal the mock model oracle's answers."""
    for i, ask in enumerate(asks):
        if not ask.is_plain:
            continue
        out = answers[str(i)].output_ids
        predicted = next_tokens(ask.prompt + out, vocab_size=vocab_size)
        assert out == predicted[len(ask.prompt) - 1 : len(ask.prompt) - 1 + len(out)]

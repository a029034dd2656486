"""The parts of the benchmarks: metrics, reports, datasets, wires, workers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time

import pytest

from sglang.bench_utils.datasets import DatasetArgs, make_requests, text_ids
from sglang.bench_utils.floor import (
    Bandwidth,
    floor_report,
    measure_bandwidth,
    weight_bytes_per_step,
)
from sglang.bench_utils.forward_runner import ForwardRunner
from sglang.bench_utils.http_load import LoadPace
from sglang.bench_utils.launch import (
    flush_when_idle,
    import_extra,
    json_object_flag,
    run_cli,
)
from sglang.bench_utils.machine_load import LoadWatch
from sglang.bench_utils.metrics import (
    RequestRecord,
    StreamClock,
    percentile,
    summarize,
)
from sglang.bench_utils.report import format_table, print_report, rate, ratio
from sglang.bench_utils.speed_bench import by_category, category_table, read_rows
from sglang.bench_utils.wire import BACKENDS, BodyOptions, WireError, sse_events
from sglang.bench_utils.worker import BenchWorker, WorkerError, worker_environment
from sglang.bench_utils.workloads import Workloads
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import BYTE_VOCAB, EOS_ID, write_tiny_model

register_cpu_ci(est_time=8, suite="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(str(model))


class TestReport:
    def test_nothing_is_divided_by_zero(self):
        assert rate(5, 0.0) == 0.0
        assert rate(6, 2.0) == 3.0
        assert ratio(1.0, 0.0) is None
        assert ratio(3.0, 2.0) == 1.5

    def test_table_is_aligned(self):
        table = format_table(("Name", "a"), [("longer name", 1.234), ("x", None)])
        lines = ["Name            a", "longer name  1.23", "x               -"]
        assert table.splitlines() == lines

    def test_last_line_is_the_report(self, tmp_path, capsys):
        file = tmp_path / "out.jsonl"
        full = {"a": 1, "details": [2]}
        print("table")
        for _ in range(2):
            print_report(full, output_file=str(file), compact={"a": 1})
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"a": 1}
        assert [json.loads(line) for line in file.read_text().splitlines()] == [
            full
        ] * 2

    def test_nan_is_refused(self):
        with pytest.raises(ValueError):
            print_report({"a": float("nan")})


class TestSpeedBench:
    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            (None, ["--dataset-path", "no such file"]),
            ("", ["no row"]),
            ("{", ["line 1"]),
            ('{"category": "a", "turns": ["b"]}\n{"turns": ["b"]}', ["line 2"]),
            ('{"category": "a", "turns": []}', ["line 1", "no prompt"]),
        ],
    )
    def test_files_are_refused(self, tmp_path, lines, words):
        path = tmp_path / "rows.jsonl"
        if lines is not None:
            path.write_text(lines)
        with pytest.raises(ValueError) as error:
            read_rows(str(path))
        for word in words:
            assert word in str(error.value)

    def test_a_file_is_needed(self):
        with pytest.raises(ValueError, match="needs --dataset-path"):
            read_rows(None)

    def test_acceptance_is_counted_over_verifications(self):
        records = [
            RequestRecord(output_tokens=9, verifications=4, verified_tokens=8.0),
            RequestRecord(output_tokens=9, verifications=1, verified_tokens=4.0),
            RequestRecord(output_tokens=9, verifications=2, verified_tokens=6.0),
            RequestRecord(verifications=5, verified_tokens=5.0, error="gone"),
            RequestRecord(verifications=5, verified_tokens=5.0),
        ]
        found = by_category(["a", "a", "b", "a", None], records)
        lengths = {name: each["accept_length"] for name, each in found.items()}
        assert lengths == {"a": 12 / 5, "b": 3.0, "overall": 18 / 7}
        assert "accept length" in category_table(found)
        assert by_category([None], [RequestRecord()]) == {}


class TestMetrics:
    def test_percentile_interpolates(self):
        assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
        assert percentile([0.0, 10.0], 90) == 9.0
        assert percentile([7.0], 99) == 7.0
        assert percentile([], 50) == 0.0

    def test_stream_clock(self):
        record = RequestRecord()
        clock = StreamClock(record, began=10.0)
        clock.on_tokens(1, 10.5)
        clock.on_tokens(0, 10.6)
        clock.on_tokens(2, 11.5)
        assert record.ttft == 0.5
        # Two tokens came in one chunk, one second after the first.
        assert record.itl == [0.5, 0.5]
        assert record.latency == 1.5

    def test_summary_of_a_hand_example(self):
        records = [
            RequestRecord(
                prompt_tokens=10,
                output_tokens=5,
                cached_tokens=4,
                latency=1.0,
                ttft=0.2,
                itl=[0.2] * 4,
            ),
            RequestRecord(
                prompt_tokens=20,
                output_tokens=1,
                cached_tokens=2,
                latency=0.5,
                ttft=0.5,
            ),
            RequestRecord(latency=99.0, error="refused"),
        ]
        summary = summarize(records, duration=2.0)
        assert (summary["completed"], summary["failed"]) == (2, 1)
        assert summary["request_throughput"] == 1.0
        assert summary["output_throughput"] == 3.0
        assert summary["total_throughput"] == 18.0
        assert summary["concurrency"] == 0.75
        assert summary["cache_hit_rate"] == 0.2
        assert summary["mean_e2e_latency_ms"] == 750.0
        assert summary["median_ttft_ms"] == 350.0
        # One token has no time per further token.
        assert summary["mean_tpot_ms"] == pytest.approx(200.0)
        assert summary["p99_itl_ms"] == 200.0

    def test_nothing_measured_is_null(self):
        summary = summarize([RequestRecord(error="x")], duration=0.0)
        assert summary["request_throughput"] == 0.0
        assert summary["mean_ttft_ms"] is None
        assert summary["cache_hit_rate"] is None
        json.dumps(summary, allow_nan=False)


class TestDatasets:
    def test_seed_decides(self, tokenizer):
        args = DatasetArgs(num_prompts=3, random_input_len=40, random_output_len=9)
        requests = make_requests(args, tokenizer)
        assert requests == make_requests(args, tokenizer)
        other = DatasetArgs(
            num_prompts=3, random_input_len=40, random_output_len=9, seed=2
        )
        assert requests != make_requests(other, tokenizer)

    @pytest.mark.parametrize("name", ["random", "random-ids"])
    def test_lengths_stay_in_range(self, tokenizer, name):
        args = DatasetArgs(
            dataset_name=name,
            num_prompts=30,
            random_input_len=20,
            random_output_len=8,
            random_range_ratio=0.5,
        )
        requests = make_requests(args, tokenizer)
        assert len(requests) == 30
        assert {len(r.input_ids) for r in requests} <= set(range(10, 21))
        assert {r.output_len for r in requests} <= set(range(4, 9))
        assert all(EOS_ID not in r.input_ids for r in requests)
        if name == "random":
            assert all(tokenizer.encode(r.text) == r.input_ids for r in requests)

    def test_groups_share_their_prefix(self, tokenizer):
        args = DatasetArgs(
            dataset_name="generated-shared-prefix",
            gsp_num_groups=3,
            gsp_prompts_per_group=4,
            gsp_system_prompt_len=30,
            gsp_question_len=5,
            gsp_output_len=2,
        )
        requests = make_requests(args, tokenizer)
        prefixes = {tuple(r.input_ids[:30]) for r in requests}
        assert (len(requests), len(prefixes)) == (12, 3)
        assert {len(r.input_ids) for r in requests} == {35}

    def test_text_of_any_length(self, tokenizer):
        ids = text_ids(tokenizer, random.Random(0), 5000)
        assert len(ids) == 5000
        assert max(ids) < BYTE_VOCAB

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("dataset_name", "sharegpt"),
            ("num_prompts", 0),
            ("random_range_ratio", 1.5),
            ("seed", -1),
        ],
    )
    def test_bad_values_name_the_flag(self, field, value):
        with pytest.raises(ValueError, match="--" + field.replace("_", "-")):
            DatasetArgs(**{field: value})

    def test_workloads_have_fixed_lengths_and_fresh_text(self, tokenizer):
        workloads = Workloads(tokenizer, seed=1, is_quick=False)
        first, second = workloads.mixed(0), workloads.mixed(1)
        assert first.output_lens == second.output_lens
        assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts]
        assert all(32 <= len(p) <= 256 for p in first.prompts)
        assert not set(map(tuple, first.prompts)) & set(map(tuple, second.prompts))
        shared = workloads.shared_prefix(0)
        assert len({tuple(p[:900]) for p in shared.prompts}) == 1
        assert {len(p) for p in shared.prompts} == {1000}


class TestPace:
    def test_all_at_once(self):
        assert LoadPace().arrivals(3) == [0.0] * 3

    def test_poisson(self):
        times = LoadPace(request_rate=50.0, seed=3).arrivals(2000)
        assert times[0] == 0.0
        assert times == sorted(times)
        assert times == LoadPace(request_rate=50.0, seed=3).arrivals(2000)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.02, rel=0.1)
        # Exponential gaps: the standard deviation equals the mean.
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert variance**0.5 == pytest.approx(mean, rel=0.15)


OPTIONS = BodyOptions(model="m", stream=True, ignore_eos=True, send_ids=False)


class TestWire:
    def collect(self, chunks):
        async def feed():
            for chunk in chunks:
                yield chunk

        async def run():
            return [event async for event in sse_events(feed())]

        return asyncio.run(run())

    def test_events_may_be_cut_anywhere(self):
        stream = (
            b'data: {"a": 1}\n\n: ping\n\ndata: {"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
        )
        whole = self.collect([stream])
        assert whole == [{"a": 1}, {"b": "\u00e9"}]
        assert self.collect([stream[i : i + 1] for i in range(len(stream))]) == whole

    @pytest.mark.parametrize(
        ("stream", "message"),
        [
            (b'data: {"a": 1}\n\n', "before"),
            (b'data: {"error": {"message": "no room"}}\n\n', "no room"),
            (b"data: nonsense\n\n", "not JSON"),
        ],
    )
    def test_broken_streams_are_errors(self, stream, message):
        with pytest.raises(WireError, match=message):
            self.collect([stream])

    def test_generate_counts_cumulative_tokens(self):
        record = RequestRecord()
        clock = StreamClock(record, began=0.0)
        for now, tokens in ((1.0, 1), (2.0, 3)):
            meta = {
                "finish_reason": None,
                "completion_tokens": tokens,
                "prompt_tokens": 7,
                "cached_tokens": 2,
            }
            event = {"text": "x" * tokens, "meta_info": meta}
            BACKENDS["sglang"].read(event, record, clock, now)
        assert (record.output_tokens, record.ttft, record.itl) == (3, 1.0, [0.5, 0.5])
        assert (record.prompt_tokens, record.cached_tokens) == (7, 2)

    def test_openai_takes_counts_from_usage(self):
        record = RequestRecord()
        clock = StreamClock(record, began=0.0)
        read = BACKENDS["sglang-oai-chat"].read
        read({"choices": [{"delta": {"role": "assistant"}}]}, record, clock, 0.5)
        assert record.ttft is None
        read({"choices": [{"delta": {"content": "ab"}}]}, record, clock, 1.0)
        usage = {"prompt_tokens": 9, "completion_tokens": 4}
        read({"choices": [], "usage": usage}, record, clock, 2.0)
        assert (record.ttft, record.output_tokens, record.text) == (1.0, 4, "ab")
        assert record.cached_tokens is None

    def test_bodies(self, tokenizer):
        args = DatasetArgs(dataset_name="random-ids", num_prompts=1)
        request = make_requests(args, tokenizer)[0]
        generate = BACKENDS["sglang"].body(request, OPTIONS)
        assert generate["input_ids"] == request.input_ids
        assert generate["sampling_params"]["max_new_tokens"] == request.output_len
        completion = BACKENDS["sglang-oai"].body(request, OPTIONS)
        assert completion["prompt"] == request.input_ids
        chat = BACKENDS["sglang-oai-chat"].body(request, OPTIONS)
        assert chat["messages"] == [{"role": "user", "content": request.text}]


class TestLaunch:
    def test_configuration_errors_are_one_line(self, capsys):
        def fail() -> int:
            raise ValueError("--x 3 is bad")

        assert run_cli(fail) == 2
        assert capsys.readouterr().err == "error: --x 3 is bad\n"

    def test_missing_package_names_the_extra(self):
        with pytest.raises(ValueError, match=r"sglang-canary\[bench\]"):
            import_extra("no_such_package_anywhere")

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_bad_json_names_the_flag(self, text):
        with pytest.raises(ValueError, match="--extra"):
            json_object_flag("--extra", text)

    def test_flush_waits_for_idle(self):
        answers = iter([False, False, True])
        flush_when_idle(lambda: next(answers))
        assert next(answers, None) is None


class TestFloor:
    def test_weights_of_a_step(self, model):
        runner = ForwardHarness(model).runner
        found = weight_bytes_per_step(runner.model)
        # q, k, v and o; gate, up and down; the two norms. Then head and last norm.
        layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96 + 2 * 64
        values = 2 * layer + 64 * 264 + 64
        # Panels of 32 columns: the head's 264 outputs may be padded to 288.
        assert 4 * values <= found <= 4 * (values + 64 * 24)

    def test_report(self):
        bandwidth = Bandwidth(read_gb_s=10.0, copy_gb_s=8.0, resident_read_gb_s=0.0)
        report = floor_report(20_000_000, bandwidth)
        assert report["floor_ms"] == pytest.approx(2.0)
        assert report["floor_tok_s"] == pytest.approx(500.0)
        assert report["resident_floor_tok_s"] == 0.0

    def test_measuring(self):
        bandwidth = measure_bandwidth(1 << 16, big_bytes=1 << 22, budget_seconds=0.02)
        assert min(bandwidth.read_gb_s, bandwidth.copy_gb_s) > 0.01
        assert bandwidth.resident_read_gb_s > 0.01


class TestForwardRunner:
    def test_equals_the_harness(self, model):
        args = ServerArgs(
            model_path=str(model), max_total_tokens=128, max_running_requests=2
        )
        runner = ForwardRunner(args)
        prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
        for _ in range(3):  # what `release` forgets would fill the pool
            tokens = runner.prefill(prompts)
            steps = [tokens.tolist()]
            for _ in range(6):
                tokens = runner.decode(tokens)
                steps.append(tokens.tolist())
            runner.release()
        harness = ForwardHarness(model)
        for i, prompt in enumerate(prompts):
            row = harness.new_row(prompt)
            logits = harness.extend([(row, len(prompt))])
            for step in steps:
                assert int(logits.argmax()) == step[i]
                harness.append(row, step[i])
                logits = harness.extend([(row, len(harness.tokens(row)))])

    def test_what_does_not_fit_names_the_flags(self, model):
        args = ServerArgs(
            model_path=str(model), max_total_tokens=16, max_running_requests=1
        )
        runner = ForwardRunner(args)
        with pytest.raises(ValueError, match="--max-running-requests"):
            runner.prefill([[1], [2]])
        with pytest.raises(ValueError, match="--max-total-tokens"):
            runner.prefill([[1] * 17])
        runner.release()
        runner.prefill([[1] * 16])


CHILD = """
import sys
from sglang.bench_utils.worker import serve
def spin(seconds):
    import time
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
def fail():
    raise KeyError("reason")
def leave():
    sys.exit(3)
def chatter():
    print("not an answer")
    return [1, 2]
serve({"spin": spin, "fail": fail, "leave": leave, "chatter": chatter})
"""


def child(name):
    environment = worker_environment(dict(os.environ), threads=1)
    return BenchWorker(name, [sys.executable, "-c", CHILD], environment=environment)


class TestWorker:
    def test_calls_errors_and_end(self):
        with child("side") as worker:
            assert worker.call("chatter") == [1, 2]
            with pytest.raises(WorkerError, match="reason"):
                worker.call("fail")
            assert worker.call("chatter") == [1, 2]
            with pytest.raises(WorkerError, match="side ended with exit code 3"):
                worker.call("leave")

    def test_load_is_told_apart(self):
        cores = os.sched_getaffinity(0)
        with child("busy") as busy, child("idle") as idle:
            for worker in (busy, idle):
                worker.call("chatter")
            watch = LoadWatch({"busy": busy.pid, "idle": idle.pid}, cores)
            began = time.perf_counter()
            busy.call("spin", seconds=0.3)
            share = 0.3 / (time.perf_counter() - began)
            usage = watch.usage("busy")
        assert usage.active == pytest.approx(share, rel=0.5)
        assert usage.waiting < 0.2
        assert 0.0 <= usage.foreign <= len(cores) + 0.1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

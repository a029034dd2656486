"""The benchmark commands from command line to last line, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang import bench_offline_throughput, bench_one_batch, bench_serving
from sglang.bench_utils.local_server import LocalServer
from sglang.bench_utils.worker import worker_environment
from sglang.srt.managers.front.crash_dump import CrashDump
from sglang.srt.managers.messages.io_struct import GenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import is_full
from sglang.test.tiny_models import write_tiny_model

register_cpu_ci(est_time=40, suite="cpu")

REPO = Path(__file__).resolve().parents[3]
PEERS = REPO / "lab" / "peers" / "cpu_generate.py"
SERVER_FIGURES = REPO / "benchmark" / "e2e" / "server_figures.py"
SMALL = ["--num-prompts", "6", "--random-input-len", "24", "--random-output-len", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(write_tiny_model(folder, "LlamaForCausalLM"))


@pytest.fixture(scope="module")
def server(model):
    flags = ["--model-path", model, "--max-total-tokens", "2048"]
    with LocalServer([*flags, "--enable-cache-report"], threads=1) as running:
        yield running


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


class TestOneBatch:
    def test_flags(self):
        server_args, args = bench_one_batch.parse_args(
            ["--batch-size", "1", "16", "--input-len", "512", "--output-len", "8", "32"]
        )
        assert args.shapes() == [(1, 512, 8), (1, 512, 32), (16, 512, 8), (16, 512, 32)]
        assert server_args.max_running_requests == 16
        flags = "--batch 2 --trust-remote-code --dp 1"
        assert bench_one_batch.parse_args(flags.split())[1].batch_size == [2]
        _, args = bench_one_batch.parse_args([])
        assert args.shapes() == [(1, 1024, 16)]

    def test_run(self, model, capsys, tmp_path):
        file = tmp_path / "result.jsonl"
        command = ["--model-path", model, "--batch-size", "1", "3", "--input-len", "9"]
        command += ["--output-len", "5", "--result-filename", str(file)]
        assert bench_one_batch.main(command) == 0
        report = last_line(capsys)
        assert report == json.loads(file.read_text())
        assert [r["batch_size"] for r in report["results"]] == [1, 3]
        for result in report["results"]:
            assert result["prefill_latency"] < result["total_latency"]
            tokens = result["batch_size"] * 14
            assert result["overall_throughput"] == pytest.approx(
                tokens / result["total_latency"]
            )
        assert report["floor"]["weight_bytes"] > 0

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            (["--batch-size", "0"], "--batch-size"),
            (["--input-len", "300"], "--input-len"),
            (["--kv-canary", "log"], "--kv-canary"),
        ],
    )
    def test_bad_values(self, model, capsys, command, words):
        assert bench_one_batch.main(["--model-path", model, *command]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.out == ""

    def test_one_output_token_has_no_decode(self, model, capsys):
        command = ["--model-path", model, "--input-len", "4", "--output-len", "1"]
        assert bench_one_batch.main(command) == 0
        result = last_line(capsys)["results"][0]
        assert result["median_decode_throughput"] == 0.0
        assert result["floor_share"] is None


class TestOfflineThroughput:
    def test_random(self, model, capsys):
        command = ["--model-path", model, *SMALL, "--random-range-ratio", "1.0"]
        assert bench_offline_throughput.main(command) == 0
        report = last_line(capsys)
        assert report["successful_requests"] == 6
        assert report["total_input_tokens"] == 6 * 24
        assert report["total_output_tokens"] == 6 * 8
        assert report["output_throughput"] == pytest.approx(
            48 / report["total_latency"]
        )

    def test_shared_prefix_hits_the_cache(self, model, capsys):
        command = ["--model-path", model, "--dataset-name", "generated-shared-prefix"]
        command += ["--gsp-num-groups", "2", "--gsp-prompts-per-group", "6"]
        command += ["--gsp-system-prompt-len", "100", "--gsp-question-len", "10"]
        command += ["--gsp-output-len", "3", "--chunked-prefill-size", "64"]
        assert bench_offline_throughput.main(command) == 0
        report = last_line(capsys)
        # Both prefixes are computed, the other prompts may share them.
        assert 0.4 < report["cache_hit_rate"] <= 10 * 100 / (12 * 110) + 0.01

    def test_refusals(self, model, capsys):
        command = ["--model-path", model, "--num-prompts", "2", "--skip-warmup"]
        assert bench_offline_throughput.main(command) == 2
        assert "256 tokens" in capsys.readouterr().err  # the context
        bad_body = ["--extra-request-body", "[]", *SMALL]
        assert bench_offline_throughput.main(["--model-path", model, *bad_body]) == 2
        assert "--extra-request-body" in capsys.readouterr().err


class TestServing:
    def run(self, server, capsys, *flags):
        command = ["--base-url", server.url, *SMALL, *flags]
        assert bench_serving.main(command) == 0
        return last_line(capsys)

    @pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
    def test_backends(self, server, capsys, backend):
        # Long enough that a busy machine cannot gather an answer into one chunk.
        length = ["--random-output-len", "200"]
        report = self.run(
            server, capsys, "--backend", backend, "--flush-cache", *length
        )
        assert (report["completed"], report["failed"]) == (6, 0)
        assert report["mean_ttft_ms"] <= report["mean_e2e_latency_ms"]
        assert report["p99_itl_ms"] is not None
        fixed = self.run(
            server, capsys, "--backend", backend, "--random-range-ratio", "1.0"
        )
        assert fixed["total_output_tokens"] == 6 * 8
        # The chat template adds tokens of its own.
        assert fixed["total_input_tokens"] >= 6 * 24
        assert fixed["cache_hit_rate"] is not None

    def test_pace_and_details(self, server, capsys, tmp_path):
        file = tmp_path / "out.jsonl"
        report = self.run(
            server,
            capsys,
            *("--dataset-name", "random-ids", "--request-rate", "200"),
            *("--max-concurrency", "2", "--output-file", str(file), "--output-details"),
        )
        assert report["concurrency"] <= 2.0
        full = json.loads(file.read_text())
        assert len(full["ttfts"]) == 6
        assert sum(full["output_lens"]) == report["total_output_tokens"]
        assert "ttfts" not in report

    def test_a_crash_dump_is_sent_again(self, server, capsys, tmp_path):
        """As it was: token ids, lengths, parameters; at its times or all at once."""
        now = [0.0]
        dump = CrashDump(tmp_path, wall_clock=lambda: now[0])
        for i, length in enumerate((5, 9, 30)):
            params = SamplingParams(
                max_new_tokens=4 + i, ignore_eos=True, temperature=0.5, top_k=3, n=2
            )
            dump.on_sent(
                GenerateReq(
                    rid=f"r{i}",
                    input_ids=list(range(3, 3 + length)),
                    sampling_params=params,
                    extra_key="digest" if i else None,
                    stream=bool(i % 2),
                )
            )
            now[0] += 0.25
        path = str(dump.write("a reason"))
        for flags, rate in (([], "recorded"), (["--request-rate", "inf"], "inf")):
            report = self.run(server, capsys, "--replay", path, *flags)
            assert (report["completed"], report["failed"]) == (3, 0)
            assert report["total_input_tokens"] == 5 + 9 + 30
            assert report["total_output_tokens"] == 4 + 5 + 6
            assert (report["dataset_name"], report["request_rate"]) == (
                "crash-dump",
                rate,
            )
            if rate == "recorded":
                assert report["duration"] >= 0.5

    def test_classes_of_text(self, server, capsys, tmp_path):
        rows = [
            {"category": name, "turns": [f"{name} {i}", "and then?"], "source": "x"}
            for name in ("coding", "math")
            for i in range(2)
        ]
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        flags = ["--dataset-name", "speed-bench", "--dataset-path", str(path)]
        report = self.run(server, capsys, *flags, "--speed-bench-output-len", "8")
        found = report["by_category"]
        assert list(found) == ["coding", "math", "overall"]
        assert [each["requests"] for each in found.values()] == [2, 2, 4]
        assert found["overall"]["output_tokens"] == 32
        assert found["overall"]["accept_length"] is None

    def test_without_stream(self, server, capsys):
        report = self.run(server, capsys, "--disable-stream", "--tokenize-prompt")
        assert report["completed"] == 6
        assert report["mean_ttft_ms"] is None
        assert report["mean_e2e_latency_ms"] > 0.0

    def test_failed_requests_are_counted(self, server, capsys):
        flags = ["--warmup-requests", "0", "--random-input-len", "400"]
        command = ["--base-url", server.url, *SMALL, *flags]
        command += ["--random-range-ratio", "1.0", "--disable-tqdm"]
        assert bench_serving.main(command) == bench_serving.ALL_FAILED
        captured = capsys.readouterr()
        assert "6 request(s) failed" in captured.err
        assert json.loads(captured.out.splitlines()[-1])["failed"] == 6

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--request-rate", "0"], "--request-rate"),
            (["--max-concurrency", "0"], "--max-concurrency"),
            (["--output-details"], "--output-file"),
            (["--tokenize-prompt", "--backend", "sglang-oai-chat"], "chat"),
            (["--base-url", "http://127.0.0.1:9"], "launch_server"),
        ],
    )
    def test_refusals(self, capsys, flags, words):
        assert bench_serving.main(flags) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.out == ""

    def test_unknown_choice_and_flag(self, capsys):
        for flags in (["--backend", "vllm"], ["--no-such-flag"]):
            with pytest.raises(SystemExit) as leaving:
                bench_serving.main(flags)
            assert leaving.value.code == 2
            assert flags[0] in capsys.readouterr().err


def run_script(script, *flags):
    core = str(min(os.sched_getaffinity(0)))
    environment = worker_environment(dict(os.environ), threads=1)
    result = subprocess.run(
        ["taskset", "-c", core, sys.executable, str(script), *flags],
        env=environment,
        capture_output=True,
        text=True,
    )
    return result, core


# Each starts several engines one after the other, some of them other projects'.
with_whole_counts = pytest.mark.skipif(not is_full(), reason="with whole counts")


class TestPeers:
    @with_whole_counts
    def test_quick_run(self, model):
        flags = ["--quick", "--rounds", "1", "--model-path", model]
        result, core = run_script(PEERS, *flags)
        assert result.returncode == 0, result.stderr
        *table, last = result.stdout.splitlines()
        report = json.loads(last)
        assert report["cores"] == 1
        for key in ("ratio_b1", "ratio_b16", "ratio_b16_equal", "ratio_shared_prefix"):
            assert report[key] > 0.0
        assert report["peers"]["transformers"] == "measured"
        # Greedy outputs of the same weights agree up to near-ties.
        assert report["b1"]["same_tokens"]["transformers"] > 0.7
        assert report["first_token"]["512"]["forward_ms"] > 0.0
        assert report["floor"]["floor_tok_s"] > 0.0
        assert any(line.startswith("Prefix cache") for line in table)

    def test_refusals(self):
        for flags, words in (
            (["--cores", "4096"], "core 4096 is not available"),
            (["--cores", "a"], "--cores a"),
            (["--rounds", "0"], "--rounds 0"),
        ):
            result, _ = run_script(PEERS, *flags)
            assert result.returncode == 2
            assert words in result.stderr


class TestServerFigures:
    @with_whole_counts
    def test_quick_run(self, model):
        flags = ["--quick", "--rounds", "1", "--model-path", model]
        result, _ = run_script(SERVER_FIGURES, *flags)
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout.splitlines()[-1])
        assert report["ready_seconds"] > 0.0
        assert report["b16_tok_s"] > 0.0
        assert report["first_token"]["32"]["http_ms"] > 0.0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""Flags: defaults, resolution, and refusals that name flag, value and fix."""

from __future__ import annotations

import dataclasses
import re

import pytest

from sglang.srt.arg_groups.arg_parser import declared_fields, from_namespace
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.version import VERSION_TEXT

register_cpu_ci(est_time=2, suite="cpu")

CONTRACT_FLAGS = [
    "--model-path",
    "--tokenizer-path",
    "--host",
    "--port",
    "--dtype",
    "--device",
    "--tp-size",
    "--mem-fraction-static",
    "--max-running-requests",
    "--max-total-tokens",
    "--context-length",
    "--chunked-prefill-size",
    "--max-prefill-tokens",
    "--page-size",
    "--attention-backend",
    "--sampling-backend",
    "--schedule-policy",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--cuda-graph-max-bs",
    "--cuda-graph-bs",
    "--disable-piecewise-cuda-graph",
    "--enable-breakable-cuda-graph",
    "--load-format",
    "--skip-tokenizer-init",
    "--enable-metrics",
    "--api-key",
    "--served-model-name",
    "--random-seed",
    "--log-level",
    "--enable-return-hidden-states",
    "--disaggregation-mode",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
    "--speculative-token-map",
    "--kv-canary",
    "--kv-canary-real-data",
    "--kv-canary-sweep-interval",
    "--kv-canary-report-dir",
    "--kv-canary-report-tokens",
    "--trust-remote-code",
    "--chat-template",
    "--stream-interval",
    "--log-requests",
    "--watchdog-timeout",
    "--speculative-accept-threshold-single",
    "--speculative-accept-threshold-acc",
    "--max-queued-requests",
]


def test_every_flag_of_the_contract_exists_and_is_documented():
    help_text = ServerArgs.parser().format_help()
    for flag in CONTRACT_FLAGS:
        # Flags without effect are in the reference alone.
        is_shown = re.search(rf"{flag}\b", help_text) is not None
        assert is_shown != (flag == "--trust-remote-code"), flag
    for action in ServerArgs.parser()._actions:
        assert action.help, action


def test_command_line_and_constructor_agree():
    parsed = ServerArgs.parser().parse_args([])
    values = from_namespace(ServerArgs, parsed)
    for field in dataclasses.fields(ServerArgs):
        assert values[field.name] == field.default, field.name


def test_defaults():
    args = ServerArgs()
    assert (args.host, args.port, args.schedule_policy) == ("127.0.0.1", 30000, "fcfs")
    assert (args.page_size, args.device, args.dtype) == (1, "cpu", "float32")
    assert args.attention_backend == "cpu_native"
    assert args.served_model_name == "demo"
    assert args.random_seed is not None


def test_values_from_the_command_line():
    args = ServerArgs.from_cli(
        ["--page-size", "4", "--max-total-tokens", "64", "--disable-radix-cache"]
    )
    assert (args.page_size, args.max_total_tokens) == (4, 64)
    assert args.disable_radix_cache


def test_the_pool_is_rounded_down_to_whole_pages(caplog):
    """As SGLang does."""
    assert ServerArgs(max_total_tokens=20000, page_size=64).max_total_tokens == 19968
    assert caplog.messages == [
        "--max-total-tokens 20000 becomes 19968: whole pages of --page-size 64"
    ]
    assert ServerArgs(max_total_tokens=19968, page_size=64).max_total_tokens == 19968
    assert len(caplog.messages) == 1


def test_help_is_in_groups():
    help_text = ServerArgs.parser().format_help()
    groups = list(dict.fromkeys(d.group for d in declared_fields(ServerArgs)))
    assert groups[0] == "Model and tokenizer" and len(groups) > 7
    ends = [help_text.index(f"\n{group}:\n") for group in groups]
    assert ends == sorted(ends)
    for declared in declared_fields(ServerArgs):
        place = help_text.index(f"\n  {declared.flag}")
        begin = help_text.index(f"\n{declared.group}:\n")
        assert begin < place < min([e for e in ends if e > begin] + [10**6])


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(key):
    with pytest.raises(ValueError, match="--api-key is empty"):
        ServerArgs(api_key=key)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        ServerArgs.from_cli(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == VERSION_TEXT


def test_resolving_twice_changes_nothing():
    first = ServerArgs(page_size=4, dtype="half")
    again = ServerArgs(**dataclasses.asdict(first))
    assert first == again


def test_is_read_only_after_start():
    with pytest.raises(AttributeError, match="read-only"):
        ServerArgs().port = 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-such-flag"],
        ["--page"],
        ["--enable-nothing"],
        ["--kv-canary", "maybe"],
        ["--port", "http"],
    ],
)
def test_unknown_flags_and_values_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        ServerArgs.from_cli(argv)
    assert stop.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp_size": 2}, ["--dp-size 2", "use --tp-size"]),
        ({"device": "cuda"}, ["--device cuda", "--device cpu"]),
        ({"tp_size": 0}, ["--tp-size 0", "at least 1"]),
        (
            {"disaggregation_mode": "decode", "disable_radix_cache": True},
            ["--disaggregation-mode decode", "--disable-radix-cache"],
        ),
        (
            {
                "disaggregation_mode": "decode",
                "disaggregation_transfer_backend": "mooncake",
            },
            ["--disaggregation-transfer-backend mooncake", "nixl"],
        ),
        (
            {
                "disaggregation_mode": "prefill",
                "hicache_write_policy": "write_back",
            },
            ["--hicache-write-policy write_back", "use write_through"],
        ),
        ({"tool_call_parser": "x"}, ["--tool-call-parser 'x'", "qwen25"]),
        ({"reasoning_parser": "x"}, ["--reasoning-parser 'x'", "deepseek-r1"]),
        (
            {"tool_call_parser": "llama3", "skip_tokenizer_init": True},
            ["--tool-call-parser llama3", "--skip-tokenizer-init", "remove"],
        ),
        (
            {"reasoning_parser": "qwen3", "skip_tokenizer_init": True},
            ["--reasoning-parser qwen3", "--skip-tokenizer-init", "remove"],
        ),
        ({"tool_call_parser": "gpt-oss"}, ["--reasoning-parser gpt-oss", "add it"]),
        (
            {"enable_breakable_cuda_graph": True, "device": "cpu"},
            ["--enable-breakable-cuda-graph", "--device cpu", "remove"],
        ),
        (
            {
                "enable_breakable_cuda_graph": True,
                "disable_piecewise_cuda_graph": True,
            },
            ["--enable-breakable-cuda-graph", "--disable-piecewise-cuda-graph"],
        ),
        (
            {"speculative_algorithm": "EAGLE3", "model_path": "/some/model"},
            ["--speculative-draft-model-path", "/some/model"],
        ),
        ({"speculative_num_steps": 3}, ["--speculative-num-steps 3"]),
        ({"kv_canary_heal_limit": 5}, ["--kv-canary-heal-limit 5", "heal"]),
        (
            {
                "kv_canary": "log",
                "kv_canary_sweep_interval": 4,
                "disable_radix_cache": True,
            },
            ["--kv-canary-sweep-interval 4", "--disable-radix-cache"],
        ),
        ({"kv_canary_sweep_interval": 4}, ["--kv-canary-sweep-interval 4"]),
        ({"kv_canary_sweep_interval": -1}, ["--kv-canary-sweep-interval -1"]),
        ({"kv_canary_report_dir": "x"}, ["--kv-canary-report-dir x"]),
        ({"kv_canary_report_tokens": True}, ["--kv-canary-report-tokens"]),
        ({"page_size": 0}, ["--page-size 0", "at least 1"]),
        ({"port": 70000}, ["--port 70000", "65535"]),
        ({"mem_fraction_static": 1.5}, ["--mem-fraction-static 1.5"]),
        ({"max_total_tokens": 3, "page_size": 4}, ["--max-total-tokens 3", "lower"]),
        ({"chunked_prefill_size": 0}, ["--chunked-prefill-size 0", "-1"]),
        (
            {"chunked_prefill_size": 10, "page_size": 4},
            ["--chunked-prefill-size 10", "--page-size 4"],
        ),
        ({"attention_backend": "fa9"}, ["--attention-backend 'fa9'", "cpu_native"]),
        ({"attention_backend": "fa3"}, ["--attention-backend 'fa3'", "triton"]),
        ({"sampling_backend": "nope"}, ["--sampling-backend 'nope'", "pytorch"]),
        ({"load_format": "pickle"}, ["--load-format 'pickle'", "safetensors"]),
        ({"chat_template": "no/such/file"}, ["--chat-template no/such/file"]),
        ({"max_running_requests": 0}, ["--max-running-requests 0"]),
        ({"schedule_conservativeness": -1.0}, ["--schedule-conservativeness -1.0"]),
    ],
)
def test_refusals_name_flag_value_and_fix(values, words):
    with pytest.raises(ValueError) as error:
        ServerArgs(**values)
    for word in words:
        assert word in str(error.value)


BEYOND = [
    (declared, beyond, side, bound)
    for declared in declared_fields(ServerArgs)
    for side, bound, step in (
        ("least", declared.arg.low, -1),
        ("most", declared.arg.high, 1),
    )
    if bound is not None
    for beyond in [bound + step]
]


@pytest.mark.parametrize(("declared", "beyond", "side", "bound"), BEYOND)
def test_bounds_hold_on_the_command_line_and_in_python(declared, beyond, side, bound):
    message = f"{declared.flag} {beyond} must be at {side} {bound}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ServerArgs(**{declared.field.name: beyond})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ServerArgs.from_cli([f"{declared.flag}={beyond}"])


CHOICES = [declared for declared in declared_fields(ServerArgs) if declared.arg.choices]


@pytest.mark.parametrize("declared", CHOICES, ids=lambda declared: declared.flag)
def test_an_unknown_choice_is_refused_in_python(declared):
    known = ", ".join(declared.arg.choices)
    message = f"{declared.flag} 'other' is unknown; choose from {known}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ServerArgs(**{declared.field.name: "other"})


@pytest.mark.parametrize(
    ("values", "is_on"),
    [
        ({"device": "cuda"}, True),
        ({"device": "cuda", "enable_breakable_cuda_graph": True}, True),
        ({"device": "cuda", "attention_backend": "flashinfer"}, True),
        ({"device": "cuda", "attention_backend": "torch_native"}, False),
        ({"device": "cuda", "disable_piecewise_cuda_graph": True}, False),
        ({"device": "cuda", "disable_cuda_graph": True}, True),
        ({"device": "cuda", "disaggregation_mode": "prefill"}, True),
        ({"device": "cpu"}, False),
    ],
)
def test_where_prefill_graphs_are_on(monkeypatch, values, is_on):
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 1)
    assert ServerArgs(**values).has_prefill_graphs is is_on


def test_a_backend_that_cannot_be_captured_is_named(monkeypatch):
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 1)
    with pytest.raises(ValueError, match="--attention-backend torch_native; use tri"):
        ServerArgs(
            device="cuda",
            attention_backend="torch_native",
            enable_breakable_cuda_graph=True,
        )


@pytest.mark.parametrize(
    ("values", "running", "largest_graph"),
    [
        ({}, None, 256),
        ({"max_running_requests": 1024}, 1024, None),
        ({"cuda_graph_max_bs": 512}, None, 512),
        ({"cuda_graph_bs": [8, 512]}, None, None),
        ({"cuda_graph_config": '{"decode": {"max_bs": 64}}'}, None, 64),
        ({"disaggregation_mode": "prefill"}, None, None),
        ({"speculative_algorithm": "EAGLE"}, 48, None),
    ],
)
def test_batches_of_a_gpu_follow_from_memory(
    monkeypatch, values, running, largest_graph
):
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 1)
    args = ServerArgs(device="cuda", **values)
    assert args.max_running_requests == running
    assert args.cuda_graph_max_bs == largest_graph
    again = ServerArgs(**dataclasses.asdict(args))
    assert dataclasses.asdict(again) == dataclasses.asdict(args)


def test_the_prefill_role_has_no_decode_graphs(monkeypatch):
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 1)
    args = ServerArgs(device="cuda", disaggregation_mode="prefill")
    assert args.disable_cuda_graph
    with pytest.raises(ValueError, match="--cuda-graph-bs has no effect .* prefill"):
        ServerArgs(device="cuda", disaggregation_mode="prefill", cuda_graph_bs=[1])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

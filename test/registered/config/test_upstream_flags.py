"""SGLang's flags: each is in one class, and says so wherever it is given."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from pathlib import Path
from typing import Annotated, Any

import pytest

from sglang.srt.arg_groups.arg_parser import Arg, declared_fields
from sglang.srt.arg_groups.upstream_flags import (
    UpstreamFlag,
    flag_class,
    upstream_flags,
    without_upstream,
)
from sglang.srt.arg_groups.upstream_reasons import REASONS
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="cpu")

FLAGS = list(upstream_flags().values())
OTHERS = [flag for flag in FLAGS if flag_class(flag, ServerArgs) != "works"]
ASKS = {"switch": True, "int": 77, "float": 0.77, "list": ["x"]}
"""Values that ask for something; of texts "something"."""


@dataclasses.dataclass(kw_only=True)
class Wider:
    """Arguments of a later version."""

    dp_size: Annotated[int, Arg("Replicas.")] = 1


def asking(flag: UpstreamFlag) -> Any:
    return ASKS.get(flag.takes, "something")


def test_every_flag_is_in_one_class() -> None:
    assert len(FLAGS) == len({flag.name for flag in FLAGS}) == 541
    for flag in OTHERS:
        assert flag.class_ in ("accepted", "refused") and flag.reason, flag.name
    assert set(REASONS.values()) == {flag.reason for flag in FLAGS} - {""}


def test_a_field_makes_its_flag_work() -> None:
    """Whoever adds a flag edits no table."""
    works = {flag.dest for flag in FLAGS} - {flag.dest for flag in OTHERS}
    assert {"model_path", "tp_size", "page_size", "cuda_graph_bs_decode"} <= works
    dp_size = upstream_flags()["dp_size"]
    assert flag_class(dp_size, ServerArgs) == "refused"
    assert flag_class(dp_size, Wider) == "works"
    assert without_upstream({"dp_size": 2}, Wider) == {"dp_size": 2}
    own = {n for d in declared_fields(ServerArgs) for n in (d.flag, *d.arg.aliases)}
    for flag in FLAGS:
        if flag not in OTHERS:
            assert own.issuperset(flag.names), flag.name


def test_a_value_that_asks_for_nothing_is_accepted_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for flag in OTHERS:
        words = () if flag.takes in ("int", "float", "switch") else ("none", "off", "")
        for value in (None, False, *flag.neutral, *words):
            assert without_upstream({flag.dest: value}, ServerArgs) == {}, flag.name
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dp_size", [1, "1", 1.0]),
        ("qsa_indexer_dtype", ["auto"]),
        ("json_model_override_args", ["{}", {}]),
        ("cpu_offload_gb", [0, "0", 0.0]),
        ("allowed_media_domains", [[]]),
        ("enable_dp_attention", ["false", "False"]),
    ],
)
def test_neutral_values_of_any_type(name: str, values: list[Any]) -> None:
    for value in values:
        assert without_upstream({name: value}, ServerArgs) == {}


def test_other_values_are_refused_by_name_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for flag in OTHERS:
        given = {flag.dest: asking(flag)}
        caplog.clear()
        if flag.class_ == "refused":
            with pytest.raises(ValueError) as error:
                without_upstream(given, ServerArgs)
            text = str(error.value)
            assert text.startswith(flag.name) and text.endswith(flag.reason)
            assert not caplog.messages
        else:
            assert without_upstream(given, ServerArgs) == {}
            (line,) = caplog.messages
            assert flag.name in line and line.endswith(flag.reason)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ValueError) as error:
        ServerArgs.from_cli(["--ssl-keyfile-password", "hunter2"])
    assert "hunter2" not in str(error.value)


def test_the_same_on_the_command_line_in_a_file_and_in_python(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.yaml"
    for name, value, accepted in (
        ("dp-size", 1, True),
        ("dp-size", 2, False),
        ("enable-torch-compile", True, True),
        ("data-parallel-size", 2, False),
        ("modelopt-quant", "fp8", False),
        ("trust-remote-code", True, True),
        ("encoder-urls", ["a", "b"], False),
    ):
        words = [] if value is True else value if isinstance(value, list) else [value]
        path.write_text(f"{name}: {str(value).lower()}")
        for given in (
            lambda n=name, w=words: ServerArgs.from_cli([f"--{n}", *map(str, w)]),
            lambda: ServerArgs.from_cli(["--config", str(path)]),
            lambda n=name, v=value: ServerArgs(**{n.replace("-", "_"): v}),
        ):
            if name == "data-parallel-size" and given.__defaults__ == (name, value):
                continue  # SGLang's own arguments have no aliases
            if accepted:
                assert given().tp_size == 1
            else:
                with pytest.raises(ValueError, match="not served|only text|weights"):
                    given()
    with pytest.raises(TypeError, match="nonsense"):
        ServerArgs(**{"nonsense": 1})
    assert ServerArgs(**{"tp": 1, "disable_prefill_cuda_graph": True}).tp_size == 1
    with pytest.raises(ValueError, match="tp_size sets tp_size a second time"):
        ServerArgs(**{"tp": 1, "tp_size": 1})


def test_the_config_file_of_sglang_s_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 2)
    path = tmp_path / "config.yaml"
    path.write_text(
        "model-path: meta-llama/Meta-Llama-3-8B-Instruct\nhost: 0.0.0.0\nport: 30000\n"
        "tensor-parallel-size: 2\nenable-metrics: true\nlog-requests: true\n"
        "dp-size: 1\nallowed-media-domains: []\nkv-canary: off\n"
    )
    argv = ["--config", str(path), "--attention-backend", "triton"]
    args = ServerArgs.from_cli(argv)
    assert (args.tp_size, args.enable_metrics, args.kv_canary) == (2, True, "none")
    path.write_text(path.read_text().replace("dp-size: 1", "dp_size: 2"))
    with pytest.raises(ValueError, match="--dp-size 2"):
        ServerArgs.from_cli(argv)
    assert ServerArgs.from_cli([*argv, "--dp", "1"]).tp_size == 2


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--mem-frac 0.4", "mem_fraction_static", 0.4),
        ("--disable-radix", "disable_radix_cache", True),
        ("--context-len=99", "context_length", 99),
        ("--max-total 64", "max_total_tokens", 64),  # not --max-total-body-bytes
        ("--served-model x", "served_model_name", "x"),
        ("--log-req", "log_requests", None),
        ("--quant fp8", "quantization", None),
    ],
)
def test_beginnings_of_flags(
    argv: str, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if value is not None:
        assert getattr(ServerArgs.from_cli(argv.split()), field) == value
        return
    with pytest.raises(SystemExit) as stop:
        ServerArgs.from_cli(argv.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    flag = "--" + field.replace("_", "-")
    assert f"{argv.split()[0]} is the beginning of" in error and flag in error


WITH_OFF = [declared for declared in declared_fields(ServerArgs) if declared.off_words]


@pytest.mark.parametrize("declared", WITH_OFF, ids=lambda declared: declared.flag)
def test_off_and_none_mean_the_same(tmp_path: Path, declared: Any) -> None:
    path, name = tmp_path / "config.yaml", declared.field.name
    found = []
    for word in ("off", "none"):
        path.write_text(f"{declared.flag.removeprefix('--')}: {word}")
        found += [
            getattr(ServerArgs(**{name: word}), name),
            getattr(ServerArgs.from_cli([declared.flag, word]), name),
            getattr(ServerArgs.from_cli(["--config", str(path)]), name),
        ]
    assert len(set(found)) == 1
    assert found[0] in (*declared.arg.choices, None)


def test_words_of_sglang_for_a_choice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("xgrammar", "outlines", "auto"):
        assert ServerArgs(grammar_backend=word).grammar_backend == "llguidance"
        assert f"--grammar-backend {word}: grammars are compiled by" in caplog.text
    assert ServerArgs(sampling_backend="flashinfer").sampling_backend == "pytorch"
    with pytest.raises(ValueError, match="needs SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE"):
        ServerArgs(sampling_backend="token_oracle")
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "1")
    args = ServerArgs(sampling_backend="token_oracle", kv_canary="log")
    assert args.sampling_backend == "pytorch"


# -- graphs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "decode", "prefill", "sizes"),
    [
        ("", True, True, (None, None)),
        ("--cuda-graph-backend-decode disabled", False, True, (None, None)),
        ("--cuda-graph-backend-decode full", True, True, (None, None)),
        ("--cuda-graph-backend-decode breakable", True, True, (None, None)),
        ("--cuda-graph-backend-prefill disabled", True, False, (None, None)),
        ("--cuda-graph-backend-prefill full", True, True, (None, None)),
        ("--cuda-graph-backend-prefill breakable", True, True, (None, None)),
        ("--disable-decode-cuda-graph", False, True, (None, None)),
        ("--disable-prefill-cuda-graph", True, False, (None, None)),
        ("--disable-piecewise-cuda-graph", True, False, (None, None)),
        ("--debug-cuda-graph", False, False, (None, None)),
        ("--cuda-graph-max-bs-decode 8", True, True, (8, None)),
        ("--cuda-graph-bs-decode 1 2 4", True, True, (None, [1, 2, 4])),
        ("--cuda-graph-bs-prefill 64 128", True, True, (None, None)),
        (
            '--cuda-graph-config \'{"decode": {"backend": "full", "max_bs": 16, "bs": '
            '[1, 2]}, "prefill": {"backend": "disabled"}}\'',
            *(True, False, (16, [1, 2])),
        ),
        (
            "--disable-cuda-graph --cuda-graph-config "
            '\'{"decode": {"backend": "breakable"}}\'',
            *(True, True, (None, None)),
        ),
    ],
)
def test_graph_flags_of_today(
    monkeypatch: pytest.MonkeyPatch,
    argv: str,
    decode: bool,
    prefill: bool,
    sizes: tuple[int | None, list[int] | None],
) -> None:
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 1)
    # Otherwise the largest graph has a default.
    others = ["--attention-backend", "triton", "--max-running-requests", "256"]
    args = ServerArgs.from_cli([*shlex.split(argv), *others])
    assert (not args.disable_cuda_graph, args.has_prefill_graphs) == (decode, prefill)
    assert (args.cuda_graph_max_bs, args.cuda_graph_bs) == sizes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "--cuda-graph-config '{'"),
        ('{"decode": {"backnd": "full"}}', "unknown field `backnd` - at `$.decode`"),
        ('{"decode": {"backend": "half"}}', "'half' - at `$.decode.backend`"),
        ('{"decode": {"bs": [0]}}', "`int` >= 1 - at `$.decode.bs[0]`"),
        ('{"decoding": {}}', "unknown field `decoding`"),
    ],
)
def test_a_bad_graph_config_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        ServerArgs(cuda_graph_config=text)
    assert words in str(error.value) and "write JSON such as" in str(error.value)


def test_sizes_of_graphs_are_accepted_on_a_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = ServerArgs(device="cpu", cuda_graph_max_bs=8)
    ServerArgs(**dataclasses.asdict(args))  # as the scheduler's process does
    assert caplog.text.count("--cuda-graph-max-bs has no effect with --device") == 1


# -- published commands --------------------------------------------------------------

_EAGLE = "--speculative-num-steps 3 --speculative-eagle-topk 4"
_EAGLE += " --speculative-num-draft-tokens 16 --mem-fraction-static 0.7"
_SMALL = "--cuda-graph-max-bs 8 --log-level warning"
_LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
STARTS = [
    "--model mistralai/Mistral-7B-Instruct-v0.3 --lora-paths /lora lora1=/lora_1 "
    "--disable-radix --disable-cuda-graph --max-loras-per-batch 4 "
    "--lora-backend csgmv",
    f"--model-path {_LLAMA} --tp 2",
    f"--model-path {_LLAMA} --tp 2 --enable-p2p-check",
    f"--model-path {_LLAMA} --mem-fraction-static 0.7",
    f"--model-path {_LLAMA} --chunked-prefill-size 4096",
    f"--model-path {_LLAMA} --enable-torch-compile --disable-cuda-graph-padding",
    "--model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 30000 "
    "--tp-size 2 --mem-fraction-static 0.8",
    "--model-path meta-llama/Llama-3.1-8B-Instruct --disable-piecewise-cuda-graph",
    "--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE "
    f"--speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B {_EAGLE} "
    f"{_SMALL}",
    "--model meta-llama/Llama-2-7b-chat-hf --speculative-algorithm EAGLE "
    f"--speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B {_EAGLE} "
    "--enable-torch-compile --torch-compile-max-bs 8 --log-level warning",
    f"--model {_LLAMA} --speculative-algorithm EAGLE --speculative-draft-model-path "
    f"lmsys/sglang-EAGLE-LLaMA3-Instruct-8B {_EAGLE} --speculative-token-map "
    f"thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt --dtype float16 {_SMALL}",
    "--model meta-llama/Meta-Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B "
    f"{_EAGLE} --dtype float16 {_SMALL}",
    "--model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm STANDALONE "
    "--speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct "
    "--speculative-num-steps 4 --speculative-eagle-topk 2 "
    f"--speculative-num-draft-tokens 7 --mem-fraction-static 0.7 {_SMALL}",
    "--model-path Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --log-level warning",
    "--model-path Qwen/Qwen3-235B-A22B-Instruct-2507 --tp 8",
    "--model-path Qwen/Qwen3-Coder-30B-A3B-Instruct --tp 2 "
    "--tool-call-parser qwen3_coder",
    "--model-path Qwen/Qwen3-8B --port 30000 --tp-size 4 --context-length 262144 "
    "--reasoning-parser qwen3",
    "--model-path deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --host 0.0.0.0 "
    "--reasoning-parser deepseek-r1 --log-level warning",
    "--model deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code --port 30000",
    "--model-path deepseek-ai/DeepSeek-V3-0324 --speculative-algorithm EAGLE "
    "--speculative-draft-model-path x --trust-remote-code --tp 8",
    "--model-path openai/gpt-oss-120b --tp 8",
    "--model-path Qwen/Qwen3-30B-A3B --page-size 64 --enable-hierarchical-cache "
    "--hicache-ratio 4",
    "--model openai/gpt-oss-120b --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path lmsys/EAGLE3-gpt-oss-120b-bf16 "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --tp 4",
    f"--model-path {_LLAMA} --quantization fp8",
    f"--model-path {_LLAMA} --kv-cache-dtype fp8_e5m2",
    "--model-path google/gemma-2-27b-it --tp 4 --dtype bfloat16 --port 30000",
    "--model-path google/gemma-3-27b-it --port 30000 --trust-remote-code",
    "--model mistralai/Mixtral-8x7B-Instruct-v0.1 --tp 2 --mem-fraction-static 0.95 "
    "--trust-remote-code --host 0.0.0.0 --port 30000",
    "--model mistralai/Ministral-8B-Instruct-2410 --trust-remote-code",
    "--model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 8100 "
    "--trust-remote-code --watchdog-timeout 86400 --random-seed 0 --device cuda "
    "--mem-fraction-static 0.85 --max-running-requests 1024 --max-prefill-tokens 16384 "
    "--context-length 16384 --chunked-prefill-size 16384 --schedule-policy fcfs",
    "--model-path meta-llama/Llama-3.1-8B-Instruct --dp-size 1 --pp-size 1 --ep-size 1 "
    "--nnodes 1 --node-rank 0 --kv-cache-dtype auto --tokenizer-mode auto "
    "--tokenizer-worker-num 1 --grammar-backend xgrammar --sampling-backend flashinfer",
]
"""From SGLang's documentation and model pages; the last one collects recipes' flags."""
NAMES = {
    f"--model-path {_LLAMA} --tp 4 --dist-init-addr sgl-dev-0:50000 --nnodes 2 "
    "--node-rank 0": "--nnodes 2: one machine",
    "--model deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code --dp-size 8 "
    "--enable-dp-attention": "--dp-size 8: data parallelism",
    "--model-path openai/gpt-oss-120b --tool-server demo --tp 2": "--tool-server demo",
    "--model-path Qwen/Qwen3-30B-A3B --enable-lmcache": "--enable-lmcache",
    "--model-path google/gemma-3-27b-it --enable-multimodal": "--enable-multimodal",
}


def resolved(command: str, monkeypatch: pytest.MonkeyPatch) -> ServerArgs:
    """The arguments of a published command, on a machine with 8 GPUs, with the demo
    model in place of what would be downloaded."""
    monkeypatch.setattr("sglang.srt.server_args.cuda_device_count", lambda: 8)
    words = shlex.split(command)
    assert words[0] in ("--model", "--model-path")
    return ServerArgs.from_cli([*words[2:], "--attention-backend", "triton"])


@pytest.mark.parametrize("command", STARTS)
def test_a_published_command_starts(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = resolved(command, monkeypatch)
    assert args.device == "cuda" and args.attention_backend == "triton"


@pytest.mark.parametrize("command", NAMES)
def test_a_published_command_names_the_one_flag(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError) as error:
        resolved(command, monkeypatch)
    assert str(error.value).startswith(NAMES[command])


def test_the_log_of_a_recipe_says_what_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ServerArgs.from_cli(["--trust-remote-code", "--dp-size", "1"])
    (line,) = caplog.messages
    assert "--trust-remote-code is accepted" in line and "never run" in line

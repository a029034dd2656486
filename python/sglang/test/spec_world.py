"""Engines with and without speculation for tests.

Models and drafts on disk, and the run of one configuration of the matrix.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.draft_layout import alloc_len_per_decode
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.harness import EngineHarness, Finished
from sglang.test.scale import count, is_full
from sglang.test.spec_accept import (
    AcceptRecorder,
    assert_oracle,
    predicted_acceptance,
)
from sglang.test.spec_matrix import SAMPLE, SpecConfig, whole_matrix
from sglang.test.spec_parity import (
    CONTEXT,
    Ask,
    Traffic,
    answer_all,
    assert_parity,
    check_no_leak,
    make_asks,
)
from sglang.test.tiny_models import (
    write_mock_draft,
    write_mock_model,
    write_tiny_eagle,
    write_tiny_model,
)

TINY = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
VOCAB_SIZES = {"demo": 4096, "mock": 1000} | dict.fromkeys(TINY, 264)
SMALL_VOCAB = {"mock": 730} | dict.fromkeys(TINY, 150)
# Shorter than the paths of a deep tree.
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
WINDOWS = dict.fromkeys(WINDOWED, {"sliding_window": 4})
# Noise on the weights of a random model's STANDALONE draft, which then agrees in about
# every other token.
DRAFT_NOISE = 0.02


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class ModelFolders:
    """Targets and drafts, written on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def target(self, model: str) -> Path:
        if model == "demo":
            return bundled_demo_model_path()
        return self._once(model, lambda folder: self._write_target(model, folder))

    def draft(self, config: SpecConfig) -> Path | None:
        """Return the draft's folder, or None for the head bundled with the demo
        model and for drafts without a model.
        """
        if config.model == "demo" or config.algorithm == "NGRAM":
            return None
        name = f"{config.model}-{config.algorithm}-{config.variant}"
        return self._once(name, lambda folder: self._write_draft(config, folder))

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        folder = self._root / name
        if not folder.exists():
            write(folder)
        return folder

    @staticmethod
    def _write_target(model: str, folder: Path) -> None:
        if model == "mock":
            write_mock_model(
                folder, vocab_size=VOCAB_SIZES["mock"], max_position_embeddings=CONTEXT
            )
        else:
            write_tiny_model(
                folder,
                TINY[model],
                seed=11,
                max_position_embeddings=CONTEXT,
                **WINDOWS.get(model, {}),
            )

    def _write_draft(self, config: SpecConfig, folder: Path) -> None:
        model, algorithm = config.model, config.algorithm
        has_small = algorithm == "EAGLE3" and bool(config.variant)
        sizes = {"draft_vocab_size": SMALL_VOCAB[model]} if has_small else {}
        if model == "mock":
            source = "hidden" if config.variant else "attention"
            write_mock_draft(
                folder,
                kind=algorithm,
                source=None if algorithm == "STANDALONE" else source,
                vocab_size=VOCAB_SIZES["mock"],
                max_position_embeddings=CONTEXT,
                **sizes,
            )
        elif algorithm == "STANDALONE":
            write_noisy_copy(self.target(model), folder, TINY[model])
        else:
            write_tiny_eagle(
                folder, self.target(model), algorithm=algorithm, seed=5, **sizes
            )


def write_noisy_copy(
    target: Path, folder: Path, architecture: str, *, noise: float = DRAFT_NOISE
) -> Path:
    """Write a model that often agrees with the tiny one in `target`."""
    write_tiny_model(folder, architecture, max_position_embeddings=CONTEXT)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(target / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((target / "config.json").read_text())
    return folder


def plain_engine(model: Path, **options: Any) -> EngineHarness:
    """Create the reference engine, without speculation."""
    usual: dict[str, Any] = {
        "device": device(),
        "dtype": "float32",
        "context_length": CONTEXT,
        "max_running_requests": 32,
        "max_total_tokens": 16384,
        "chunked_prefill_size": -1,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
    }
    return EngineHarness(model, **usual | options)


def slots_for(
    config: SpecConfig,
    *,
    rows: int = 14,
    contexts: int = 2,
    layout: str | None = None,
) -> int:
    """Return KV slots, in whole pages, for about `rows` concurrent requests with this
    draft layout (default: the default layout), and for whole contexts besides them.

    With more requests some are retracted.
    """
    reserve = (config.num_steps + 1) + alloc_len_per_decode(
        page_size=config.page_size,
        topk=config.topk,
        num_steps=config.num_steps,
        num_draft_tokens=config.num_draft_tokens,
        has_branches=config.algorithm != "NGRAM"
        and (config.topk == 1 or layout == "paged"),
    )
    wanted = contexts * CONTEXT + rows * (reserve + 2 * config.page_size)
    return -(-wanted // config.page_size) * config.page_size


def spec_engine(
    folders: ModelFolders, config: SpecConfig, **options: Any
) -> EngineHarness:
    """Create an engine with speculation, a small pool and chunked prefill."""
    draft = folders.draft(config)
    usual: dict[str, Any] = {
        "device": device(),
        "dtype": "float32",
        "context_length": CONTEXT,
        "max_running_requests": 32,
        "max_total_tokens": slots_for(
            config, layout=options.get("speculative_draft_layout")
        ),
        "page_size": config.page_size,
        "chunked_prefill_size": 64,
        "schedule_conservativeness": 0.3,
        "attention_backend": config.backend if device() == "cpu" else None,
        "disable_overlap_schedule": not config.overlap,
        "skip_tokenizer_init": True,
        "speculative_algorithm": config.algorithm,
        "speculative_draft_model_path": draft and str(draft),
        "speculative_num_steps": config.num_steps,
        config.breadth_flag: config.topk,
        "speculative_num_draft_tokens": config.num_draft_tokens,
    }
    model = folders.target(config.model)
    return EngineHarness(model, overlap=config.overlap, **usual | options)


# -- one configuration -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Requests, and the answers of the engine without speculation."""

    engine: EngineHarness
    asks: list[Ask]
    answers: dict[str, Finished]


class References:
    """One `Reference` per model, created on first use.

    Args:
        requests: number of requests of each. Defaults to the scale of the tests.
    """

    def __init__(self, folders: ModelFolders, *, requests: int | None = None) -> None:
        self._folders = folders
        self._requests = requests or count(ci=40, full=100)
        self._made: dict[str, Reference] = {}

    def __getitem__(self, model: str) -> Reference:
        if model not in self._made:
            asks = make_asks(
                random.Random(model),
                total=self._requests,
                vocab_size=VOCAB_SIZES[model],
            )
            engine = plain_engine(self._folders.target(model))
            self._made[model] = Reference(
                engine=engine, asks=asks, answers=answer_all(engine, asks)
            )
        return self._made[model]


def run_configuration(
    folders: ModelFolders, references: References, config: SpecConfig, **options: Any
) -> EngineHarness:
    """Run random arrivals and aborts with speculation and check everything.

    Outputs must be the same as without speculation, counters must be right, accept
    lengths of the mock model must equal its oracle's, and no slot may be lost.
    """
    reference = references[config.model]
    engine = spec_engine(folders, config, **options)
    recorder = AcceptRecorder(engine.scheduler)
    traffic = Traffic(engine, reference.asks, random.Random(str(config)))
    answers = traffic.run()
    is_mock = config.model == "mock"
    assert_parity(
        reference.asks,
        reference.answers,
        answers,
        aborted=traffic.aborted,
        reference=None if is_mock else reference.engine,
    )
    recorder.check_counters()
    assert set(recorder.lens()) <= set(range(1, config.num_steps + 2))
    if is_mock:
        assert_oracle(reference.asks, answers, vocab_size=VOCAB_SIZES["mock"])
    if is_mock and config.algorithm != "NGRAM":
        plain = [str(i) for i, ask in enumerate(reference.asks) if ask.is_plain]
        found = predicted_acceptance(recorder, engine, plain)
        assert not found.differing, found
        assert len(found.lens) > 1, found
    check_no_leak(engine)
    return engine


def matrix(*models: str) -> list[SpecConfig]:
    """Return a test's configurations: the sample, or under `make test-full` all."""
    configs = whole_matrix() if is_full() else SAMPLE
    return [config for config in configs if config.model in models]

"""Owns one model, its pools and its attention backend, and runs forwards."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.attention_backends import ATTENTION_BACKENDS
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardBatch
from sglang.srt.forward.context import ForwardContext, forward_context
from sglang.srt.forward.graph_capture import RehearsalBackend, SegmentBackend
from sglang.srt.forward.scopes import ForwardScopes, NullScopes
from sglang.srt.layers.attention.attention_registry import (
    attention_needs,
    create_attention_backend,
)
from sglang.srt.layers.ops.linear.quantized import FORMATS
from sglang.srt.layers.state.forward import StateCommit, StateForward
from sglang.srt.layers.state.layer import StateLayer
from sglang.srt.lora.adapters import Adapters, create_adapters
from sglang.srt.model_executor.adapter_inputs import AdapterInputs
from sglang.srt.model_executor.breakable_cuda_graph_runner import (
    BreakableCudaGraphRunner,
)
from sglang.srt.model_executor.cuda_graph_runner import (
    CudaGraphRunner,
    DecodeGraphs,
    cuda_graph_backend,
)
from sglang.srt.model_executor.input_buffers import GraphInputBuffers
from sglang.srt.model_executor.kv_storage import resolve_kv_dtype, set_kv_scales
from sglang.srt.model_executor.memory_plan import (
    NO_DRAFT_MEMORY,
    NO_WATCHER,
    DraftMemory,
    WatcherBytes,
    explain_out_of_memory,
)
from sglang.srt.model_executor.model_runner_kv_cache_mixin import (
    ModelRunnerKVCacheMixin,
    SharedPools,
)
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.registry import (
    CausalLM,
    MockModel,
    num_layer_weights,
    supported_draft_architectures,
)
from sglang.srt.utils.kernel_loads import KernelLoads
from sglang.srt.utils.kernels_ahead import CompiledMark
from sglang.srt.utils.memory import available_device_bytes
from sglang.srt.utils.triton_keys import make_keys_stable

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.forward.state_plan import DueCheckpoints
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.input_buffers import GraphInputs
    from sglang.srt.models.stack import Stack
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Arguments that choose no kernel and may differ from start to start.
_OF_A_RUN = {
    *("random_seed", "host", "port", "model_path", "tokenizer_path"),
    *("served_model_name", "log_level", "api_key", "speculative_draft_model_path"),
}
# Bytes of an element of the rotary table.
ROTARY_ITEMSIZE = torch.float32.itemsize
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelRunner(ModelRunnerKVCacheMixin):
    """Runs forwards of one model. Call `initialize` first, or `load_weights` and then
    `init_memory_pool` if another model takes memory in between.

    Attributes:
        scopes: hooks around forwards.
        canary_manager: the KV canary that is installed as `scopes`, or None.
        is_draft_worker: whether the model drafts for another one.
        compiled_mark: mark of this configuration, or None if nothing is compiled ahead.
        compiles_ahead: whether this machine has yet to compile it.
        make_backend: makes what captures the segments of graphs.
        late_kernels: kernels loaded since `watch_kernels`.
        weight_bytes: device memory that loading the weights took.
        captured_bytes: device memory that the graphs took.
        spec_algorithm: name of the speculative algorithm, or None.
    """

    model: CausalLM
    attn_backend: AttentionBackend

    def __init__(
        self,
        *,
        server_args: ServerArgs,
        model_config: ModelConfig,
        is_draft_worker: bool = False,
        draft_config: ModelConfig | None = None,
        dtype: torch.dtype | None = None,
        watcher: WatcherBytes = NO_WATCHER,
    ) -> None:
        """Resolve dtype and device. No weights are loaded yet.

        Args:
            draft_config: of the model that drafts for this one.
            dtype: dtype of the model. Defaults to --dtype and the checkpoint.
            watcher: what a watcher of the pools will keep.
        """
        assert server_args.page_size is not None
        self.server_args = server_args
        self.model_config = model_config
        self.is_draft_worker = is_draft_worker
        self.spec_algorithm = server_args.speculative_algorithm
        self.device = server_args.device
        self.dtype = dtype or self._resolve_dtype()
        self.kv_dtype = resolve_kv_dtype(
            server_args, computes=self.dtype, is_draft=is_draft_worker
        )
        self.page_size = server_args.page_size
        self.watcher = watcher
        self.scopes: ForwardScopes = NullScopes()
        # Set by init_cuda_graphs, which the runner's owner calls once everything that
        # graphs read is in place.
        self.graph_runner: CudaGraphRunner | None = None
        # The same for batches in which a token has an adapter.
        self.adapter_graph_runner: CudaGraphRunner | None = None
        # Both, for each kind of decode forward that has static inputs of its own.
        self._decode_graphs: dict[GraphInputs, DecodeGraphs] = {}
        # Set by init_piecewise_cuda_graphs, likewise.
        self.prefill_graph_runner: BreakableCudaGraphRunner | None = None
        if self.device != "cpu":
            make_keys_stable()
        self.make_backend: Callable[[], SegmentBackend] = cuda_graph_backend
        self.compiled_mark = self._compiled_mark(draft_config)
        mark = self.compiled_mark
        is_due = mark is not None and not mark.is_set()
        # Rehearsals use collectives, and a rank that is done sets the mark.
        self.compiles_ahead = bool(get_tp_group().min_int(int(is_due)))
        self.late_kernels = KernelLoads(warns=True)
        self.weight_bytes = self.captured_bytes = 0
        # Loaded with the weights.
        self.adapters: Adapters | None = None
        # Set if a canary is installed.
        self.canary_manager: ForwardScopes | None = None

    def _compiled_mark(self, draft_config: ModelConfig | None) -> CompiledMark | None:
        """Return the mark of this configuration, if its kernels may be compiled ahead.
        A draft's are compiled with its target's."""
        args = self.server_args
        if args.device == "cpu" or args.skip_server_warmup or self.is_draft_worker:
            return None
        assert args.attention_backend is not None
        plans_on_host = ATTENTION_BACKENDS[args.attention_backend].needs_cpu_seq_lens
        if draft_config is not None and plans_on_host:
            # FlashInfer's kernels would run, on offsets that Triton's had not written.
            return None
        asked = {
            name: value
            for name, value in dataclasses.asdict(args).items()
            if name not in _OF_A_RUN
        }
        models = [config.raw for config in (self.model_config, draft_config) if config]
        return CompiledMark({"args": asked, "models": models})

    def _resolve_dtype(self) -> torch.dtype:
        """Return --dtype or the checkpoint's dtype, with bfloat16 for float32."""
        if self.server_args.dtype != "auto":
            return TORCH_DTYPES[self.server_args.dtype]
        raw = self.model_config.raw
        stored = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
        return TORCH_DTYPES["float16" if stored == "float16" else "bfloat16"]

    def initialize(self) -> None:
        """Load the weights, build the pools and the attention backend.

        Raises:
            ValueError: bad weights or impossible memory. The message names the flag or
                the tensor.
        """
        self.load_weights()
        self.init_memory_pool()

    def load_weights(self) -> None:
        """Load the weights of the model.

        Raises:
            ValueError: bad weights, or too little memory for them.
        """
        self._began = time.perf_counter()
        if self.server_args.tp_size != get_tp_group().size:
            raise ValueError(
                f"--tp-size {self.server_args.tp_size} needs as many processes, but "
                f"{get_tp_group().size} run(s) here; use the server or the Engine"
            )
        architecture = self.model_config.architecture
        if architecture in supported_draft_architectures() and not self.is_draft_worker:
            raise ValueError(
                f"--model-path {self.model_config.path}: {architecture} is a draft "
                "head, which needs a target's hidden states; serve the target instead"
            )
        self.free_bytes_at_start = self._available_bytes()
        self._check_sizes()
        args = self.server_args
        logger.info("Loading %s from %s", architecture, self.model_config.path)
        with explain_out_of_memory("loading the weights", self.server_args):
            self.model = load_model(
                self.model_config,
                load_format=args.draft_load_format
                if self.is_draft_worker
                else args.load_format,
                dtype=self.dtype,
                rope_rows=self.row_width(),
                device=self.device,
                rounds_inputs=self.server_args.fp8_gemm_runner_backend == "auto",
            )
            if not self.is_draft_worker:
                self.adapters = create_adapters(
                    self.model, self.server_args, dtype=self.dtype, device=self.device
                )
        self.weight_bytes = self.free_bytes_at_start - self._available_bytes()

    def _check_sizes(self) -> None:
        """Refuse sizes that no memory of this machine can hold, before anything is
        allocated, because a machine may promise more than it has.

        Raises:
            ValueError: the sizes are too large. The message names the file.
        """
        config = self.model_config
        size = num_layer_weights(config) * self._bytes_of_weight()
        if not self.is_draft_worker:  # which may use the target's
            size += config.vocab_size * config.hidden_size * self.dtype.itemsize
        rotary = len(config.ropes) * self.row_width() * config.rotated_head_dim
        needed = size / get_tp_group().size + rotary * ROTARY_ITEMSIZE
        if needed > self.free_bytes_at_start:
            raise ValueError(
                f"{config.file}: a model of these sizes takes at least "
                f"{needed / 2**30:.1f} GiB with a context of {config.context_len}, but "
                f"{self.free_bytes_at_start / 2**30:.1f} GiB are free"
            )

    def _bytes_of_weight(self) -> float:
        """Return the bytes of a weight of the layers, at least."""
        quantization = self.model_config.quantization
        if quantization is None:
            return self.dtype.itemsize
        if self.device == "cpu" and not quantization.weights.is_kept_on_cpu:
            return self.dtype.itemsize
        made = FORMATS[quantization.weights.format]
        return made.dtype.itemsize / made.per_item

    def init_memory_pool(
        self,
        *,
        shared: SharedPools | None = None,
        draft_memory: DraftMemory = NO_DRAFT_MEMORY,
    ) -> None:
        """Build the pools and the attention backend.

        Args:
            shared: the target's rows and slots, for a draft worker.
            draft_memory: memory needed by the draft worker of this target, if any.

        Raises:
            ValueError: impossible memory. The message names the flag.
        """
        with explain_out_of_memory("building the KV pool", self.server_args):
            self._init_pools(shared=shared, draft_memory=draft_memory)
        set_kv_scales(
            self.token_to_kv_pool,
            self.server_args,
            self.model_config,
            is_draft=self.is_draft_worker,
            has_file=not isinstance(self.model, MockModel),
        )
        assert self.server_args.attention_backend is not None
        self.attn_backend = create_attention_backend(
            self.server_args.attention_backend,
            req_to_token_pool=self.req_to_token_pool,
            kv_pool=self.token_to_kv_pool,
            needs=attention_needs(
                self.model.modules(),
                has_trees=self._verifies_trees(),
                kv_dtype=self.kv_dtype,
            ),
        )
        logger.info(
            "Loaded %s (%s, KV %s, %s) with %d KV slots in %.1f s",
            self.model_config.architecture,
            str(self.dtype).removeprefix("torch."),
            str(self.kv_dtype).removeprefix("torch."),
            self.server_args.attention_backend,
            self.max_total_num_tokens,
            time.perf_counter() - self._began,
        )

    def _verifies_trees(self) -> bool:
        """Whether forwards of this model have tree masks."""
        topk = self.server_args.speculative_eagle_topk
        is_target = self.spec_algorithm is not None and not self.is_draft_worker
        return is_target and topk is not None and topk > 1

    def init_cuda_graphs(
        self,
        inputs: GraphInputs | None = None,
        *,
        others: Sequence[GraphInputs] = (),
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
    ) -> None:
        """Capture the decode graphs, if the backend and the flags allow them.

        Args:
            inputs: static inputs of the forwards to capture. Defaults to plain decode.
            others: of further kinds of forwards, which `forward` is told.
            capture_hidden_mode: hidden states that these forwards return.
        """
        sizes = self.graph_sizes()
        if not sizes:
            return
        capture = partial(self._capture_decode, sizes, capture_hidden_mode)
        with self.capturing("decode graphs", set_aside=self.decode_graph_bytes()):
            self._decode_graphs = {other: capture(other) for other in others}
            graphs = capture(inputs)
        self.graph_runner, self.adapter_graph_runner = graphs

    def _capture_decode(
        self,
        sizes: list[int],
        capture_hidden_mode: CaptureHiddenMode,
        inputs: GraphInputs | None,
    ) -> DecodeGraphs:
        make = partial(
            CudaGraphRunner,
            self,
            batch_sizes=sizes,
            capture_hidden_mode=capture_hidden_mode,
            make_backend=self.make_backend,
        )
        plain = make(inputs=inputs)
        if self.adapters is None:
            return DecodeGraphs(plain, None)
        adapted = AdapterInputs(
            inputs or GraphInputBuffers(max_rows=max(sizes), device=self.device),
            max_rows=max(sizes),
            num_slots=self.adapters.pool.num_slots,
            device=self.device,
        )
        return DecodeGraphs(plain, make(inputs=adapted))

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Scope where nothing is captured and few layers run. Forwards make all their
        launches but have no useful results. The graphs are gone afterwards."""
        self.make_backend = RehearsalBackend
        try:
            with self.model.shallow():
                yield
        finally:
            self.make_backend = cuda_graph_backend
            self.graph_runner = self.adapter_graph_runner = None
            self._decode_graphs = {}
            self.prefill_graph_runner = None
        # Otherwise its leftover memory would look like memory that the captures gave
        # back.
        torch.cuda.empty_cache()

    @contextmanager
    def capturing(self, what: str, *, set_aside: int) -> Iterator[None]:
        """Scope around captures. Logs the memory they took and the bytes reserved for
        them.

        Raises:
            ValueError: the device ran out of memory. The message names the flags.
        """
        if self.make_backend is RehearsalBackend:
            yield
            return
        free_before = available_device_bytes(self.device)
        with explain_out_of_memory(f"capturing {what}", self.server_args):
            yield
        # Memory left over by the warm-ups does not belong to the graphs.
        torch.cuda.empty_cache()
        taken = free_before - available_device_bytes(self.device)
        self.captured_bytes += taken
        logger.info(
            "The %s took %.2f GiB; %.2f GiB were set aside",
            what,
            taken / 2**30,
            set_aside / 2**30,
        )

    def init_piecewise_cuda_graphs(
        self,
        *,
        force_for_draft_worker: bool = False,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        draft_hidden_dim: int | None = None,
    ) -> None:
        """Capture the prefill graphs, if the backend and the flags allow them.

        Args:
            force_for_draft_worker: also capture those of a draft worker. Its embedding
                and head are attached after its runner is built, and graphs keep
                addresses, so the worker asks once it has them.
            capture_hidden_mode: mode of the forwards that will be replayed.
            draft_hidden_dim: width of the states that a draft model reads; see
                `BreakableCudaGraphRunner`.
        """
        counts = self.prefill_graph_token_counts()
        if not counts or (self.is_draft_worker and not force_for_draft_worker):
            return
        adapters = self.adapters
        with self.capturing("prefill graphs", set_aside=self.prefill_graph_bytes()):
            self.prefill_graph_runner = BreakableCudaGraphRunner(
                self,
                token_counts=counts,
                capture_hidden_mode=capture_hidden_mode,
                draft_hidden_dim=draft_hidden_dim,
                adapter_slots=0 if adapters is None else adapters.pool.num_slots,
                make_backend=self.make_backend,
            )

    def watch_kernels(self) -> None:
        """Count and log kernels that are loaded from now on, because requests wait for
        them."""
        if self.device != "cpu":
            self.late_kernels.start()

    def reset_counts(self) -> None:
        """Reset the counts of forwards that replayed a graph and that could not."""
        for runner in self.decode_graph_runners():
            runner.reset_counts()
        if self.prefill_graph_runner is not None:
            self.prefill_graph_runner.reset_counts()

    def decode_graph_runners(self) -> list[CudaGraphRunner]:
        """Return what replays decode forwards, of all kinds."""
        kinds = [
            DecodeGraphs(self.graph_runner, self.adapter_graph_runner),
            *self._decode_graphs.values(),
        ]
        return [runner for kind in kinds for runner in kind if runner is not None]

    def forward(
        self, forward_batch: ForwardBatch, *, inputs: GraphInputs | None = None
    ) -> LogitsProcessorOutput:
        """Run one launch of the model over `forward_batch`.

        Args:
            inputs: static inputs that the batch is in, if there are several kinds of
                decode forwards (`others` of `init_cuda_graphs`).
        """
        tiles = forward_batch.adapters
        reading: AbstractContextManager[None] = nullcontext()
        if tiles is not None and self.adapters is not None:
            reading = self.adapters.pool.reading(tiles)
        elif tiles is not None:
            # A draft, which runs without its target's adapters.
            forward_batch = dataclasses.replace(forward_batch, adapters=None)
        with (
            reading,
            torch.inference_mode(),
            self.scopes.with_ops_outside_graph(
                single_forward_indices=(0,),
                maybe_inaccurate_forward_batch=forward_batch,
            ),
        ):
            # A draft is given its target's plan.
            states, plan = self.state_pool, forward_batch.state_plan
            if states is None or plan is None:
                return self._forward_raw(forward_batch, inputs)
            if plan.restore is not None:
                states.copy(plan.restore)
            output = self._forward_raw(forward_batch, inputs)
            if plan.save is not None:
                states.copy(plan.save)
            return output

    def commit_states(
        self,
        slots: Tensor,
        path: Tensor,
        path_lens: Tensor,
        *,
        num_nodes: int,
        prefix_lens: Tensor,
        due: DueCheckpoints | None,
    ) -> None:
        """Fold the accepted nodes of the last verification into the states of R rows,
        if the model keeps any.

        Args:
            slots: [R] int64, rows. path: [R, P] int64, accepted nodes among all R * D,
                the root first. path_lens: [R] int64, how many.
            prefix_lens: [R] int64, tokens folded before.
            due: checkpoints to take on the way.
            num_nodes: R * D.
        """
        pool, nodes = self.state_pool, self.state_nodes
        if pool is None:
            return
        assert nodes is not None
        self.scopes.on_commit(slots=slots, path=path, path_lens=path_lens, due=due)
        commit = StateCommit(
            pool=pool,
            nodes=nodes,
            slots=slots,
            path=path,
            path_lens=path_lens,
            num_nodes=num_nodes,
        )
        commits = [commit]
        if due is not None:
            # A checkpoint is a copy of the state before, with the path up to it.
            lens = due.path_lens(prefix_lens, path_lens)
            copies, path = due.copies(slots, lens), path[due.rows]
            pool.copy(copies)
            commits.append(
                dataclasses.replace(commit, slots=copies.dst, path=path, path_lens=lens)
            )
        for layer in self._state_layers:
            for each in commits:
                layer.commit(each)

    @cached_property
    def _state_layers(self) -> list[StateLayer]:
        return [m for m in self.model.modules() if isinstance(m, StateLayer)]

    def _forward_raw(
        self, forward_batch: ForwardBatch, inputs: GraphInputs | None
    ) -> LogitsProcessorOutput:
        """Replay a decode or prefill graph if one fits; otherwise run eagerly."""
        prefill = self.prefill_graph_runner
        graphs = DecodeGraphs(self.graph_runner, self.adapter_graph_runner)
        if inputs is not None:
            graphs = self._decode_graphs.get(inputs, graphs)
        decode = graphs.plain if forward_batch.adapters is None else graphs.adapted
        if decode is not None and decode.can_run(forward_batch):
            self.scopes.on_replay()
            return decode.replay(forward_batch)
        output = None if prefill is None else prefill.try_replay(forward_batch)
        if output is not None:
            return output
        self.attn_backend.init_eager(forward_batch)
        return self.run_model(forward_batch)

    def run_model(
        self,
        forward_batch: ForwardBatch,
        *,
        step: int = 0,
        attn_backend: AttentionBackend | None = None,
        stack: Stack | None = None,
    ) -> LogitsProcessorOutput:
        """Run only the model. The attention backend's metadata is already set.

        Args:
            step: which forward of the launch this is.
            attn_backend: defaults to the runner's own.
            stack: runs instead of the model's layer stack; see `StackedModel.forward`.
        """
        states = self.state_pool
        context = ForwardContext(
            attn_backend=attn_backend or self.attn_backend,
            state=None
            if states is None
            else StateForward.of(states, self.state_nodes, forward_batch),
            adapters=forward_batch.adapters,
        )
        with (
            torch.inference_mode(),
            forward_context(context),
            self.scopes.with_active_single_forward_manager(step),
        ):
            output: LogitsProcessorOutput = self.model(
                forward_batch.input_ids,
                forward_batch.positions,
                forward_batch,
                stack=stack,
            )
        return output

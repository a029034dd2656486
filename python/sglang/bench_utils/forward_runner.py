"""A model runner without a scheduler: one fixed batch, forward by forward.

Measures the cost of the model alone: no queue, argmax sampling only, no prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.forward.batch import ForwardBatch, ForwardMode, HostLens
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.common import extend_rows
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.paths import resolve_model_path


class ForwardRunner:
    """Runs one batch at a time: `prefill`, any number of `decode`, `release`.

    Raises:
        ValueError: the model cannot be loaded, or memory does not suffice.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        assert server_args.model_path is not None
        if server_args.kv_canary != "none":
            raise ValueError(
                f"--kv-canary {server_args.kv_canary} needs a scheduler to look at its "
                "findings, and there is none here; remove it "
                "(benchmark/e2e/bench_canary.py measures the canary)"
            )
        folder = resolve_model_path(server_args.model_path)
        self.runner = ModelRunner(
            server_args=server_args,
            model_config=ModelConfig.from_path(
                folder,
                context_length=server_args.context_length,
                quantization=server_args.quantization,
            ),
        )
        self.runner.initialize()
        self._pool = self.runner.req_to_token_pool
        self._cache = ChunkCache(
            req_to_token_pool=self._pool, allocator=self.runner.allocator
        )
        self._rows: list[int] = []
        self._lens: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self.runner.model_config.vocab_size

    @property
    def context_len(self) -> int:
        return self.runner.model_config.context_len

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Start a batch; all its prompts in one forward.

        Returns:
            int64 [R], the most likely next tokens.

        Raises:
            ValueError: the batch does not fit; names the flags.
        """
        rows = self._pool.alloc(len(prompts))
        if rows is None:
            raise ValueError(
                f"a batch of {len(prompts)} needs as many --max-running-requests, but "
                f"there are {self.runner.max_running_requests}"
            )
        self._rows, self._lens = rows, [0] * len(rows)
        tokens = [token for prompt in prompts for token in prompt]
        return self._forward(
            ForwardMode.EXTEND, torch.tensor(tokens), [len(p) for p in prompts]
        )

    def decode(self, tokens: Tensor) -> Tensor:
        """Run one step on `tokens` int64 [R]; return the likeliest next tokens [R]."""
        return self._forward(ForwardMode.DECODE, tokens, [1] * len(self._rows))

    def release(self) -> None:
        """End the batch."""
        for row, length in zip(self._rows, self._lens, strict=True):
            self.runner.allocator.free(self._pool.row_slots(row, 0, length))
        self._pool.free(self._rows)
        self._rows, self._lens = [], []

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards includes its work."""
        if self.runner.device == "cuda":
            torch.cuda.synchronize()

    def _forward(self, mode: ForwardMode, tokens: Tensor, counts: list[int]) -> Tensor:
        output = self.runner.forward(self._prepare(mode, tokens, counts))
        return output.next_token_logits.argmax(dim=-1)

    def _prepare(
        self, mode: ForwardMode, tokens: Tensor, counts: list[int]
    ) -> ForwardBatch:
        """Allocate slots for `counts` more tokens per row; build the forward batch."""
        starts = self._lens
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        slots = None
        if max(ends) <= self.context_len:
            slots = extend_rows(
                self._cache, rows=self._rows, prefix_lens=starts, seq_lens=ends
            )
        if slots is None:
            raise ValueError(
                f"{len(ends)} requests of {max(ends)} tokens do not fit the context of "
                f"{self.context_len} tokens and the {self.runner.max_total_num_tokens} "
                "KV slots; lower --batch-size, --input-len or --output-len, or raise "
                "--max-total-tokens"
            )
        self._lens = ends
        device = self.runner.device
        prefix_lens = torch.tensor(starts, device=device)
        extend_lens = torch.tensor(counts, device=device)
        rows = torch.tensor(self._rows, device=device)
        zeros = torch.zeros_like(rows)
        is_decode = mode.is_decode
        indptr = torch.cat((zeros[:1], extend_lens.cumsum(0)))
        positions = (
            prefix_lens
            if is_decode
            else torch.cat(
                [
                    torch.arange(start, end, device=device)
                    for start, end in zip(starts, ends, strict=True)
                ]
            )
        )
        needs_host_lens = self.runner.attn_backend.capabilities.needs_cpu_seq_lens
        return ForwardBatch(
            forward_mode=mode,
            input_ids=tokens.to(device),
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=rows,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            seq_lens=prefix_lens + extend_lens,
            req_serial=rows,
            salt=zeros,
            rids_int=zeros,
            qo_indptr=None if is_decode else indptr,
            lens_cpu=HostLens(prefix_lens=starts, extend_lens=counts)
            if needs_host_lens
            else None,
            logits_rows=None if is_decode else indptr[1:] - 1,
        )

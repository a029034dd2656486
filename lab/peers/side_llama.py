"""The side of llama.cpp as a worker, through the C interface of `llama_cpp`.

Commands: `load` (folder, target, threads), `generate`. All prompts run as sequences of
one context; a sequence leaves the batch when its output is long enough.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_model import PRECISIONS, write_gguf

from sglang.bench_utils.worker import serve

CONTEXT_PER_SEQUENCE = 512
MAX_SEQUENCES = 16
BATCH_TOKENS = 512

# Kept alive, because the library holds a bare pointer to it.
SILENCE = llama_cpp.llama_log_callback(lambda level, text, data: None)

# (token, position, sequence, whether its logits are needed)
Entry = tuple[int, int, int, bool]


class Context:
    """One llama.cpp context for `sequences` sequences."""

    def __init__(self, model: Any, *, sequences: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT_PER_SEQUENCE * sequences
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(
        self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]
    ) -> list[list[int]]:
        """Return greedy outputs of these lengths."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        outputs: list[list[int]] = [[] for _ in prompts]
        entries: list[Entry] = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while entries:
            for start in range(0, len(entries), BATCH_TOKENS):
                self._decode(entries[start : start + BATCH_TOKENS], outputs)
            entries = [
                (output[-1], len(prompts[s]) + len(output) - 1, s, True)
                for s, output in enumerate(outputs)
                if len(output) < output_lens[s]
            ]
        return outputs

    def _decode(self, entries: Sequence[Entry], outputs: list[list[int]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, has_logits) in enumerate(entries):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = has_logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        for i, (_, _, sequence, has_logits) in enumerate(entries):
            if has_logits:
                logits = llama_cpp.llama_get_logits_ith(self._context, i)
                row = np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                outputs[sequence].append(int(row.argmax()))


@dataclass
class LlamaSide:
    """Holds, per precision, a context for one sequence and one for many."""

    contexts: dict[str, dict[bool, Context]] = field(default_factory=dict)

    def load(self, folder: str, target: str, threads: int) -> list[str]:
        """Convert the model to every precision and load it; return their names."""
        llama_cpp.llama_log_set(SILENCE, None)
        llama_cpp.llama_backend_init()
        for precision in PRECISIONS:
            path = Path(target) / f"{precision}.gguf"
            write_gguf(Path(folder), path, precision)
            params = llama_cpp.llama_model_default_params()
            model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
            if not model:
                raise RuntimeError(f"llama.cpp does not load the {precision} model")
            self.contexts[precision] = {
                True: Context(model, sequences=1, threads=threads),
                False: Context(model, sequences=MAX_SEQUENCES, threads=threads),
            }
        return list(self.contexts)

    def generate(
        self,
        prompts: list[list[int]],
        output_lens: list[int],
        is_sequential: bool,
        precision: str,
    ) -> dict[str, Any]:
        """Return seconds and tokens of all prompts, at once or one after another."""
        context = self.contexts[precision][is_sequential]
        began = time.perf_counter()
        if is_sequential:
            outputs = [
                context.generate([prompt], [length])[0]
                for prompt, length in zip(prompts, output_lens, strict=True)
            ]
        else:
            outputs = context.generate(prompts, output_lens)
        return {"seconds": time.perf_counter() - began, "outputs": outputs}


if __name__ == "__main__":
    side = LlamaSide()
    serve({"load": side.load, "generate": side.generate})

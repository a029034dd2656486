"""The side of `transformers` as a worker: `generate` as its users would tune it.

Commands: `load` (folder, dtypes), `generate`. Evaluation mode, inference mode, KV
cache, greedy, no end of sequence. A batch is padded on the left and runs until its
longest output is done, so it may be cut into groups of similar output length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from sglang.bench_utils.report import Json
from sglang.bench_utils.worker import serve

PAD_TOKEN = 0


@dataclass
class TransformersSide:
    """Holds one model per dtype once `load` was called."""

    models: dict[str, Any] = field(default_factory=dict)

    def load(self, folder: str, dtypes: list[str], threads: int) -> Json:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        for dtype in dtypes:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype)
            ).eval()
            # The measured lengths are fixed: nothing may end a row early.
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = PAD_TOKEN
            self.models[dtype] = model
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(
        self,
        prompts: list[list[int]],
        output_lens: list[int],
        is_sequential: bool,
        dtype: str,
        cache: str,
        groups: int,
    ) -> Json:
        """Return seconds and tokens of all prompts, in `groups` batches."""
        model = self.models[dtype]
        options: Json = {}
        if cache == "static":
            options = {"cache_implementation": "static", "disable_compile": True}
        order = sorted(range(len(prompts)), key=lambda i: output_lens[i])
        batches = [[i] for i in range(len(prompts))]
        if not is_sequential:
            batches = _split(order, groups)
        outputs: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                rows = _generate_batch(
                    model,
                    [prompts[i] for i in batch],
                    max(output_lens[i] for i in batch),
                    options,
                )
                for i, row in zip(batch, rows, strict=True):
                    outputs[i] = row[: output_lens[i]]
        return {"seconds": time.perf_counter() - began, "outputs": outputs}


def _split(items: Sequence[int], groups: int) -> list[list[int]]:
    """Split `items` in order into `groups` lists of nearly equal length."""
    bounds = [len(items) * g // groups for g in range(groups + 1)]
    pairs = zip(bounds, bounds[1:], strict=False)
    return [list(items[low:high]) for low, high in pairs if high > low]


def _generate_batch(
    model: Any, prompts: Sequence[list[int]], new_tokens: int, options: Json
) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD_TOKEN)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    result = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        **options,
    )
    rows: list[list[int]] = result[:, width:].tolist()
    return rows


if __name__ == "__main__":
    side = TransformersSide()
    serve({"load": side.load, "generate": side.generate})

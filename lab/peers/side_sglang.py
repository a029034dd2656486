"""This engine's side of the comparison: the offline `Engine` as a worker.

Commands: `load` (flags of the engine), `generate`, `first_token`, `flush`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.bench_utils.launch import flush_when_idle
from sglang.bench_utils.report import Json
from sglang.bench_utils.worker import serve


def sampling_params(output_len: int) -> Json:
    return {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}


@dataclass
class EngineSide:
    """Holds the engine once `load` was called."""

    engine: sglang.Engine | None = None

    def load(self, **flags: Any) -> None:
        self.engine = sglang.Engine(**flags)

    def generate(
        self, prompts: list[list[int]], output_lens: list[int], is_sequential: bool
    ) -> Json:
        """Return seconds and tokens of all prompts, at once or one after another."""
        engine = self._loaded()
        params = [sampling_params(output_len) for output_len in output_lens]
        began = time.perf_counter()
        if is_sequential:
            answers: Any = [
                engine.generate(input_ids=prompt, sampling_params=params[i])
                for i, prompt in enumerate(prompts)
            ]
        else:
            answers = engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "outputs": [answer["output_ids"] for answer in answers],
            "cached_tokens": sum(a["meta_info"]["cached_tokens"] for a in answers),
        }

    def first_token(self, prompt: list[int]) -> float:
        """Return the seconds until the first token of a stream."""
        params = sampling_params(2)
        began = time.perf_counter()
        stream = self._loaded().generate(
            input_ids=prompt, sampling_params=params, stream=True
        )
        assert not isinstance(stream, (dict, list))
        next(stream)
        seconds = time.perf_counter() - began
        for _ in stream:
            pass
        return seconds

    def flush(self) -> None:
        flush_when_idle(self._loaded().flush_cache)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    def _loaded(self) -> sglang.Engine:
        if self.engine is None:
            raise ValueError("call load first")
        return self.engine


if __name__ == "__main__":
    side = EngineSide()
    serve(
        {
            "load": side.load,
            "generate": side.generate,
            "first_token": side.first_token,
            "flush": side.flush,
        }
    )
    side.close()

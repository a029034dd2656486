"""The demo model with an EAGLE head beside the demo model alone."""

from __future__ import annotations

from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.harness import EngineHarness
from sglang.test.spec_accept import AcceptRecorder
from sglang.test.spec_parity import (
    Ask,
    answer_all,
    assert_parity,
    check_accounting,
    check_no_leak,
)
from sglang.test.spec_prompts import code_prompts
from sglang.test.spec_world import device, plain_engine

NEW_TOKENS = 32
CONTEXT = 512


class EagleCase:
    """Checks of a server's configuration, which subclasses choose.

    Attributes:
        least_accept_length: on code that the model goes on with.
    """

    algorithm: str
    topk: int
    num_steps: int
    num_draft_tokens: int
    page_size: int
    overlap: bool
    least_accept_length: float

    def make(self, **options):
        usual = {
            "device": device(),
            "dtype": "float32",
            "context_length": CONTEXT,
            "page_size": self.page_size,
            "max_running_requests": 8,
            "max_total_tokens": 32768,
            "chunked_prefill_size": 64,
            "disable_overlap_schedule": not self.overlap,
            "skip_tokenizer_init": True,
            "speculative_algorithm": self.algorithm,
            "speculative_num_steps": self.num_steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.num_draft_tokens,
        }
        return EngineHarness(
            bundled_demo_model_path(), overlap=self.overlap, **usual | options
        )

    def asks(self, **options):
        usual = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        return [
            Ask(prompt=prompt, options=usual | options, is_plain=True)
            for prompt in code_prompts()[:6]
        ]

    def test_output_accept_length_and_no_leak(self):
        asks = self.asks()
        reference = plain_engine(bundled_demo_model_path(), context_length=CONTEXT)
        engine = self.make()
        assert engine.scheduler.max_in_flight == int(self.overlap)
        recorder = AcceptRecorder(engine.scheduler)
        answers = answer_all(engine, asks)
        assert_parity(
            asks,
            answer_all(reference, asks),
            answers,
            aborted=set(),
            reference=reference,
        )
        assert recorder.mean() > self.least_accept_length, recorder.lens()
        assert max(recorder.lens()) == self.num_steps + 1, recorder.lens()
        recorder.check_counters()
        check_no_leak(engine)

    def test_a_second_turn_finds_the_first(self):
        """Prompt and answer of a turn are the next one's prefix, draft slots too."""
        engine = self.make()
        recorder = AcceptRecorder(engine.scheduler)
        prompt = code_prompts()[0] + code_prompts()[1] * 4
        first = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
        said = prompt + first.output_ids
        again = engine.generate(said, max_new_tokens=40, ignore_eos=True)
        usable = (len(said) - 2) // self.page_size * self.page_size
        assert again.cached_tokens >= usable - self.page_size > 0
        fresh = self.make(disable_radix_cache=True)
        fresh_recorder = AcceptRecorder(fresh.scheduler)
        alone = fresh.generate(said, max_new_tokens=40, ignore_eos=True)
        assert again.output_ids == alone.output_ids
        (whole,) = fresh_recorder.runs.values()
        assert list(recorder.runs.values())[-1].accept_lens == whole.accept_lens
        check_no_leak(engine)

    def test_aborts_give_everything_back(self):
        engine = self.make()
        for i, ask in enumerate(self.asks(stream=True)):
            engine.submit(ask.prompt, rid=str(i), **ask.options)

        def on_step(step):
            check_accounting(engine.scheduler)
            if step >= 4:
                engine.abort(str(step - 4))

        answers = engine.run(on_step=on_step)
        reasons = [answer.finish_reason.type for answer in answers.values()]
        assert reasons.count("abort") >= 3
        check_no_leak(engine)

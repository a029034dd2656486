"""Names and offsets of the tokens in a completion's logprobs, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sglang.srt.managers.messages.io_struct import LogprobDelta
from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=3, suite="cpu")

DEMO = load_tokenizer(str(bundled_demo_model_path()))


@given(
    prompt=st.text("aé日 \n", max_size=8),
    markers=st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>"]), max_size=2),
    output=st.text("bü🎉 ", max_size=8),
    begins_special=st.booleans(),
    cut=st.integers(0, 40),
)
@settings(max_examples=count(ci=200, full=5000), derandomize=True, deadline=None)
def test_offsets_point_at_the_tokens_in_the_shown_text(
    prompt: str, markers: list[str], output: str, begins_special: bool, cut: int
) -> None:
    """The tokenizer may put a BOS in front, a client writes special tokens as text, an
    output may hold some that are not shown."""
    prompt = "".join([*markers, prompt])
    bos = [0] if begins_special else []
    inputs = bos + DEMO.encode(prompt, add_special_tokens=False)
    outputs = DEMO.encode(output, add_special_tokens=False)
    outputs[cut % (len(outputs) + 1) : 0] = [2]
    logprobs = CompletionLogprobs(DEMO, top=1, prompt_text=prompt)
    first = LogprobDelta(
        input_token=[(None, token) for token in inputs],
        output_token=[(-1.0, token) for token in outputs[:cut]],
    )
    rest = LogprobDelta(output_token=[(-1.0, token) for token in outputs[cut:]])
    parts = [logprobs.add(delta, with_input=True) for delta in (first, rest)]
    names = [name for part in parts for name in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets == sorted(offsets)
    assert len(names) == len(inputs) + len(outputs)
    text = prompt + output
    for i, token in enumerate(inputs + outputs):
        is_shown = token not in DEMO.special_ids or (len(bos) <= i < len(inputs))
        if is_shown and not names[i].startswith("bytes:"):
            assert text.startswith(names[i], offsets[i])


def test_parts_of_a_character_have_names_of_their_own() -> None:
    """One name for all of them would leave one entry of `top_logprobs`."""
    parts = DEMO.encode("日", add_special_tokens=False)
    assert len(parts) == 3
    delta = LogprobDelta(
        output_token=[(-1.0, parts[0])],
        output_top=[[(-1.0 - i, token) for i, token in enumerate(parts)]],
    )
    shown = CompletionLogprobs(DEMO, top=3).add(delta, with_input=False)
    assert shown["tokens"] == [r"bytes:\xe6"]
    assert shown["top_logprobs"] == [
        {r"bytes:\xe6": -1.0, r"bytes:\x97": -2.0, r"bytes:\xa5": -3.0}
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

"""The visible text of one output: stop strings are cut off, and text that may begin one
is held back.

The scheduler detects that a stop string matched; this module decides which text is
shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.utils.detokenizer import IncrementalDetokenizer
from sglang.srt.utils.stop_matcher import find_stop
from sglang.srt.utils.text_stops import held_back

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import FinishReason
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils.hf_tokenizer import Tokenizer


class OutputText:
    """Turns the tokens of one output into the pieces of text that may be shown.

    A stop string and everything after it is never shown, unless `no_stop_trim` is set.
    Text that matched a `stop_regex` is shown: the text to hold back for a pattern is
    unbounded, and streams must equal whole answers.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens
        )
        self._is_trimmed = not params.no_stop_trim
        self._stops = tuple(params.stop) if self._is_trimmed else ()
        self._held = ""

    def push(self, tokens: Sequence[int], finish: FinishReason | None = None) -> str:
        """Return the new text that may be shown; with `finish`, all the rest."""
        if finish is not None:
            return self._finish(tokens, finish.matched)
        text = self._held + self._detokenizer.push_many(tokens)
        shown = len(text) - held_back(text, self._stops)
        self._held = text[shown:]
        return text[:shown]

    def _finish(self, tokens: Sequence[int], matched: int | str | None) -> str:
        is_stop_token = isinstance(matched, int) and tokens and tokens[-1] == matched
        if is_stop_token and self._is_trimmed:
            tokens = tokens[:-1]
        before = self._held + self._detokenizer.push_many(tokens[:-1])
        text = before + self._detokenizer.push_many(tokens[-1:])
        text += self._detokenizer.finish()
        if not isinstance(matched, str) or matched not in self._stops:
            return text
        # The last token completed the match. The string may also occur earlier, where
        # `min_new_tokens` kept it from ending the output.
        at = find_stop(text, matched, known=len(before))
        return text if at < 0 else text[:at]

"""Compares the output shown to a client with the tokens that the engine sampled.

```
sampler --> request --> message --> front --> text --> answer
        marks       digest       digest   second decoding   lengths
```
The KV canary compares the first step with the device's marks (`result_faults.py`). This
module compares the tokens that arrive with the engine's digest of them, and the shown
text with a second decoding, before either is passed on. A difference is an error of
this request only.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from sglang.srt.managers.messages.errors import EngineFailure, log_failure
from sglang.srt.managers.messages.output_digest import extend_digest, first_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.front.request_state import Update
    from sglang.srt.managers.messages.io_struct import FinishReason, RequestOutput
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils.hf_tokenizer import Tokenizer


def output_fault(rid: str, what: str) -> EngineFailure:
    """Log that a request's answer differs from the sampled tokens; return its error."""
    return log_failure(f"kv_canary: output of request {rid}: {what}")


def check_shown(update: Update, *, num_chars: int) -> None:
    """Check the text of a request that an answer has shown so far.

    Raises:
        EngineFailure: its length differs from the text seen by `OutputCheck`.
    """
    if update.text_len is not None and update.text_len != num_chars:
        raise output_fault(
            update.rid, f"{num_chars} of {update.text_len} characters are shown"
        )


class OutputCheck:
    """Follows one output from the messages to the shown text.

    Args:
        tokenizer: the tokenizer, or None if no text is shown. Text of a decoder that
            depends on neighboring tokens is not compared.

    Attributes:
        digest: digest of the tokens that have arrived.
        text_len: number of characters shown so far.
    """

    def __init__(
        self, rid: str, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self._rid = rid
        self.digest = self._shown_digest = first_digest(rid)
        self.text_len = 0
        # The newest piece of text that was compared.
        self._text = ""
        self._table = None if tokenizer is None else tokenizer.token_bytes_table
        self._dropped: frozenset[int] = frozenset()
        if tokenizer is not None and params.skip_special_tokens:
            self._dropped = tokenizer.special_ids
        self._is_trimmed = not params.no_stop_trim
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Text of the tokens that has not been shown yet.
        self._due = ""

    def take_tokens(self, output: RequestOutput) -> EngineFailure | None:
        """Add the tokens of a message; return an error if they differ from the engine's
        tokens.
        """
        self.digest = extend_digest(self.digest, output.output_ids)
        if output.digest is not None and output.digest != self.digest:
            return output_fault(
                self._rid,
                f"the tokens up to {output.completion_tokens} are not the ones that "
                "the engine keeps",
            )
        if self._table is not None:
            shown = self._shown_tokens(output.output_ids, output.finish_reason)
            self._due += self._utf8.decode(self._bytes(shown))
        return None

    def _shown_tokens(
        self, tokens: Sequence[int], finish: FinishReason | None
    ) -> Sequence[int]:
        """Leave out a stop token whose text is not shown. It may not be decoded either:
        its bytes could complete a character.
        """
        if finish is None or not tokens or not self._is_trimmed:
            return tokens
        return tokens[:-1] if tokens[-1] == finish.matched else tokens

    def take_text(self, text: str, finish: FinishReason | None) -> None:
        """Add the next piece of shown text.

        Raises:
            EngineFailure: the text does not match the tokens.
        """
        self.text_len += len(text)
        self._text = text
        if self._table is None:
            return
        if finish is not None:
            self._due += self._utf8.decode(b"", final=True)
        due, rest = self._due[: len(text)], self._due[len(text) :]
        if due != text or (finish is not None and not self._may_hide(rest, finish)):
            raise output_fault(self._rid, "the text is not the one of its tokens")
        self._due = rest

    def check_update(self, update: Update) -> None:
        """Check the news of a request before anybody gets them.

        Raises:
            EngineFailure: they are not the tokens and the text that were compared.
        """
        self._shown_digest = extend_digest(self._shown_digest, update.output_ids)
        if self._shown_digest != self.digest or update.text != self._text:
            raise output_fault(self._rid, "an update differs from what was compared")

    def _may_hide(self, rest: str, finish: FinishReason) -> bool:
        """Whether an output with this end may omit the text `rest`."""
        is_cut = self._is_trimmed and isinstance(finish.matched, str)
        return not rest or (is_cut and rest.startswith(str(finish.matched)))

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        assert self._table is not None
        if len(tokens) == 1:
            # Nearly every message of a stream.
            (token,) = tokens
            return b"" if token in self._dropped else self._table.get(token)
        kept = (token for token in tokens if token not in self._dropped)
        return b"".join(map(self._table.get, kept))

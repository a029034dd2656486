"""Per-request sampling parameters: names, defaults and validation.

Owns the fields that a user may set under `sampling_params`. Knows nothing of tensors,
batches or tokenizers; the caller fills in what depends on a tokenizer (`stop` lengths).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.utils.quoting import quoted
from sglang.srt.utils.stop_patterns import compile_stop_patterns

GREEDY_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1
# Integers have 64 bits on the wire and as tensors.
MAX_INT = 2**63 - 1
MAX_STOPS = 128
MAX_STOP_CHARS = 4096
# Compared with the end of the output for every piece of text that is shown.
MAX_ALL_STOP_CHARS = 4 * MAX_STOP_CHARS
# Most entries of `logit_bias` and of `stop_token_ids`.
MAX_TOKEN_ENTRIES = 1 << 16
# A logit of this size stays finite in float32 under any penalty and temperature.
MAX_LOGIT_BIAS = 1e30
MAX_TEMPERATURE = 1e30
MAX_N = 1 << 16


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """SGLang's sampling parameters, with SGLang's defaults.

    `temperature` 0 (or below 1e-5) means greedy. `top_k` -1 means the whole vocabulary.
    `stop` and `stop_regex` are lists here; the wire also accepts a single string.
    `stop_regex` uses RE2 syntax (see `utils.stop_patterns`). A stop that is complete
    before `min_new_tokens` is ignored; later ones count. If `sampling_seed` is None the
    scheduler draws one.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def grammar_key(self) -> tuple[str, str] | None:
        """(kind, source) of the grammar, or None for free text."""
        for kind in GRAMMAR_FIELDS:
            source = getattr(self, kind)
            if source is not None:
                return kind, source
        return None

    @property
    def is_bound_from_the_start(self) -> bool:
        """Whether a grammar leaves no room for other text before the part it binds."""
        key = self.grammar_key
        return key is not None and key[0] != "structural_tag"

    @classmethod
    def from_wire(
        cls, raw: dict[str, Any] | None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Parse and validate a client's fields; None means the default.

        Numbers may be strings, and integers may be floats. Values that ask for nothing
        are accepted (`_NEUTRAL`, empty stops). Duplicate stops count once.

        Args:
            defaults: values of fields that the client leaves out.

        Raises:
            ValueError: an unknown field, a wrong type or a value out of range; the
                message names the field, the value and the legal range.
        """
        values = dict(defaults or {}) | {
            k: v
            for k, v in (raw or {}).items()
            if v is not None and v not in _NEUTRAL.get(k, ())
        }
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            raise ValueError(
                "sampling_params has unknown field(s) "
                f"{', '.join(map(quoted, unknown[:8]))}; "
                f"known fields: {', '.join(sorted(cls.__struct_fields__))}"
            )
        for name in _TEXT_LISTS:
            if isinstance(values.get(name), str):
                values[name] = [values[name]]
        if values.get("top_k") in (0, "0"):
            values["top_k"] = -1
        _check_sizes(values)
        for name in ("json_schema", "structural_tag"):
            if isinstance(values.get(name), dict):
                values[name] = msgspec.json.encode(values[name]).decode()
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = _int_keys(values["logit_bias"])
        try:
            params = msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"sampling_params: {error}") from error
        for name in ("stop", "stop_regex", "stop_token_ids"):
            entries = (e for e in getattr(params, name) if e != "")
            setattr(params, name, list(dict.fromkeys(entries)))
        params.verify()
        return params

    def verify(self) -> None:
        """Raise ValueError for the first value out of range."""
        for name, is_legal, rule in RULES:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
            if not is_legal(value):
                raise ValueError(f"{name} must be {rule}, got {quoted(value)}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed "
                f"max_new_tokens ({self.max_new_tokens})"
            )
        given = [kind for kind in GRAMMAR_FIELDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(
                f"only one of {', '.join(GRAMMAR_FIELDS)} may be set, got "
                f"{' and '.join(given)}"
            )
        for token_id, bias in (self.logit_bias or {}).items():
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise ValueError(
                    f"logit_bias of token id {token_id} must be in "
                    f"[-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {bias}"
                )
        if any(not text for text in self.stop):
            raise ValueError("stop must not contain an empty string")
        compile_stop_patterns(self.stop_regex)

    def within_vocab(self, vocab_size: int) -> SamplingParams:
        """Return these parameters without stop tokens that no output can contain."""
        known = [token for token in self.stop_token_ids if 0 <= token < vocab_size]
        if len(known) == len(self.stop_token_ids):
            return self
        return msgspec.structs.replace(self, stop_token_ids=known)

    def verify_vocab(self, vocab_size: int) -> None:
        """Raise ValueError for a token id outside `[0, vocab_size)`."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias or {}),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"{name} holds token id {token_id}, outside the vocabulary "
                        f"of {vocab_size} tokens"
                    )


_TEXT_LISTS = ("stop", "stop_regex")
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")

# Field -> values that mean the default, besides None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sampling_seed": (-1, "-1"),
    "custom_params": ({},),
    **dict.fromkeys(GRAMMAR_FIELDS, ("",)),
}

RULES: tuple[tuple[str, Any, str], ...] = (
    ("max_new_tokens", lambda v: 0 <= v <= MAX_INT, "at least 0 and below 2**63"),
    ("min_new_tokens", lambda v: 0 <= v <= MAX_INT, "at least 0 and below 2**63"),
    (
        "temperature",
        lambda v: 0.0 <= v <= MAX_TEMPERATURE,
        f"at least 0 and at most {MAX_TEMPERATURE:g}",
    ),
    ("top_p", lambda v: 0.0 < v <= 1.0, "in (0, 1]"),
    (
        "top_k",
        lambda v: v == -1 or 1 <= v <= MAX_INT,
        "-1 or 0 (whole vocabulary) or at least 1, below 2**63",
    ),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "in [0, 1]"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("repetition_penalty", lambda v: 0.01 <= v <= 2.0, "in [0.01, 2]"),
    ("n", lambda v: 1 <= v <= MAX_N, f"between 1 and {MAX_N}"),
    (
        "sampling_seed",
        lambda v: v is None or 0 <= v <= MAX_SEED,
        f"between 0 and {MAX_SEED}",
    ),
)


def _check_sizes(values: dict[str, Any]) -> None:
    """Refuse lists that are too large, by size alone: no entry has been read yet."""
    for name, limit in (
        ("stop", MAX_STOPS),
        ("stop_regex", MAX_STOPS),
        ("stop_token_ids", MAX_TOKEN_ENTRIES),
        ("logit_bias", MAX_TOKEN_ENTRIES),
    ):
        entries = values.get(name, ())
        if isinstance(entries, list | dict) and len(entries) > limit:
            raise ValueError(
                f"{name} has {len(entries)} entries, but at most {limit} are accepted"
            )
        if name in _TEXT_LISTS and isinstance(entries, list):
            _check_lengths(name, [len(e) for e in entries if isinstance(e, str)])


def _check_lengths(name: str, lengths: list[int]) -> None:
    for what, length, limit in (
        ("an entry of", max(lengths, default=0), MAX_STOP_CHARS),
        ("entries that together have", sum(lengths), MAX_ALL_STOP_CHARS),
    ):
        if length > limit:
            raise ValueError(
                f"{name} has {what} {length} characters, but at most {limit} are "
                "accepted"
            )


def _int_keys(bias: dict[Any, Any]) -> dict[Any, Any]:
    """Turn digit strings into token ids, because JSON object keys are strings."""
    converted: dict[Any, Any] = {}
    for key, value in bias.items():
        try:
            converted[int(key)] = value
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"logit_bias has key {str(key)[:32]!r}; keys must be token ids"
            ) from error
    return converted

"""A mock target and a draft head side by side, and the expected rows of the head."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sglang.srt.configs.draft_config import layers_to_capture
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.models import mock_draft_math, mock_math
from sglang.srt.models.mock_draft_math import DraftSettings
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_mock_draft

VOCAB = 1000
DRAFT_VOCAB = 730
# kind, source, draft vocabulary
HEADS = [
    ("EAGLE", "attention", None),
    ("EAGLE", "hidden", None),
    ("EAGLE3", "attention", DRAFT_VOCAB),
    ("EAGLE3", "hidden", None),
    ("EAGLE3", "hidden", VOCAB),
    ("STANDALONE", None, None),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    hidden_states: Tensor | None


class Pair:
    """A target and a head that drafts for it, each with a KV pool of its own."""

    def __init__(self, tmp_path, target_folder, head, **args):
        kind, source, draft_vocab_size = head
        sizes = {"vocab_size": VOCAB}
        if draft_vocab_size is not None:
            sizes["draft_vocab_size"] = draft_vocab_size
        folder = write_mock_draft(tmp_path, kind=kind, source=source, **sizes)
        self.kind = kind
        self.target = ForwardHarness(target_folder, **args)
        self.draft = ForwardHarness(folder, is_draft_worker=True, **args)
        self.model = self.draft.runner.model
        # The draft's row p has token p + this.
        self.offset = int(kind != "STANDALONE")
        config = self.draft.runner.model_config
        self.settings = DraftSettings.from_config(config)
        target = self.target.runner.model
        if kind == "EAGLE3":
            target.capture_layers(layers_to_capture(config, num_target_layers=2))
        if kind != "STANDALONE":
            self.model.set_embed_and_head(target.embed_tokens, target.lm_head)

    def target_states(self, spans):
        batch = dataclasses.replace(
            self.target.prepare(ForwardMode.EXTEND, spans),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        return self.target.run(batch).hidden_states

    def propose(self, mode, spans, states):
        """Logits and hidden states of all rows."""
        batch = dataclasses.replace(
            self.draft.prepare(mode, spans),
            spec_info=None if self.kind == "STANDALONE" else Spec(hidden_states=states),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            logits_rows=None,
        )
        output = self.draft.run(batch)
        return output.next_token_logits, output.hidden_states

    def prefill(self, tokens, states=None):
        """The draft's row of one request, and its proposals at all positions."""
        target_row = self.target.new_row(tokens[:-1])
        row = self.draft_row(tokens)
        span = len(tokens) - 1
        own = self.target_states([(target_row, span)])
        states = own if states is None else states
        return row, self.propose(ForwardMode.EXTEND, [(row, span)], states)

    def draft_row(self, tokens):
        """A row of the draft as long as the target's of all `tokens` but the last."""
        return self.draft.new_row(tokens[self.offset : len(tokens) - 1 + self.offset])

    def append(self, row, tokens):
        """Let the draft's row follow `tokens`, which have got one more."""
        self.draft.append(row, tokens[self.offset - 2])

    def release(self, row):
        self.draft.release(row)


def random_tokens(rng, length):
    return [rng.randrange(VOCAB) for _ in range(length)]


def folds_of(tokens):
    """X_0 and X_1 after each of `tokens`, from whole signatures."""
    ids, places = torch.tensor(tokens), torch.arange(len(tokens))
    x, folds = mock_math.key_layer0(ids, places), []
    for layer in range(2):
        folds.append(mock_math.fold_signs(mock_math.sig(x), layer).cumsum(0))
        x = mock_math.key_layer1(folds[0], places)
    return folds


def expected_rows(pair, tokens):
    """Logits and hidden states of draft rows 0 .. len(tokens) - 2."""
    settings, dtype = pair.settings, pair.draft.runner.dtype
    places = torch.arange(len(tokens) - 1) + pair.offset
    fold0, fold1 = (fold[places] for fold in folds_of(tokens))
    code, weights = mock_draft_math.proposal(fold0, fold1, places, settings)
    bits = (code[:, None] >> torch.arange(12)) & 1
    hot = settings.hot_token_ids()
    ids = torch.arange(VOCAB) if hot is None else hot
    rows = 2.0 * ((ids[:, None] >> torch.arange(12)) & 1) - 1
    logits = ((2.0 * bits - 1) * weights) @ rows.T
    hidden = mock_draft_math.hidden_state(code, weights, fold0, fold1)
    return logits.to(dtype), hidden.to(dtype)


def assert_rows(pair, found, tokens, rows=slice(None)):
    expected = expected_rows(pair, tokens)
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual.cpu(), wanted[rows])


def check_rows(pair, rng, lengths, *, num_steps=5):
    """Prefill in chunks of a batch, then steps that read the head's own states: every
    row proposes what the tokens imply."""
    batch = [random_tokens(rng, length) for length in lengths]
    target_rows = [pair.target.new_row(tokens[:-1]) for tokens in batch]
    rows = [pair.draft_row(tokens) for tokens in batch]
    states = [torch.empty(0)] * len(batch)
    done = [0] * len(batch)
    while todo := [i for i, tokens in enumerate(batch) if done[i] < len(tokens) - 1]:
        ends = [min(done[i] + rng.randrange(1, 60), len(batch[i]) - 1) for i in todo]
        given = pair.target_states(
            [(target_rows[i], end) for i, end in zip(todo, ends, strict=True)]
        )
        spans = [(rows[i], end) for i, end in zip(todo, ends, strict=True)]
        logits, hidden = pair.propose(ForwardMode.EXTEND, spans, given)
        sizes = [end - done[i] for i, end in zip(todo, ends, strict=True)]
        parts = zip(todo, ends, logits.split(sizes), hidden.split(sizes), strict=True)
        for i, end, own_logits, own_hidden in parts:
            chunk = slice(done[i], end)
            assert_rows(pair, (own_logits, own_hidden), batch[i], chunk)
            states[i], done[i] = own_hidden[-1:], end
    for _ in range(num_steps):
        for row, tokens in zip(rows, batch, strict=True):
            tokens.append(rng.randrange(VOCAB))
            pair.append(row, tokens)
        logits, hidden = pair.propose(
            ForwardMode.DECODE, [(row, None) for row in rows], torch.cat(states)
        )
        for i, tokens in enumerate(batch):
            one = slice(i, i + 1)
            assert_rows(pair, (logits[one], hidden[one]), tokens, slice(-1, None))
            states[i] = hidden[one]

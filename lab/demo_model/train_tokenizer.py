"""Training of the byte-level BPE tokenizer; writes tokenizer.json and
tokenizer_config.json, chat template included, into the asset folder.

Knows the text of the training split only; refuses to know the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.demo_model.paths import (
    ASSETS,
    CORPUS,
    ENDOFTEXT,
    IM_END,
    SPECIAL_TOKENS,
)

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 2048
# Words may take one leading sign ("(self", "_name", " return"), digits are separate so
# that no vocabulary is spent on numbers, and signs may take the line break after them.
# The rest of an indentation is one token after the line break.
WORD_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}"
    "{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def iter_text(corpus: Path) -> Iterator[str]:
    """Yield the training files and, for the words of requests, the user turns."""
    with (corpus / "train.jsonl").open(encoding="utf-8") as reader:
        for line in reader:
            yield json.loads(line)["text"]
    with (corpus / "chat_train.jsonl").open(encoding="utf-8") as reader:
        for line in reader:
            yield json.loads(line)["user"]


def train(corpus: Path) -> Tokenizer:
    """Return the trained tokenizer; ids 0.. are `SPECIAL_TOKENS` in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter_text(corpus), trainer=trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Return tokenizer_config.json, for transformers and serving engines."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "bos_token": ENDOFTEXT,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    tokenizer = train(args.corpus)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), indent=2)
    (args.out / "tokenizer_config.json").write_text(config + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()

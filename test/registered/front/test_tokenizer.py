"""Tokenizer and incremental detokenization against `tokenizers` and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from sglang.srt.utils.detokenizer import MAX_PENDING_TOKENS, IncrementalDetokenizer
from sglang.srt.utils.hf_tokenizer import Tokenizer, load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count

register_cpu_ci(est_time=12, suite="cpu")

TEXT = "def f(x):\n    return x + 1  # żółw 漢字 🙂 e\u0301\n"
DEMO = load_tokenizer(str(bundled_demo_model_path()))


PIECES = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "▁hello", "hello", "▁w", "or", "ld", "a", "漢"]


def sentencepiece_like() -> Tokenizer:
    """`PIECES` with byte fallback, as Llama 2 has them."""
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, config={}, name="pieces")


def word_level() -> Tokenizer:
    """A decoder that looks at neighbours: no table of bytes."""
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, "##s": 4, "!": 5}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, config={}, name="words")


def joined(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


@given(
    ids=st.lists(st.integers(0, DEMO.vocab_size + 2), max_size=60), skip=st.booleans()
)
@settings(max_examples=count(ci=300, full=10000), derandomize=True, deadline=None)
def test_pieces_join_to_the_full_decoding(ids: list[int], skip: bool) -> None:
    assert joined(DEMO, ids, skip=skip) == DEMO.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=80))
@settings(max_examples=count(ci=200, full=5000), derandomize=True, deadline=None)
def test_no_replacement_character_while_a_character_is_incomplete(text: str) -> None:
    detokenizer = IncrementalDetokenizer(DEMO)
    pieces = [detokenizer.push(i) for i in DEMO.encode(text)]
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    if not any(name in text for name in special):
        assert "".join(pieces) + detokenizer.finish() == text


def test_an_output_that_stops_inside_a_character_shows_it_at_the_end() -> None:
    ids = DEMO.encode("🙂")[:-1]
    detokenizer = IncrementalDetokenizer(DEMO)
    assert detokenizer.push_many(ids) == ""
    assert detokenizer.finish() == "\ufffd"


def test_byte_fallback_pieces_keep_leading_spaces() -> None:
    tokenizer = sentencepiece_like()
    ids = [PIECES.index(piece) for piece in ("▁hello", "▁w", "or", "ld")]
    ids += [3 + byte for byte in "字".encode()]
    assert joined(tokenizer, ids, skip=True) == " hello world字"
    assert joined(tokenizer, [0, *ids, 1], skip=True) == " hello world字"


def test_decoders_without_a_byte_table_use_windows() -> None:
    tokenizer = word_level()
    assert tokenizer.token_bytes_table is None
    ids = [3, 1, 2, 1, 4, 5, 3]
    assert joined(tokenizer, ids, skip=True) == tokenizer.decode(ids)


def test_window_decoder_gives_up_waiting_for_broken_bytes() -> None:
    """A table-less decoder must not hold a broken output for ever."""
    tokenizer = sentencepiece_like()
    tokenizer.token_bytes_table = None
    detokenizer = IncrementalDetokenizer(tokenizer)
    broken = [3 + 0xFF] * (3 * MAX_PENDING_TOKENS)
    emitted = "".join(map(detokenizer.push, broken))
    assert len(emitted) >= MAX_PENDING_TOKENS
    assert emitted + detokenizer.finish() == tokenizer.decode(broken)


@pytest.mark.parametrize("in_thread", [False, True])
def test_explicit_bos_and_eos_flags_decide(in_thread: bool) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<s>"])

    def encode(config: dict[str, object], *, around: bool = True) -> list[int]:
        tokenizer = Tokenizer(backend, config=config, name="x")
        return tokenizer.encode("a", add_special_tokens=around, in_thread=in_thread)

    assert encode({}) == [1, 0]
    assert encode({}, around=False) == [0]
    bos = {"bos_token": {"content": "<s>"}, "eos_token": "<s>"}
    assert encode({**bos, "add_bos_token": False}) == [0]
    assert encode({**bos, "add_bos_token": True}) == [1, 0]
    assert encode({**bos, "add_bos_token": True, "add_eos_token": True}) == [1, 0, 1]


def test_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = str(bundled_demo_model_path())
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": TEXT},
    ]
    assert DEMO.encode(TEXT) == theirs.encode(TEXT)
    assert DEMO.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert DEMO.eos_token_id == theirs.eos_token_id
    ids = [0, 1, *DEMO.encode(TEXT), 2]
    assert DEMO.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_older_formats_are_converted(tmp_path: Path) -> None:
    """A WordPiece vocabulary without tokenizer.json."""
    pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "the"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = {"tokenizer_class": "BertTokenizer", "sep_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("playing the", add_special_tokens=False) == [5, 6, 7]
    assert joined(tokenizer, [5, 6, 7], skip=True) == "playing the"


def write_folder(folder: Path, config: dict[str, object]) -> Path:
    source = bundled_demo_model_path() / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_template_sources_in_order(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    beside = json.dumps({"chat_template": "from processor"})
    (tmp_path / "chat_template.json").write_text(beside)
    assert load_tokenizer(str(tmp_path)).apply_chat_template([]) == "from processor"
    named = [{"name": "default", "template": "from list"}]
    write_folder(tmp_path, {"chat_template": named})
    assert load_tokenizer(str(tmp_path)).apply_chat_template([]) == "from list"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(str(tmp_path)).apply_chat_template([]) == "from file"
    given_one = load_tokenizer(str(tmp_path), chat_template="{{ 'given' }}")
    assert given_one.apply_chat_template([]) == "given"


def test_special_tokens_reach_templates_by_name(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "sep_token": {"content": "<sep>", "lstrip": False},
        "cls_token": "<cls>",
        "mask_token": "<mask>",
        "image_token": "<image>",
        "add_bos_token": False,
        "eos_token": None,
        "extra_special_tokens": {"audio": {"content": "<audio>"}, "messages": "no"},
        "model_specific_special_tokens": {"boi_token": "<boi>"},
        "additional_special_tokens": ["<a>", {"content": "<b>"}, 5],
    }
    write_folder(tmp_path, config)

    def shown(source: str) -> str:
        tokenizer = load_tokenizer(str(tmp_path), chat_template=source)
        return tokenizer.apply_chat_template([])

    named = ("bos", "sep", "cls", "mask", "image", "boi")
    for name in named:
        assert shown(f"{{{{ {name}_token }}}}") == f"<{name}>".replace("<bos>", "<s>")
    assert shown("{{ audio }}{{ additional_special_tokens | join }}") == "<audio><a><b>"
    absent = ("messages is string", "eos_token is defined", "add_bos_token is defined")
    for condition in absent:
        assert shown("{{ " + condition + " }}") == "False"
    config["extra_special_tokens"] = ["<c>"]
    write_folder(tmp_path, config)
    assert shown("{{ extra_special_tokens[0] }}") == "<c>"


def test_template_language() -> None:
    def render(source: str, **kwargs: object) -> str:
        tokenizer = Tokenizer(
            tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0}, merges=[])),
            config={"bos_token": "<s>"},
            name="x",
            chat_template=source,
        )
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": "ä"}], variables=kwargs
        )

    assert render("{{ bos_token }}{{ messages | tojson }}").startswith('<s>[{"role"')
    assert "ä" in render("{{ messages | tojson }}")
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("{% for i in range(9) %}{{i}}{% break %}{% endfor %}") == "0"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ flag }}", flag="on") == "on"
    with pytest.raises(ValueError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for source, flag in (
        ("{{ messages.append(1) }}", None),
        ("{{ flag | tojson }}", deep),
        ("{{ 1 / flag }}", 0),
    ):
        with pytest.raises(ValueError, match="refused the messages"):
            render(source, flag=flag)
    with pytest.raises(ValueError, match="refused the messages"):
        render("{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}")
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=f"{name} is not a free variable"):
            render("x", **{name: []})
    with pytest.raises(ValueError, match="refused the messages"):
        render("x", self=1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "is not a tokenizer"),
        ({"tokenizer_config.json": "[]"}, "must hold a JSON object"),
        ({"tokenizer_config.json": "{"}, "not valid JSON"),
        ({"chat_template.jinja": "{% if %}"}, "chat template of"),
    ],
)
def test_broken_folders_are_named(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    write_folder(tmp_path, {})
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_no_folder() -> None:
    with pytest.raises(ValueError, match="/does/not/exist"):
        load_tokenizer("/does/not/exist")


def test_chat_without_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_folder(tmp_path, {})))
    with pytest.raises(ValueError, match="--chat-template"):
        tokenizer.apply_chat_template([])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

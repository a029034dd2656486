"""EAGLE and EAGLE3 heads: tiny random checkpoints against a plain torch
reimplementation, in one forward and in a chain; names, optional tensors and errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from sglang.srt.configs.draft_config import layers_to_capture, num_hidden_sources
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.forward.batch import CaptureHiddenMode, ForwardMode
from sglang.srt.layers.linear import Linear
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.registry import (
    supported_architectures,
    supported_draft_architectures,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.quantized_models import (
    FOUR_BITS,
    RECIPES,
    is_whole_linear,
    quantize_folder,
)
from sglang.test.scale import sampled
from sglang.test.tiny_models import (
    eagle_weights,
    write_eagle_files,
    write_tiny_eagle,
    write_tiny_model,
)

register_cpu_ci(est_time=12, suite="cpu")

EAGLE, EAGLE3 = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
VOCAB, DRAFT_VOCAB, EPS = 264, 100, 1e-6
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SOURCES = {EAGLE: 1, EAGLE3: 3}
SCHEMES = RECIPES | FOUR_BITS
TOLERANCE = 2e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    hidden_states: Tensor | None


def head_config(architecture, **overrides):
    config = CONFIG | {"architectures": [architecture]}
    if architecture == EAGLE3:
        config["draft_vocab_size"] = DRAFT_VOCAB
    return config | overrides


def random_weights(architecture, layers=1):
    config = head_config(architecture, num_hidden_layers=layers)
    return eagle_weights(config, seed=3)


def write_head(folder, architecture, weights=None, **overrides):
    weights = random_weights(architecture) if weights is None else weights
    write_eagle_files(folder, head_config(architecture, **overrides), weights)
    return folder


def load(folder):
    return load_model(
        ModelConfig.from_path(folder),
        load_format="auto",
        dtype=torch.float32,
        rope_rows=64,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("target"), "LlamaForCausalLM")


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotate(x, positions):
    """x [T, heads, D] at `positions` [T]."""
    exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    angles = positions[:, None] * 10000.0**-exponents
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Reference:
    """One request; keys and values of all tokens so far are kept by layer."""

    def __init__(self, architecture, weights, embed, lm_head):
        self.architecture, self.w = architecture, weights
        self.embed, self.lm_head = embed, lm_head
        self.kv: dict[str, tuple[Tensor, Tensor]] = {}

    def block(self, layer, x, stream, positions):
        w, count = self.w, len(x)

        def heads(name):
            return (x @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(
                count, -1, HEAD_DIM
            )

        q, k, v = rotate(heads("q"), positions), heads("k"), heads("v")
        k = rotate(k, positions)
        if layer in self.kv:
            k = torch.cat((self.kv[layer][0], k))
            v = torch.cat((self.kv[layer][1], v))
        self.kv[layer] = (k, v)
        group = HEADS // KV_HEADS
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        seen = torch.arange(len(k))[None] <= positions[:, None]
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", shares, v).reshape(count, -1)
        stream = stream + out @ w[f"{layer}self_attn.o_proj.weight"].T
        y = rms_norm(stream, w[f"{layer}post_attention_layernorm.weight"])
        gate = F.silu(y @ w[f"{layer}mlp.gate_proj.weight"].T)
        up = y @ w[f"{layer}mlp.up_proj.weight"].T
        return stream + (gate * up) @ w[f"{layer}mlp.down_proj.weight"].T

    def forward(self, ids, states, positions):
        """(logits, state for the next step)."""
        w, embedded = self.w, self.embed[ids]
        if self.architecture == EAGLE:
            stream = torch.cat((embedded, states), -1) @ w["fc.weight"].T
            stream = stream + w.get("fc.bias", torch.zeros(HIDDEN))
            i = 0
            while f"layers.{i}.mlp.up_proj.weight" in w:
                layer = f"layers.{i}."
                norm = w.get(f"{layer}input_layernorm.weight")
                x = stream if norm is None else rms_norm(stream, norm)
                stream = self.block(layer, x, stream, positions)
                i += 1
            return stream @ self.lm_head.T, stream
        stream = states
        if states.shape[-1] != HIDDEN:
            stream = states @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(HIDDEN))
        x = torch.cat(
            (
                rms_norm(embedded, w["midlayer.input_layernorm.weight"]),
                rms_norm(stream, w["midlayer.hidden_norm.weight"]),
            ),
            -1,
        )
        stream = self.block("midlayer.", x, stream, positions)
        logits = rms_norm(stream, w["norm.weight"]) @ w["lm_head.weight"].T
        return logits, stream


class Drafter:
    """The engine's draft model in a harness, with the target's parts."""

    def __init__(self, folder, target, **args):
        self.harness = ForwardHarness(folder, is_draft_worker=True, **args)
        self.model = self.harness.runner.model
        parts = load_model(
            ModelConfig.from_path(target),
            load_format="auto",
            dtype=self.harness.runner.dtype,
            rope_rows=64,
        )
        self.model.set_embed_and_head(parts.model.embed_tokens, parts.lm_head)

    def run(self, mode, spans, states, capture=CaptureHiddenMode.FULL):
        batch = self.harness.prepare(mode, spans)
        batch = dataclasses.replace(
            batch,
            spec_info=Spec(hidden_states=states),
            capture_hidden_mode=capture,
            logits_rows=batch.logits_rows if capture.name == "LAST" else None,
        )
        return self.harness.run(batch)


def reference_of(architecture, folder, target):
    parts = load_file(target / "model.safetensors")
    return Reference(
        architecture,
        load_file(folder / "model.safetensors"),
        parts["model.embed_tokens.weight"],
        parts["lm_head.weight"],
    )


def random_states(count, architecture, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SOURCES[architecture] * HIDDEN, generator=generator)


def assert_close(actual, expected):
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, atol=TOLERANCE * scale, rtol=TOLERANCE)


@pytest.mark.parametrize("backend", ["torch_native", "cpu_native"])
@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_prefix_and_chain_equal_the_reference(tmp_path, target, architecture, backend):
    """The prefix in one forward, then steps that read their own state."""
    folder = write_head(tmp_path, architecture)
    drafter = Drafter(folder, target, attention_backend=backend)
    reference = reference_of(architecture, folder, target)
    tokens = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(1))
    row = drafter.harness.new_row(tokens.tolist())
    states = random_states(len(tokens), architecture)
    kept = states.clone()
    output = drafter.run(ForwardMode.EXTEND, [(row, len(tokens))], states)
    logits, hidden = reference.forward(tokens, states, torch.arange(len(tokens)))
    assert_close(output.next_token_logits, logits)
    assert_close(output.hidden_states, hidden)
    assert torch.equal(states, kept)
    state = output.hidden_states[-1:].clone()
    expected_state = hidden[-1:]
    for step in range(4):
        token = (31 * step + 5) % VOCAB
        drafter.harness.append(row, token)
        before = state.clone()
        output = drafter.run(ForwardMode.DECODE, [(row, None)], state)
        assert torch.equal(state, before)  # a caller's states are not overwritten
        logits, expected_state = reference.forward(
            torch.tensor([token]), expected_state, torch.tensor([len(tokens) + step])
        )
        assert_close(output.next_token_logits, logits)
        assert_close(output.hidden_states, expected_state)
        state = output.hidden_states.clone()


@pytest.mark.parametrize("scheme", sampled(SCHEMES, key=lambda name: "any", ci=2))
@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_quantised_heads_compute_with_their_values(
    tmp_path, target, architecture, scheme
):
    oracle = tmp_path / "oracle"
    folder = quantize_folder(
        write_head(tmp_path / "plain", architecture),
        tmp_path / "quantised",
        SCHEMES[scheme],
        chosen=is_whole_linear,
        oracle=oracle,
    )
    drafter = Drafter(folder, target)
    assert list(quantized_linears(drafter.model))
    tokens = torch.arange(9)
    row = drafter.harness.new_row(tokens.tolist())
    states = random_states(len(tokens), architecture)
    output = drafter.run(ForwardMode.EXTEND, [(row, len(tokens))], states)
    reference = reference_of(architecture, oracle, target)
    logits, hidden = reference.forward(tokens, states, tokens)
    assert_close(output.next_token_logits, logits)
    assert_close(output.hidden_states, hidden)


def quantized_linears(model):
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is not None:
            yield module


@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_last_mode_returns_the_rows_with_logits(tmp_path, target, architecture):
    folder = write_head(tmp_path, architecture)
    full, last = Drafter(folder, target), Drafter(folder, target)
    batch = [[1, 2, 3, 4], [9, 8]]
    states = random_states(6, architecture)
    outputs = []
    for drafter, capture in (
        (full, CaptureHiddenMode.FULL),
        (last, CaptureHiddenMode.LAST),
    ):
        rows = [drafter.harness.new_row(tokens) for tokens in batch]
        spans = list(zip(rows, map(len, batch), strict=True))
        outputs.append(drafter.run(ForwardMode.EXTEND, spans, states, capture))
    ends = [3, 5]
    assert_close(outputs[1].hidden_states, outputs[0].hidden_states[ends])
    assert_close(outputs[1].next_token_logits, outputs[0].next_token_logits[ends])


@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle_with_more_layers_and_a_bias(tmp_path, target, has_bias):
    weights = random_weights(EAGLE, layers=3)
    if has_bias:
        weights["fc.bias"] = torch.linspace(-1, 1, HIDDEN)
    folder = write_head(tmp_path, EAGLE, weights, num_hidden_layers=3)
    drafter = Drafter(folder, target)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    states = random_states(5, EAGLE)
    row = drafter.harness.new_row(tokens.tolist())
    output = drafter.run(ForwardMode.EXTEND, [(row, 5)], states)
    logits, _ = reference_of(EAGLE, folder, target).forward(
        tokens, states, torch.arange(5)
    )
    assert_close(output.next_token_logits, logits)


def respell(architecture, name, spelling):
    if spelling == "prefixed" and not name.endswith(("d2t", "t2d")):
        return f"model.{name}"
    if spelling == "layers" and architecture == EAGLE3:
        return name.replace("midlayer.", "layers.0.")
    return name


@pytest.mark.parametrize("spelling", ["prefixed", "layers"])
@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_other_spellings_load_the_same_weights(tmp_path, architecture, spelling):
    weights = random_weights(architecture)
    plain = load(write_head(tmp_path / "plain", architecture, weights))
    renamed = {respell(architecture, k, spelling): v for k, v in weights.items()}
    other = load(write_head(tmp_path / "other", architecture, renamed))
    expected = dict(plain.named_parameters())
    found = dict(other.named_parameters())
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_every_missing_tensor_is_named(tmp_path, architecture):
    weights = random_weights(architecture)
    for name in weights:
        if name == "t2d":
            continue
        rest = {k: v for k, v in weights.items() if k != name}
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            load(write_head(tmp_path, architecture, rest))


def test_copies_of_the_targets_parts_are_left_out_by_eagle(tmp_path):
    weights = random_weights(EAGLE)
    weights["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    weights["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    model = load(write_head(tmp_path, EAGLE, weights))
    assert model.embed_tokens is None and model.lm_head is None


def test_eagle3_keeps_an_embedding_of_its_own(tmp_path, target):
    weights = random_weights(EAGLE3)
    weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    drafter = Drafter(write_head(tmp_path, EAGLE3, weights), target)
    assert torch.equal(
        drafter.model.embed_tokens.weight.float(),
        weights["embed_tokens.weight"].to(drafter.harness.runner.dtype).float(),
    )


def test_hot_token_ids_are_the_ids_behind_the_differences(tmp_path):
    weights = random_weights(EAGLE3)
    model = load(write_head(tmp_path, EAGLE3, weights))
    assert model.hot_token_ids.dtype == torch.int64
    assert torch.equal(model.hot_token_ids, weights["t2d"].nonzero()[:, 0])
    assert load(write_head(tmp_path / "e", EAGLE)).hot_token_ids is None


@pytest.mark.parametrize("delta", [-1, VOCAB])
def test_a_map_that_leaves_the_vocabulary_is_refused(tmp_path, delta):
    weights = random_weights(EAGLE3)
    weights["d2t"][7] = delta - 7
    with pytest.raises(ValueError, match=f"d2t maps draft token 7 to {delta}.*{VOCAB}"):
        load(write_head(tmp_path, EAGLE3, weights))


def test_a_full_draft_vocabulary_needs_neither_map_nor_head(tmp_path, target):
    weights = random_weights(EAGLE3)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del weights[name]
    folder = write_head(tmp_path, EAGLE3, weights, draft_vocab_size=None)
    drafter = Drafter(folder, target)
    row = drafter.harness.new_row([1, 2])
    output = drafter.run(ForwardMode.EXTEND, [(row, 2)], random_states(2, EAGLE3))
    assert output.next_token_logits.shape == (2, VOCAB)
    assert drafter.model.hot_token_ids is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"draft_vocab_size": VOCAB + 1},
            f"draft_vocab_size .*{VOCAB}, got {VOCAB + 1}",
        ),
        ({"num_hidden_layers": 2}, "one layer.*num_hidden_layers 2"),
        ({"eagle_config": 3}, "eagle_config.*3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_configurations_that_cannot_draft(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        load(write_head(tmp_path, EAGLE3, **changes))


def test_a_head_for_another_width_is_refused(tmp_path, target):
    other = write_tiny_model(
        tmp_path / "wide", "LlamaForCausalLM", hidden_size=128, head_dim=16
    )
    with pytest.raises(ValueError, match=r"hidden_size 64.*128"):
        Drafter(write_head(tmp_path / "head", EAGLE3), other)


@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_dummy_weights_draft_without_a_file(tmp_path, architecture):
    folder = write_head(tmp_path, architecture)
    (folder / "model.safetensors").unlink()
    model = load_model(
        ModelConfig.from_path(folder),
        load_format="dummy",
        dtype=torch.float32,
        rope_rows=64,
    )
    if architecture == EAGLE3:
        assert torch.equal(model.hot_token_ids, torch.arange(DRAFT_VOCAB))


def test_layers_of_the_target_that_are_read(tmp_path):
    def config(name, **changes):
        folder = write_head(tmp_path / name, EAGLE3, **changes)
        return ModelConfig.from_path(folder)

    default = config("default")
    assert layers_to_capture(default, num_target_layers=8) == (2, 4, 5)
    assert num_hidden_sources(default) == 3
    listed = config(
        "listed", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3, 6]}
    )
    assert layers_to_capture(listed, num_target_layers=8) == (1, 2, 4, 7)
    assert num_hidden_sources(listed) == 4
    single = config("single", eagle_config={"use_aux_hidden_state": False})
    assert num_hidden_sources(single) == 1


def test_the_target_returns_the_inputs_of_its_layers(tmp_path, target):
    """Captured states are what transformers calls hidden_states."""
    harness = ForwardHarness(target)
    model = harness.runner.model
    model.capture_layers((0, 1, 2))
    tokens = [5, 6, 7, 8]
    row = harness.new_row(tokens)
    batch = dataclasses.replace(
        harness.prepare(ForwardMode.EXTEND, [(row, 4)]),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    captured = harness.run(batch).hidden_states
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(target, dtype=torch.float32).eval()
    before_norm: list[Tensor] = []
    theirs.model.norm.register_forward_pre_hook(
        lambda _, inputs: before_norm.append(inputs[0][0])
    )
    with torch.inference_mode():
        states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[0][0], states[1][0], before_norm[0]), -1)
    assert_close(captured, expected)
    for layers in ((1, 1), (2, 1), (3,), (-1,)):
        with pytest.raises(ValueError, match="has 2 layers"):
            model.capture_layers(layers)


def test_heads_are_not_served_alone():
    assert {EAGLE, EAGLE3} <= set(supported_draft_architectures())
    assert not set(supported_draft_architectures()) & set(supported_architectures())


@pytest.mark.parametrize(
    ("algorithm", "draft_vocab_size"),
    [("EAGLE", None), ("EAGLE3", None), ("EAGLE3", DRAFT_VOCAB)],
)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_tiny_heads_fit_their_target(tmp_path, algorithm, draft_vocab_size, layers):
    """Written for a target of any depth; they read what it captures."""
    target = write_tiny_model(
        tmp_path / "target", "Qwen3ForCausalLM", num_hidden_layers=layers
    )
    folder = write_tiny_eagle(
        tmp_path / "head",
        target,
        algorithm=algorithm,
        draft_vocab_size=draft_vocab_size,
    )
    drafter = Drafter(folder, target)
    sources = 1
    if algorithm == "EAGLE3":
        config = drafter.harness.runner.model_config
        captured = layers_to_capture(config, num_target_layers=layers)
        ForwardHarness(target).runner.model.capture_layers(captured)
        sources = len(captured)
        assert sources == num_hidden_sources(config)
    row = drafter.harness.new_row([1, 2, 3])
    output = drafter.run(
        ForwardMode.EXTEND, [(row, 3)], torch.randn(3, sources * HIDDEN)
    )
    assert output.next_token_logits.shape == (3, draft_vocab_size or VOCAB)
    assert output.hidden_states.shape == (3, HIDDEN)


@pytest.mark.parametrize("architecture", [EAGLE, EAGLE3])
def test_a_head_as_the_model_is_refused(tmp_path, architecture):
    folder = write_head(tmp_path, architecture)
    with pytest.raises(ValueError, match=f"--model-path .*{architecture} is a draft"):
        ForwardHarness(folder)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

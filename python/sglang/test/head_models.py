"""Adds a head for multi-token prediction to tiny checkpoints, by transformers' own
layer, under the published names of the tensors."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.test.hybrid_models import randomise

# Module of `MtpLayer` -> its name in a checkpoint; {layers} is the number of layers.
_QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.",
    "mtp_block.": "mtp.layers.0.",
}
_DEEPSEEK = {
    "enorm.": "model.layers.{layers}.enorm.",
    "hnorm.": "model.layers.{layers}.hnorm.",
    "eh_proj.": "model.layers.{layers}.eh_proj.",
    "post_norm.": "model.layers.{layers}.shared_head.norm.",
    "mtp_block.": "model.layers.{layers}.",
}
# Modules whose results layers add to their stream.
_OUTPUTS = ("o_proj", "out_proj", "down_proj")
# Scale of logits with which a tree's best path always has the best tokens.
_SHARPNESS = 8.0
HEADS = {
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
}


class ReferenceHead:
    """A target of transformers and its head, with random weights.

    Attributes:
        target: the model in the folder.
        layer: the head; its embedding and logits are the target's.
    """

    def __init__(self, folder: Path, architecture: str, *, seed: int) -> None:
        import transformers
        from transformers.modeling_layers import MtpLayer

        load = getattr(transformers, architecture).from_pretrained
        self.target = load(folder, dtype=torch.float32).eval()
        base = self.target.get_decoder()
        config = copy.deepcopy(self.target.config.get_text_config())
        # The one layer attends, and has experts if any layer of the target has.
        config.layer_types = ["full_attention"]
        config.mlp_only_layers, config.first_k_dense_replace = [], 0
        config._attn_implementation = "eager"
        self.layer = MtpLayer(config, type(base.layers[0]), type(base.norm), 0).eval()
        randomise(self.layer, seed=seed)
        for name, buffer in self.layer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
        self._base, self._rotary = base, base.rotary_emb

    def forward(self, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [T, V], states [T, H]) for ids [T] and states [T, H] of one
        request from its start."""
        count = len(ids)
        positions = torch.arange(count)[None]
        # Rotations of text and images count in three dimensions, which agree for text.
        is_spatial = hasattr(self._rotary, "mrope_section")
        rotated = positions.expand(3, 1, -1) if is_spatial else positions
        embedded = self._base.embed_tokens(ids[None])
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mask = torch.zeros(count, count).masked_fill(later, float("-inf"))
        with torch.inference_mode():
            hidden = self.layer(
                embedded,
                states[None],
                position_embeddings=self._rotary(embedded, position_ids=rotated),
                attention_mask=mask[None, None],
                position_ids=positions,
                past_key_values=None,
            )[0]
            return self.target.lm_head(hidden), hidden

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the target's normalised states [T, H]."""
        with torch.inference_mode():
            state: Tensor = self._base(ids[None]).last_hidden_state[0]
            return state


def add_head(folder: Path, architecture: str, *, seed: int = 7) -> ReferenceHead:
    """Add a random head to the checkpoint in `folder`, and return it as transformers
    runs it."""
    head = ReferenceHead(folder, architecture, seed=seed)
    write_head(folder, head_tensors(head, architecture))
    return head


def head_tensors(head: ReferenceHead, architecture: str) -> dict[str, Tensor]:
    """Return the tensors of a head as checkpoints have them."""
    layers = head.target.config.get_text_config().num_hidden_layers
    found: dict[str, Tensor] = {}
    for name, tensor in head.layer.state_dict().items():
        own = next(own for own in HEADS[architecture] if name.startswith(own))
        stored = HEADS[architecture][own] + name.removeprefix(own)
        found |= _split_experts(stored.format(layers=layers), tensor)
    return {name: tensor.clone() for name, tensor in found.items()}


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return one tensor per expert and projection, as checkpoints have them."""
    block, _, module = name.rpartition(".")
    if not block.endswith(".experts"):
        return {name: tensor}
    parts = {module: tensor}
    if module == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up}
    return {
        f"{block}.{expert}.{part}.weight": matrix
        for part, stack in parts.items()
        for expert, matrix in enumerate(stack)
    }


def write_head(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to the checkpoint in `folder`."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def add_exact_head(
    folder: Path, architecture: str, *, noise: float = 0.0
) -> ReferenceHead:
    """Let the next token of the target in `folder` depend on the newest one alone, and
    add a head that is always right, or less often with noise on its weights.

    Layers add nothing to the embedding, in both, and the head's projection returns the
    embedding, not the state. The target's head must not be tied.
    """
    head = ReferenceHead(folder, architecture, seed=0)
    layer, target = head.layer, load_file(folder / "model.safetensors")
    size = len(layer.enorm.weight)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weights = [*layer.named_parameters(), *head.target.named_parameters()]
        for name, weight in [*weights, *target.items()]:
            if any(f".{module}" in name for module in _OUTPUTS):
                weight.zero_()
            elif name == "lm_head.weight":
                weight.mul_(_SHARPNESS)
        layer.enorm.weight.copy_(type(layer.enorm)(size).weight)
        layer.eh_proj.weight.copy_(torch.eye(size, 2 * size))
        layer.post_norm.weight.copy_(target["model.norm.weight"])
        for weight in layer.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    write_head(folder, target | head_tensors(head, architecture))
    return head

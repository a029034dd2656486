"""The frozen target of the drafts' training: its exported weights, and the states that
a serving engine captures for a draft.

Knows the asset folder and the demo model; refuses to know drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lab.demo_model.model import DemoConfig, DemoModel

# Layers whose inputs EAGLE3 reads: the default (2, n // 2, n - 3) of eight layers.
AUX_LAYERS = (2, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """`hidden` [B, L, H], normed; `aux` [B, L, 3 H], inputs of `AUX_LAYERS`."""

    hidden: Tensor
    aux: Tensor


def load_target(assets: Path, device: torch.device, dtype: torch.dtype) -> DemoModel:
    """Load the exported model, frozen, in `dtype`."""
    model = DemoModel(DemoConfig())
    state: dict[str, Tensor] = {}
    for shard in sorted(assets.glob("model-*.safetensors")):
        state.update(load_file(shard))
    model.load_state_dict(state, strict=True)
    model.to(device=device, dtype=dtype).eval()
    return model.requires_grad_(False)


@torch.no_grad()
def target_states(target: DemoModel, ids: Tensor) -> TargetStates:
    """Run one forward over ids int64 [B, L], without autocast."""
    length = ids.shape[1]
    cos, sin = target.cos[:length], target.sin[:length]
    x = target.model.embed_tokens(ids)
    aux: list[Tensor] = []
    for i, layer in enumerate(target.model.layers):
        if i in AUX_LAYERS:
            aux.append(x)
        x = layer(x, cos, sin)
    return TargetStates(hidden=target.model.norm(x), aux=torch.cat(aux, -1))


@torch.no_grad()
def target_logits(target: DemoModel, states: TargetStates) -> Tensor:
    """Return the logits [B, L, V] in the dtype of the target."""
    return F.linear(states.hidden, target.model.embed_tokens.weight)

"""Mixture-of-experts fields of `config.json`, under several families' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.utils.checked_values import ConfigValues

MAX_LAYER = 4095
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts of a model.

    Fields:
        num_experts, top_k: experts per layer, and how many of them a token uses.
        intermediate_size: channels of one expert.
        shared_intermediate_size: channels of experts that every token uses, or 0 for
            none.
        layers: layers with experts; the others are dense.
        norm_topk_prob: whether the weights of the chosen experts are divided by their
            sum.
        scale: factor of these weights. num_groups, top_groups: experts are chosen from
        the best groups.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    layers: frozenset[int]
    norm_topk_prob: bool
    scale: float
    num_groups: int
    top_groups: int

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights in a layer with experts, without its attention."""
        channels = self.num_experts * self.intermediate_size
        channels += self.shared_intermediate_size
        return hidden_size * (3 * channels + self.num_experts)

    def num_active_channels(self, hidden_size: int) -> int:
        """Number of elements that a token's chosen experts hold at once."""
        inner = self.top_k * (self.intermediate_size + hidden_size)
        return inner + 3 * self.shared_intermediate_size


def read_moe_config(values: ConfigValues) -> MoeConfig | None:
    """Return the experts described by `values`, or None if all layers are dense.

    Raises:
        ValueError: a value is not allowed, or two are inconsistent; names the key.
    """
    found = [name for name in _NUM_EXPERTS if values.get(name)]
    if not found:
        return None
    num_experts = values.get(found[0])
    top_k = values.get("num_experts_per_tok")
    if top_k > num_experts:
        raise values.wrong(
            "num_experts_per_tok", f"must be at most {found[0]}, {num_experts}"
        )
    intermediate = values.get("moe_intermediate_size")
    if intermediate is None:
        intermediate = values.get("intermediate_size")
    shared = values.get("shared_expert_intermediate_size")
    if shared is None:
        shared = values.get("n_shared_experts") * intermediate
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate,
        shared_intermediate_size=shared,
        layers=_sparse_layers(values),
        norm_topk_prob=values.get("norm_topk_prob"),
        scale=values.get("routed_scaling_factor"),
        **_groups(values, num_experts=num_experts, top_k=top_k),
    )


def _sparse_layers(values: ConfigValues) -> frozenset[int]:
    layers = range(values.get("num_hidden_layers"))
    dense = set(values.integers("mlp_only_layers", low=0, high=MAX_LAYER))
    step = values.get("decoder_sparse_step")
    first, every = values.get("first_k_dense_replace"), values.get("moe_layer_freq")
    return frozenset(
        layer
        for layer in layers
        if layer not in dense
        and (layer + 1) % step == 0
        and layer >= first
        and layer % every == 0
    )


def _groups(values: ConfigValues, *, num_experts: int, top_k: int) -> dict[str, int]:
    """Return the fields `num_groups` and `top_groups`, checked for consistency."""
    groups = values.get("n_group")
    top_groups = values.get("topk_group")
    if num_experts % groups:
        raise values.wrong("n_group", f"must divide the {num_experts} experts")
    if top_groups > groups:
        raise values.wrong("topk_group", f"must be at most n_group, {groups}")
    chosen_from = top_groups * (num_experts // groups)
    if top_k > chosen_from:
        raise values.wrong(
            "num_experts_per_tok",
            f"must be at most {chosen_from}, the experts of topk_group {top_groups} "
            "groups",
        )
    return {"num_groups": groups, "top_groups": top_groups}

"""The layers of a model that adapters may adapt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.lora_hook import TARGET_MODULES
from sglang.srt.distributed.partition import Part
from sglang.srt.layers.linear import Linear
from sglang.srt.model_loader.loader import locate, own_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from sglang.srt.models.llama import LoadableModel

_WEIGHT = ".weight"
_REVERSED_SPLIT = 1  # of weights whose inputs are split over the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShard:
    """One module of checkpoints, which may be packed with others here.

    Fields:
        name: its name in checkpoints; leaf: the last part of it.
        inputs, outputs: whole sizes.
        kept_inputs, kept_outputs: this rank's part of them.
    """

    name: str
    leaf: str
    inputs: int
    outputs: int
    kept_inputs: Part
    kept_outputs: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModule:
    """A linear layer and the modules that it packs, in order."""

    linear: Linear
    shards: tuple[ModuleShard, ...]

    @property
    def inputs(self) -> int:
        """Inputs on this rank."""
        return self.shards[0].kept_inputs.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Outputs of each shard on this rank."""
        return tuple(shard.kept_outputs.size for shard in self.shards)


class AdapterLayout:
    """The adapted layers of a model.

    Args:
        targets: names of the modules that adapters may adapt.

    Raises:
        ValueError: the model cannot have adapters of these modules; names them.

    Attributes:
        modules: all of them, in the model's order.
    """

    def __init__(self, model: LoadableModel, targets: Collection[str]) -> None:
        self._model = model
        self._targets = frozenset(targets)
        self._by_place: dict[tuple[str, str | None], ModuleShard] = {}
        self.modules: list[AdaptedModule] = []
        for path, linear in model.named_modules():
            if isinstance(linear, Linear) and linear.takes_adapters:
                self._add(path, linear)
        missing = self._targets - {shard.leaf for shard in self.shards}
        if missing:
            raise ValueError(
                f"--lora-target-modules {' '.join(sorted(missing))}: "
                f"{type(model).__name__} has no layer of that name that can have "
                "adapters"
            )

    @cached_property
    def shards(self) -> tuple[ModuleShard, ...]:
        return tuple(shard for module in self.modules for shard in module.shards)

    def find(self, module: str) -> ModuleShard | str:
        """Return the shard for a module of a checkpoint, or why there is none."""
        leaf = module.rpartition(".")[2]
        if leaf not in TARGET_MODULES:
            return (
                f"adapts {leaf}; adapters of {', '.join(TARGET_MODULES)} are served, "
                "and none of embeddings and heads"
            )
        own = own_name(self._model, module + _WEIGHT)
        shard = None if own is None else self._by_place.get(self._place(own))
        if shard is not None:
            return shard
        if leaf not in self._targets:
            return (
                f"adapts {leaf}, which is not among --lora-target-modules "
                f"{' '.join(sorted(self._targets))}"
            )
        return (
            f"adapts {module}, which is no layer of {type(self._model).__name__} that "
            "can have adapters; is it an adapter of another base model?"
        )

    def _place(self, own: str) -> tuple[str, str | None]:
        place, shard = locate(own, self._model.packed_modules)
        return place.removesuffix(_WEIGHT), shard

    def _add(self, path: str, linear: Linear) -> None:
        parent, _, own_leaf = path.rpartition(".")
        leaves = {
            shard: leaf
            for leaf, (packed, shard) in self._model.packed_modules.items()
            if packed == own_leaf
        }
        places = linear.shards
        names = {key: leaves.get(key, own_leaf) for key in places}
        if not self._targets & set(names.values()):
            return
        outputs, inputs = linear.full_shape
        shards = []
        for key, place in places.items():
            is_by_input = linear.split_dim == _REVERSED_SPLIT
            whole = Part.whole(outputs if is_by_input else inputs)
            shard = ModuleShard(
                name=f"{parent}.{names[key]}",
                leaf=names[key],
                inputs=place.part.full if is_by_input else inputs,
                outputs=outputs if is_by_input else place.part.full,
                kept_inputs=place.part if is_by_input else whole,
                kept_outputs=whole if is_by_input else place.part,
            )
            shards.append(shard)
            if names[key] in self._targets:
                self._by_place[path, key] = shard
        self.modules.append(AdaptedModule(linear=linear, shards=tuple(shards)))

"""The base class of the layers: a module that is cheap to call.

A decode step of a small model makes about seventy module calls, so what `nn.Module`
does around each of them is a measurable share of the step.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Module(nn.Module):
    """Calls `forward` directly: hooks on layers are not supported."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def process_weights_after_loading(self) -> None:
        """Bring the weights into the form that the kernels read."""


def cache_attributes(model: nn.Module) -> None:
    """Let attribute lookup find submodules and parameters on the instance itself.

    `nn.Module.__getattr__` is Python code that runs only if the normal lookup fails.
    Assigning a submodule or parameter later removes its cached entry.
    """
    for module in model.modules():
        children = {k: v for k, v in module._modules.items() if v is not None}
        tensors = {k: v for k, v in module._parameters.items() if v is not None}
        module.__dict__.update(children | tensors)

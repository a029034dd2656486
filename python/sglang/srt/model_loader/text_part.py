"""Names of a multimodal checkpoint's tensors, for its language model alone.

Knows the two layouts that transformers writes; no model and no configuration.
"""

from __future__ import annotations

import re

# The prefix of the language model -> its place in a checkpoint of that model alone.
_TEXT = {"model.language_model.": "model.", "language_model.": ""}
_OTHER = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\."
)


def text_tensor_name(name: str) -> str | None:
    """The name that a checkpoint of the language model has for this tensor; None: it
    belongs to another part. Other names are returned as they are."""
    for prefix, own in _TEXT.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None if _OTHER.match(name) else name

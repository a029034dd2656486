"""Names of a multimodal checkpoint's tensors, for its language model only.

Knows the two layouts that transformers writes. Knows no model and no configuration.
"""

from __future__ import annotations

import re

# Prefix of the language model -> its prefix in a text-only checkpoint.
_TEXT = {"model.language_model.": "model.", "language_model.": ""}
_OTHER = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\."
)


def text_tensor_name(name: str) -> str | None:
    """Return this tensor's name in a text-only checkpoint, or None if it belongs to
    another part. Other names are returned unchanged."""
    for prefix, own in _TEXT.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None if _OTHER.match(name) else name

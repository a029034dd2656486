"""Beginnings of Python code, for tests in which the demo model accepts its drafts."""

from __future__ import annotations

from sglang.srt.utils.hf_tokenizer import load_tokenizer
from sglang.srt.utils.paths import bundled_demo_model_path

CODE = (
    "import os\n\n\ndef read_file(path):\n    with open(path",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def pop",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    pri",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "import json\n\n\ndef load(path):\n    with open(path) as f:\n        return json",
    "try:\n    value = int(text)\nexcept ValueError",
    "class Node:\n    def __init__(self, value, next=None):\n        self.value = ",
    "def test_equal(self):\n        self.assertEqual(",
    "if __name__ == '__main__':\n    import sys\n    sys.exit(",
    "def mean(values):\n    total = 0\n    for value in values:\n        total +=",
    "    @property\n    def name(self):\n        return self._name\n\n    @name.setter",
    "import logging\n\nlogger = logging.getLogger(",
)


def code_prompts(model: str | None = None) -> list[list[int]]:
    """Return the tokens of `CODE`, of the demo model or of that in a folder."""
    tokenizer = load_tokenizer(model or str(bundled_demo_model_path()))
    return [tokenizer.encode(text) for text in CODE]

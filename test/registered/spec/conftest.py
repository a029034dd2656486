"""Asks for Triton's interpreter where there is no GPU, before the first import of
triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

"""Vectors that travel to the device together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def padded_vectors(vectors: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Int64 [n, length] -> [n, length or one more]: each begins at a multiple of 16
    bytes. Triton compiles a kernel anew for addresses that are none."""
    return np.pad(vectors, ((0, 0), (0, 1))) if vectors.shape[1] % 2 else vectors

"""Vectors that are sent to the device together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def padded_vectors(vectors: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Pad int64 [n, length] to [n, length or length + 1], so that each begins at a
    multiple of 16 bytes. Triton would compile a kernel again for other addresses.
    """
    return np.pad(vectors, ((0, 0), (0, 1))) if vectors.shape[1] % 2 else vectors

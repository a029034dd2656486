"""The requests of a forward's rows, on the host and on the device.

Most steps have the rows of the step before. What does not change with the tokens is
made once for them: with 128 rows, that is most of what a step costs on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_canary.runtime.uploads import upload_vectors

if TYPE_CHECKING:
    import torch

    from kv_canary.engines.block_ledger import LedgerRequest


class BatchRows:
    """
    Args:
        rids: ids of the rows, in order.

    Attributes:
        rids, requests: of the rows.
        given: tokens that came with each request.
        is_verified: whether the reads of each row are; each_is_verified: of all.
        req_rows, serials, salts: int64 [R], as in `ForwardView`.
        zeros, ones: int64 [R].
    """

    def __init__(
        self,
        rids: Sequence[str],
        requests: Sequence[LedgerRequest],
        device: torch.device,
    ) -> None:
        self.rids = list(rids)
        self.requests = requests
        self.given = [request.given for request in requests]
        self.is_verified = [request.is_verified for request in requests]
        self.each_is_verified = all(self.is_verified)
        count = len(self.rids)
        self.req_rows, self.serials, self.salts, self.zeros, self.ones = upload_vectors(
            [
                [request.row for request in requests],
                [request.serial for request in requests],
                [request.salt for request in requests],
                [0] * count,
                [1] * count,
            ],
            device,
        )

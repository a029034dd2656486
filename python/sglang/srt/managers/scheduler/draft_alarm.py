"""Notices a draft of which the target accepts nothing.

Output is right all the same and only slower than without speculation, so nothing else
shows it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.arg_parser import flag_name

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DRAFTS = 1000
"""Drafts in a row without an accepted token that are an alarm."""


class DraftAlarm:
    """Counts drafts without an accepted token.

    Attributes:
        total: alarms so far, one per `DRAFTS` such drafts in a row.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        self._algorithm = server_args.speculative_algorithm
        self._path = server_args.speculative_draft_model_path
        self._rejected = 0
        self.total = 0

    def on_verified(self, accepted: int) -> None:
        """Count a draft of which `accepted` tokens were accepted."""
        self._rejected = 0 if accepted else self._rejected + 1
        if self._rejected < DRAFTS:
            return
        self._rejected = 0
        self.total += 1
        if self.total == 1:
            logger.warning(
                "draft_never_accepted: no token of the last %d drafts of "
                "--speculative-algorithm %s was accepted, so they only cost time; %s",
                DRAFTS,
                self._algorithm,
                self._advice(),
            )

    def _advice(self) -> str:
        if self._path is None:
            return "texts that repeat nothing have no n-gram drafts"
        flag = flag_name("speculative_draft_model_path")
        return f"check that {flag} {self._path} was trained for this target"

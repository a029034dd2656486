"""The launches around one model forward, in every group of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from kv_canary.runtime.group import CanaryGroup

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.pool_checks import PoolChecks
    from kv_canary.view import ForwardView

GroupT = TypeVar("GroupT", bound=CanaryGroup)


class ForwardLaunches(Generic[GroupT]):
    """Before and after the forwards with one place in a launch, one at a time.

    Attributes:
        groups: of the pool.
    """

    def __init__(self, groups: Sequence[GroupT]) -> None:
        self.groups = groups
        # The views of the open forward, by group. None if the group takes no part.
        self._views: Sequence[ForwardView | None] = ()

    @property
    def is_open(self) -> bool:
        return bool(self._views)

    def before(
        self,
        views: Sequence[ForwardView | None],
        *,
        checks: Sequence[PoolChecks] | None = None,
        verified: Sequence[ForwardView] | None = None,
        num_read: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Open a forward: check what it reads and where it writes.

        Args:
            views: one per group; None for a group that takes no part.
            checks: one per group; None for those of the groups.
            verified, num_read: one per group; see `CanaryGroup.before`.
        """
        self._views = views
        for number, group in enumerate(self.groups):
            view = views[number]
            if view is not None:
                group.before(
                    view,
                    group.checks if checks is None else checks[number],
                    verified=None if verified is None else verified[number],
                    num_read=None if num_read is None else num_read[number],
                )

    def abandon(self) -> None:
        """Forget the open forward, if its model failed."""
        self._views = ()

    def after(
        self, *, advance: bool, findings: Sequence[Tensor] | None = None
    ) -> Sequence[ForwardView | None]:
        """Close the forward: record what the model stored.

        Args:
            advance: whether the rows' lineages advance over the new tokens.
            findings: int64 [>= STATUS_WORDS + R] per group, filled by the launch.

        Returns:
            The views of `before`.
        """
        views, self._views = self._views, ()
        for number, view in enumerate(views):
            if view is not None:
                self.groups[number].after(
                    view,
                    advance=advance,
                    findings=None if findings is None else findings[number],
                )
        return views

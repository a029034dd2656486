"""Comparison of the calls that attention makes with the forward that was verified.

Verification looks at the view that a backend shows; the calls are what it does. Between
head and tail of a forward every layer must store its new tokens and attend once, with
the very tensors of the view and of the batch. On the host, by identity: a captured
graph is looked at while it is captured, and costs nothing when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kv_canary.view import KVReadView
    from sglang.srt.forward.batch import ForwardBatch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.window_tables import WindowForward
    from sglang.srt.layers.ops.decoder_stack import StackRun
    from sglang.srt.mem_cache.memory_pool import KVCache

AttentionOp = Callable[..., None]
# Arguments by name, of the layers of each group by its name.
GroupArgs = dict[str, dict[str, Any]]


class AttentionCalls:
    """The calls of one pool's layers, forward by forward.

    Args:
        kv_pool: whose layers are called in their order.
    """

    def __init__(self, kv_pool: KVCache) -> None:
        self._pool = kv_pool
        # What the stored bytes were divided by; a change would make all of them wrong.
        self._scales = kv_pool.scales
        self._buffers = [kv_pool.get_kv_buffer(layer) for layer in kv_pool.layers]
        self._primary = kv_pool.groups[0].name
        self._group_of = [
            kv_pool.layer_place(layer)[0].name for layer in kv_pool.layers
        ]
        self._is_watching = False
        self._stored = self._attended = 0
        # Arguments of the forward that is open. None if none is open, or it is not
        # looked at.
        self._store_args: GroupArgs | None = None
        self._attend_args: GroupArgs = {}

    def watch(self, backend: AttentionBackend) -> None:
        """See the calls of `backend`, and of all copies of it that are made later,
        where it has calls that can be seen."""
        self._is_watching = backend.wrap_calls(
            self._on_store, self._on_attend, self._on_stack
        )

    def begin(
        self,
        batch: ForwardBatch,
        view: KVReadView,
        forwards: Mapping[str, WindowForward],
    ) -> None:
        """Expect the calls of a forward over `batch` that reads `view`, and in the
        layers of secondary groups what `forwards` has under the group's name.

        Raises:
            RuntimeError: scales of the pool are not those that the canary saw first.
        """
        self._check_scales()
        if not self._is_watching:
            return
        self._stored = self._attended = 0
        stored = {"positions": batch.positions, "out_cache_loc": batch.out_cache_loc}
        attended: dict[str, Any] = {
            "page_table": view.page_table,
            "row_index": view.row_index,
        }
        if batch.forward_mode.is_decode:
            attended["read_lens"] = view.read_lens
        else:
            attended["prefix_lens"] = batch.prefix_lens
            attended["qo_indptr"] = batch.qo_indptr
            attended["tree_mask"] = batch.tree_mask
            attended["positions"] = batch.positions
        self._store_args = {self._primary: stored}
        self._attend_args = {self._primary: attended}
        for group, forward in forwards.items():
            rows = forward.rows
            own = {name: getattr(rows, name, value) for name, value in attended.items()}
            # Row r of a group's own tables is row r of the batch.
            own["row_index"] = None
            if forward.positions is not None:
                own["positions"] = forward.positions
            self._store_args[group] = stored | {"out_cache_loc": forward.cache_loc}
            self._attend_args[group] = own

    def _check_scales(self) -> None:
        scales = self._pool.scales
        if scales == self._scales:
            return
        layer = next(
            layer
            for layer in self._pool.layers
            if scales.get(layer) != self._scales.get(layer)
        )
        raise RuntimeError(
            f"KV canary: layer {layer} now has the KV scales {scales.get(layer)}, but "
            f"its slots were stored with {self._scales.get(layer)}"
        )

    def leave_out(self) -> None:
        """Expect no calls of the forward that has begun: a graph replays them."""
        self._store_args = None

    def end(self) -> None:
        """Check that every layer has made its calls.

        Raises:
            RuntimeError: one has not.
        """
        if self._store_args is None:
            return
        self._store_args = None
        layers = len(self._buffers)
        if self._stored != layers or self._attended != layers:
            raise RuntimeError(
                f"KV canary: {self._stored} layers stored K and V in this forward and "
                f"{self._attended} attended, but the pool has {layers}"
            )

    def _on_store(self, op: AttentionOp) -> AttentionOp:
        def store(q: Tensor, k: Tensor, v: Tensor, **args: Any) -> None:
            expected = self._store_args
            if expected is not None:
                place, self._stored = self._stored, self._stored + 1
                caches = (args["k_cache"], args["v_cache"])
                self._compare("stores", place, caches, args, expected)
            op(q, k, v, **args)

        return store

    def _on_attend(self, op: AttentionOp) -> AttentionOp:
        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, **args: Any) -> None:
            if self._store_args is not None:
                place, self._attended = self._attended, self._attended + 1
                caches = (k_cache, v_cache)
                self._compare("attends", place, caches, args, self._attend_args)
            op(q, k_cache, v_cache, **args)

        return attend

    def _on_stack(self, op: Callable[..., StackRun]) -> Callable[..., StackRun]:
        """One call that stores and attends once in each layer, over its caches."""

        def stack(*inputs: Any, **args: Any) -> StackRun:
            stored = self._store_args
            if stored is not None:
                for caches in zip(args["k_caches"], args["v_caches"], strict=True):
                    place, self._stored = self._stored, self._stored + 1
                    self._compare("stores", place, caches, args, stored)
                    place, self._attended = self._attended, self._attended + 1
                    self._compare("attends", place, caches, args, self._attend_args)
            return op(*inputs, **args)

        return stack

    def _compare(
        self,
        verb: str,
        place: int,
        caches: tuple[Tensor, Tensor],
        args: dict[str, Any],
        expected: GroupArgs,
    ) -> None:
        """Raises:
        RuntimeError: the call is not that of the forward's layer `place`.
        """
        k_cache, v_cache = caches
        if place >= len(self._buffers):
            raise RuntimeError(
                f"KV canary: a layer {verb} after all {place} layers of the pool have"
            )
        k_due, v_due = self._buffers[place]
        if k_cache is not k_due or v_cache is not v_due:
            raise RuntimeError(
                f"KV canary: layer {place} of the pool {verb} over other K or V than "
                "its own"
            )
        for name, value in expected[self._group_of[place]].items():
            if args[name] is not value:
                raise RuntimeError(
                    f"KV canary: layer {place} of the pool {verb} with another {name} "
                    "than the forward that was verified"
                )

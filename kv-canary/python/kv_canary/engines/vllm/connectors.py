"""vLLM's KV connectors: what they load is compared with what was computed.

Any connector keeps its configuration and its class. The plugin wraps methods of the two
objects that vLLM makes of it:

```
scheduler  update_state_after_alloc  which request's blocks are to be loaded
           build_connector_meta      goes along with the connector's own message
worker     bind_connector_metadata   these blocks are nobody's until they are compared
           start_load_kv             loads for this forward are compared as they end
           get_transfer_results      others, before the scheduler hears of their end
           get_block_ids_with_load_errors
                                     damaged blocks: the scheduler recomputes them
```
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kv_canary.engines.block_units import Arrived, BlockUnits, Load
from kv_canary.engines.hooks import Refusal, wrap_of
from kv_canary.engines.unit_report import report_units
from kv_canary.engines.unit_store import UnitShape, UnitStore
from kv_canary.engines.vllm.model_digest import model_digest
from kv_canary.engines.vllm.salts import scheduler_salt

if TYPE_CHECKING:
    from kv_canary.engines.engine_canary import EngineCanary
    from kv_canary.engines.settings import Settings

logger = logging.getLogger(__name__)

Method = Callable[..., Any]
_TRANSFER = "vllm.distributed.kv_transfer"
_PLANNED = "kv_canary_loads"
_OF_WORKER = "kv_canary_worker"
_LOCAL = "kv_canary_local"
_LOADED = "kv_canary_loaded"
_SCHEDULER = "SCHEDULER"
_OF_A_WORKER = ("get_transfer_results", "get_block_ids_with_load_errors")


def with_loads_compared(
    method: Method, cls: Any, config: Any, role: Any, kv_cache_config: Any
) -> Any:
    """Wrap `KVConnectorFactory.create_connector`."""
    connector = method(cls, config, role, kv_cache_config)
    if role.name == _SCHEDULER:
        SchedulerLoads(connector, int(config.cache_config.block_size))
    elif not _missing(connector):
        setattr(connector, _OF_WORKER, WorkerLoads(connector))
    return connector


def _missing(connector: Any) -> list[str]:
    """Return methods of a worker's connector that older versions do not have."""
    return [name for name in _OF_A_WORKER if not hasattr(connector, name)]


def compare_loads(
    runner: Any, canary: EngineCanary, settings: Settings
) -> WorkerLoads | None:
    """Let a canary compare what its runner's connector loads. None without a connector.

    Raises:
        Refusal: it cannot be compared.
    """
    transfer = importlib.import_module(_TRANSFER)
    if not transfer.has_kv_transfer_group():
        return None
    connector = transfer.get_kv_transfer_group()
    name = type(connector).__name__
    loads = getattr(connector, _OF_WORKER, None)
    if loads is None:
        missing = _missing(connector)
        raise Refusal(
            f"the connector {name}: looked for {' and '.join(missing)}, found no such "
            "method; vLLM 0.32 and later have them"
            if missing
            else f"the connector {name} was made before the plugin was loaded"
        )
    if len(runner.kv_cache_config.kv_cache_groups) > 1:
        raise Refusal(
            f"the connector {name} with several KV cache groups: vLLM "
            "takes damaged blocks back only with one group"
        )
    (group,) = canary.groups
    if group.bytes is None or not group.bytes.covers_all:
        raise Refusal(
            f"KV_CANARY_REAL_DATA={settings.real_data} with the connector {name}: what "
            "it loads is compared with sums of all bytes; use rotate or all"
        )
    shape = UnitShape(
        slots=group.group.page_size,
        layers=group.bytes.num_layers,
        digest=model_digest(runner),
        rank=runner.vllm_config.parallel_config.rank,
    )
    canary.units = BlockUnits(group, UnitStore(shape, settings.units_dir))
    loads.canary = canary
    where = settings.units_dir or "memory (KV_CANARY_UNITS_DIR keeps them longer)"
    logger.warning(
        "kv_canary: compares what %s loads; records of blocks are in %s", name, where
    )
    return loads  # type: ignore[no-any-return]


class SchedulerLoads:
    """Tells the workers what a connector is about to load.

    Args:
        connector: the scheduler's.
        block_size: tokens of a block.
    """

    def __init__(self, connector: Any, block_size: int) -> None:
        self._block_size = block_size
        self._planned: list[Load] = []
        wrap_of(connector, "get_num_new_matched_tokens", self._match)
        wrap_of(connector, "update_state_after_alloc", self._plan)
        wrap_of(connector, "build_connector_meta", self._send)

    def _match(self, method: Method, request: Any, num_computed_tokens: int) -> Any:
        here = (num_computed_tokens, getattr(request, "num_preemptions", 0))
        if getattr(request, _LOADED, None) == here:
            # Nothing of it was intact; vLLM would load it again, forever.
            return 0, False
        found = method(request, num_computed_tokens)
        # With the request, so that it goes when the request does.
        setattr(request, _LOCAL, (*here, bool(found[1])))
        return found

    def _plan(
        self, method: Method, request: Any, blocks: Any, num_external_tokens: int
    ) -> Any:
        result = method(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            start, preemptions, is_ahead = getattr(request, _LOCAL)
            setattr(request, _LOADED, (start, preemptions))
            end, tokens = start + num_external_tokens, request.all_token_ids
            (numbers, *_) = blocks.get_block_ids()
            first, last = start // self._block_size, -(-end // self._block_size)
            self._planned.append(
                Load(
                    rid=request.request_id,
                    tokens=np.asarray(tokens[:end], dtype=np.int64),
                    salt=scheduler_salt(request),
                    start=start,
                    computed=min(end, len(tokens) - 1),
                    blocks=tuple(numbers[first:last]),
                    is_ahead=is_ahead,
                )
            )
        return result

    def _send(self, method: Method, scheduler_output: Any) -> Any:
        message = method(scheduler_output)
        planned, self._planned = tuple(self._planned), []
        setattr(message, _PLANNED, planned)
        return message


class WorkerLoads:
    """Compares what a connector loads.

    Args:
        connector: a worker's.

    Attributes:
        canary: of the worker; None while there is none, or if it was refused.
    """

    def __init__(self, connector: Any) -> None:
        self.canary: EngineCanary | None = None
        self._name = type(connector).__name__
        self._layers: Sequence[str] = ()
        self._connector = connector
        # Loads for the forward that begins, and whether they were compared already.
        self._now: list[Load] = []
        self._is_loaded = False
        self._arrived: list[Arrived] = []
        self._ahead: dict[str, Load] = {}
        self._held: dict[str, Arrived] = {}
        self._damaged: set[int] = set()
        # What the connector says has failed, once, until its load is compared.
        self._failed: set[int] = set()
        self._known_errors: Callable[[], set[int]]
        self._known_errors = connector.get_block_ids_with_load_errors
        wrap_of(connector, "register_kv_caches", self._register)
        wrap_of(connector, "bind_connector_metadata", self._bind)
        wrap_of(connector, "start_load_kv", self._load)
        wrap_of(connector, "wait_for_layer_load", self._wait)
        wrap_of(connector, "get_transfer_results", self._results)
        wrap_of(connector, "get_block_ids_with_load_errors", self._errors)

    def _register(self, method: Method, kv_caches: dict[str, Any]) -> Any:
        self._layers = tuple(kv_caches)
        return method(kv_caches)

    def _bind(self, method: Method, connector_metadata: Any) -> Any:
        self._now, self._is_loaded = [], False
        if self.canary is not None:
            planned = getattr(connector_metadata, _PLANNED, None)
            if planned is None:
                raise RuntimeError(
                    "kv_canary: the scheduler's process does not load this plugin, so "
                    f"that nothing of what {self._name} loads can be compared: set "
                    "KV_CANARY there too"
                )
            assert self.canary.units is not None
            self.canary.units.expect(planned)
            self._failed.difference_update(*(load.blocks for load in planned))
            self._now = [load for load in planned if not load.is_ahead]
            self._ahead.update((load.rid, load) for load in planned if load.is_ahead)
        return method(connector_metadata)

    def _load(self, method: Method, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if self._now:
            assert self.canary is not None and self.canary.units is not None
            # Those that load behind the model are waited for here, and not again.
            for name in self._layers:
                self._connector.wait_for_layer_load(name)
            self._is_loaded = True
            with torch.inference_mode():
                self._arrived += [self.canary.units.arrive(load) for load in self._now]
            self._now = []
        return result

    def _wait(self, method: Method, layer_name: str) -> Any:
        return None if self._is_loaded else method(layer_name)

    def _results(self, method: Method, finished_req_ids: set[str]) -> Any:
        results = method(finished_req_ids)
        if self.canary is None:
            return results
        units = self.canary.units
        assert units is not None
        # What the connector knows to have failed is taken back without a report.
        for rid in finished_req_ids | getattr(results, "failed_recving", set()):
            self._ahead.pop(rid, None)
        known = set(self._known_errors())
        self._damaged |= known
        self._failed |= known
        self.canary.ledger.doubt(known)
        with torch.inference_mode():
            for rid in sorted(results.finished_recving & self._ahead.keys()):
                self._held[rid] = units.arrive(self._ahead.pop(rid))
            arrived, self._arrived = self._arrived, []
            ready = {rid for rid, one in self._held.items() if one.has_arrived()}
            for one in arrived + [self._held.pop(rid) for rid in sorted(ready)]:
                self._collect(one)
        results.finished_recving = results.finished_recving - self._held.keys() | ready
        return results

    def _collect(self, arrived: Arrived) -> None:
        assert self.canary is not None and self.canary.units is not None
        found = self.canary.units.collect(arrived)
        damages = [damage for damage in found if damage.block not in self._failed]
        self._failed.difference_update(arrived.load.blocks)
        if damages:
            blocks = [damage.block for damage in damages]
            self._damaged.update(blocks)
            self.canary.ledger.doubt(blocks)
            report_units(self.canary, arrived.load.rid, damages, tier=self._name)

    def _errors(self, method: Method) -> set[int]:
        damaged, self._damaged = self._damaged, set()
        return set(method()) | damaged

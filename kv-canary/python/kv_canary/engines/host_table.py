"""The engines that the canary can run in, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kv_canary.engines.settings import DEFAULT_REAL_DATA, Mode
from kv_canary.engines.sglang import hooks_of as sglang_hooks
from kv_canary.engines.sglang import limits as sglang_limits
from kv_canary.engines.sglang import plugin as sglang_plugin
from kv_canary.engines.vllm import hooks_of as vllm_hooks
from kv_canary.engines.vllm import limits as vllm_limits
from kv_canary.engines.vllm import plugin as vllm_plugin
from kv_canary.runtime.host import HEALING_MODES, PLUGIN_MODES

if TYPE_CHECKING:
    from kv_canary.engines.hooks import Expectation


class _Limit(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def why(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """An engine.

    Fields:
        name: value of the option `--engine`; title: its proper name.
        packages: packages that install it.
        version: installed version, or None.
        expectations: what the plugin wraps and reads.
        optional: more of these, which only some versions have.
        sees: kinds of KV. limits: options that are refused. rest: what else is refused.
        real_data: default of `KV_CANARY_REAL_DATA`. modes: values of `KV_CANARY`.
        models: models of the self-test, each run in its own process.
        plugins_variable: variable that names the plugins the engine may load.
        self_test_environment: more variables for the self-test, besides `KV_CANARY`.
    """

    name: str
    title: str
    packages: Sequence[str]
    version: Callable[[], str | None]
    expectations: Sequence[Expectation]
    sees: Sequence[str]
    limits: Sequence[_Limit]
    rest: str
    models: Sequence[str]
    plugins_variable: str
    self_test_environment: dict[str, str]
    real_data: str = DEFAULT_REAL_DATA
    modes: Sequence[Mode] = PLUGIN_MODES
    optional: Sequence[Expectation] = ()


HOSTS = (
    Host(
        name="vllm",
        title="vLLM",
        packages=vllm_plugin.DISTRIBUTIONS,
        version=vllm_plugin.host_version,
        expectations=vllm_hooks.EVERYTHING,
        sees=(
            *vllm_limits.FULL_SPECS,
            *vllm_limits.WINDOW_SPECS,
            *vllm_limits.LATENT_SPECS,
            *vllm_limits.STATE_SPECS,
        ),
        limits=(*vllm_limits.LIMITS, *vllm_limits.HEAL_LIMITS),
        rest="KV cache groups of any other kind (cross attention, ...), recurrent "
        "states with drafts or without attention layers beside them, and MLA in the "
        "first runner",
        models=(
            "plain",
            "hybrid",
            "asynchronous",
            "v2",
            "connector",
            "connector-ahead",
            "connector-v2",
            "eagle",
            "eagle-v2",
            "states",
            "states-v2",
        ),
        plugins_variable="VLLM_PLUGINS",
        self_test_environment={"VLLM_LOGGING_LEVEL": "ERROR"},
        modes=HEALING_MODES,
        optional=(vllm_hooks.V2_STATES, *vllm_hooks.HEALING),
    ),
    Host(
        name="sglang",
        title="SGLang",
        packages=(sglang_plugin.DISTRIBUTION,),
        version=sglang_plugin.host_version,
        expectations=sglang_hooks.EVERYTHING,
        sees=sglang_limits.SEEN,
        limits=sglang_limits.LIMITS,
        rest="pools of any other kind (sliding windows, Mamba, FP4, sparse, ...), "
        "multimodal models; of draft models' pools only that of EAGLE is checked",
        models=("plain", "eagle"),
        plugins_variable=sglang_plugin.VARIABLE,
        self_test_environment={"KV_CANARY_REAL_DATA": "all"},
        real_data=sglang_plugin.REAL_DATA,
        optional=(sglang_hooks.DRAFT_EXTEND,),
    ),
)

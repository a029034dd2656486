"""The files of `docs/deploy/` against the server: flags, paths, exit codes, times."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from app_world import App
from starlette.routing import Route

from sglang.srt.arg_groups.config_file import read_config
from sglang.srt.entrypoints.exit_codes import ExitCode
from sglang.srt.entrypoints.start_message import has_inspector
from sglang.srt.entrypoints.web_server import CLOSE_SECONDS
from sglang.srt.managers.front.engine_core import STOP_SECONDS
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="cpu")

REPO = Path(__file__).resolve().parents[3]
DEPLOY = REPO / "docs" / "deploy"
# Seconds to end in, once the drain is over.
CLOSING_SECONDS = CLOSE_SECONDS + STOP_SECONDS


def parsed(flags: list[str]) -> Any:
    """The values of flags; an unknown one ends the test."""
    return ServerArgs.parser().parse_args(flags)


def paths() -> set[str]:
    routes = App().app.router.routes
    return {route.path for route in routes if isinstance(route, Route)}


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(DEPLOY / "sglang.service")
    return parser["Service"]


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_sample_of_flags_is_read() -> None:
    values = read_config(str(DEPLOY / "config.yaml"), ServerArgs)
    assert values["kv_canary"] == "heal" and values["enable_metrics"]


def test_the_unit_names_flags_codes_and_times(unit: configparser.SectionProxy) -> None:
    program, command, *flags = shlex.split(unit["ExecStart"])
    assert Path(program).name == "sglang" and command == "serve"
    assert parsed(flags).config == "/etc/sglang/config.yaml"
    drain = read_config(str(DEPLOY / "config.yaml"), ServerArgs)["drain_timeout"]
    assert int(unit["TimeoutStopSec"]) >= drain + CLOSING_SECONDS
    assert unit["Restart"] == "on-failure"
    assert int(unit["RestartPreventExitStatus"]) == ExitCode.CONFIGURATION_ERROR
    assert {int(code) for code in unit["SuccessExitStatus"].split()} == {
        ExitCode.DRAIN_TIMED_OUT,
        ExitCode.DRAIN_CUT_SHORT,
    }


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing"
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that is there."""
    text = (DEPLOY / "sglang.service").read_text()
    copy = tmp_path / "sglang.service"
    copy.write_text(text.replace("/opt/sglang/bin/sglang", shutil.which("true") or ""))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    ran = subprocess.run(command, capture_output=True, text=True)
    told = [line for line in ran.stderr.splitlines() if "sglang" in line]
    assert ran.returncode == 0 and not told, ran.stderr


def test_the_image_serves(manifest: dict[str, Any]) -> None:
    text = (DEPLOY / "Containerfile").read_text()
    program, command, *flags = yaml.safe_load(one(r"^ENTRYPOINT (.*)$", text))
    flags += yaml.safe_load(one(r"^CMD (\[\"--.*)$", text))
    assert (program, command) == ("sglang", "serve")
    values = parsed(flags)
    assert values.host == "0.0.0.0" and values.port == int(one(r"^EXPOSE (\d+)$", text))
    probe = one(r"http://127\.0\.0\.1:(\d+/\w+)", text)
    assert probe == f"{values.port}/health" and "/health" in paths()
    assert int(one(r"^USER (\d+)$", text)) == int(one(r"--uid (\d+)", text)) > 0
    for source in re.findall(r"^COPY (?!--from)(.*)$", text, re.M):
        for name in source.split()[:-1]:
            assert (REPO / name).exists(), name


def one(pattern: str, text: str) -> str:
    """The only match of a pattern."""
    (found,) = re.findall(pattern, text, re.M)
    assert isinstance(found, str)
    return found


def test_the_manifest_names_flags_paths_and_times(manifest: dict[str, Any]) -> None:
    template = manifest["Deployment"]["spec"]["template"]
    spec = template["spec"]
    (container,) = spec["containers"]
    flags = parsed(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == parsed([]).port
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"]
        for kind in ("startup", "liveness", "readiness")
    }
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/readyz",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    notes = template["metadata"]["annotations"]
    named = {probe["path"] for probe in probes.values()} | {notes["prometheus.io/path"]}
    assert named <= paths()
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert int(notes["prometheus.io/port"]) == port["containerPort"]
    assert flags.enable_metrics
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = spec["terminationGracePeriodSeconds"]
    assert grace >= sleep + flags.drain_timeout + CLOSING_SECONDS
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (flags.model_path, flags.api_key_file, flags.kv_canary_report_dir):
        assert any(path == at or path.startswith(f"{at}/") for at in mounted), path
    (own,) = manifest["Service"]["spec"]["ports"]
    assert own["targetPort"] == port["name"]
    labels = template["metadata"]["labels"]
    assert manifest["Service"]["spec"]["selector"] == labels
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"] == labels


def test_the_start_message_names_pages_that_are_there() -> None:
    args = ServerArgs(device="cpu")
    assert {"/docs", "/metrics"} <= paths()
    assert has_inspector(args) == ("/canary" in paths())


def test_every_file_is_described() -> None:
    guide = (DEPLOY / "README.md").read_text()
    for file in DEPLOY.iterdir():
        assert file.name == "README.md" or f"({file.name})" in guide, file.name
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in groups[0]["rules"]:
        assert rule["alert"] in guide, rule["alert"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

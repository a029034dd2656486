"""`--config`: a YAML file of flags, which the command line overrides; and `sglang`."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang import cli, launch_server
from sglang.srt.arg_groups.arg_parser import Declared, declared_fields
from sglang.srt.arg_groups.config_file import read_config
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.scale import count
from sglang.version import __version__

register_cpu_ci(est_time=3, suite="cpu")

FIELDS = declared_fields(ServerArgs)


def value_of(declared: Declared) -> st.SearchStrategy[Any]:
    """Values of a field's type, within its bounds or not."""
    if declared.arg.choices is not None:
        return st.sampled_from(declared.arg.choices)
    one = {
        bool: st.booleans(),
        int: st.integers(-(2**40), 2**40),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(codec="utf-8", exclude_categories=("C",))),
    }[declared.entry_kind]
    return st.lists(one, min_size=1, max_size=3) if declared.is_list else one


@st.composite
def files(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A file of flags under any of their names, and the fields that it sets."""
    chosen = draw(st.lists(st.sampled_from(FIELDS), unique_by=lambda d: d.flag))
    lines, fields = {}, {}
    for declared in chosen:
        names = (declared.flag, *declared.arg.aliases)
        name = draw(st.sampled_from(names)).removeprefix("--")
        if draw(st.booleans()):
            name = name.replace("-", "_")
        lines[name] = fields[declared.field.name] = draw(value_of(declared))
    return yaml.safe_dump(lines, allow_unicode=draw(st.booleans())), fields


@settings(
    max_examples=count(ci=60, full=2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=files())
def test_a_file_sets_what_it_says(
    tmp_path: Path, case: tuple[str, dict[str, Any]]
) -> None:
    text, fields = case
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert read_config(str(path), ServerArgs) == fields


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("page-size: 4\nport: 7\nenable_metrics: true\nmodel: null\n")
    args = ServerArgs.from_cli(["--port", "8", "--config", str(path)])
    assert (args.port, args.page_size, args.enable_metrics) == (8, 4, True)
    assert args.served_model_name == "demo"


def test_bounds_and_refusals_hold_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for line, message in (
        ("port: 70000", "--port 70000 must be at most 65535"),
        ("kv-canary: maybe", "--kv-canary 'maybe' is unknown"),
        ("dp-size: 2", "--dp-size 2: data parallelism is not served"),
    ):
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            ServerArgs.from_cli(["--config", str(path)])


BAD = {
    "prot: 3": "line 1: 'prot' is no flag; did you mean port?",
    "\n\nxyzzy: 3": "line 3: 'xyzzy' is no flag; --help lists every flag",
    "config: a.yaml": "line 1: 'config' is no flag",
    "port: 1\nport: 2": "line 2: port sets --port a second time; keep one",
    "tp: 1\ntp-size: 2": "line 2: tp-size sets --tp-size a second time",
    "port: x": "line 1: port: 'x' is not a whole number; write digits",
    "port: true": "line 1: port: True is not a whole number",
    "port: 1.0": "line 1: port: 1.0 is not a whole number",
    "port: {a: 1}": "line 1: port is nested; write a single value",
    "port: [1]": "line 1: port is nested",
    "cuda-graph-bs: [[1]]": "line 1: cuda-graph-bs is nested",
    "host:": "line 1: host has no value; write one, or remove the line",
    "drain-timeout: soon": "line 1: drain-timeout: 'soon' is not a number",
    "enable-metrics: 1": "line 1: enable-metrics: 1 is not a switch; write true",
    "api-key: 1234": "line 1: api-key: the value is not a text; write it in quotes",
    "- port": "not YAML of flags (it is no mapping); write one `flag: value`",
    "port: [": "line 1: not YAML of flags (expected the node content",
    "port: 1: 2": "line 1: not YAML of flags (mapping values are not allowed",
    "port: !!python/name:os.system": "line 1: not YAML of flags (could not determine",
    "port: 2026-13-45": "line 1: not YAML of flags (month must be in 1..12)",
    "port: \x01": "not YAML of flags (special characters",
    "port: " + "[" * 5000: "not YAML of flags",
    "port: " + "9" * 5000: "line 1: not YAML of flags",
    "a: &a {x: 1}\nport: [*a, *a]": "is no flag",
    "port: {<<: [{a: 1}, {a: 1}]}": "line 1: port is nested",
    "[a]: 1": "line 1: 'a list' is no flag",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_file_is_one_line_with_the_fix(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        read_config(str(path), ServerArgs)
    told = str(raised.value)
    assert told.startswith(f"--config {path}") and message in told
    assert "\n" not in told and "1234" not in told.removeprefix(f"--config {path}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    for path, reason in (
        (tmp_path / "none.yaml", "no such file; name a YAML file"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "binary", "not UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_config(str(path), ServerArgs)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text in ("", "# nothing\n", "{}"):
        path.write_text(text)
        assert read_config(str(path), ServerArgs) == {}


# -- the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["serve", "--page-size", "4"], ["--page-size", "4"]),
        (["serve", "m", "--port", "1"], ["--model-path", "m", "--port", "1"]),
        (["serve"], []),
        (["--port", "1"], ["--port", "1"]),
    ],
)
def test_serve_starts_the_server(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], flags: list[str]
) -> None:
    seen: list[Any] = []

    def serve(argv: list[str], *, prog: str) -> int:
        seen.append((argv, prog))
        return 7

    monkeypatch.setattr(launch_server, "main", serve)
    assert cli.main(argv) == 7
    assert seen == [(flags, "sglang serve")]


def test_other_commands() -> None:
    for argv, code, words in (
        ([], 0, "serve [MODEL] [flags]"),
        (["--help"], 0, "serve [MODEL] [flags]"),
        (["version"], 0, __version__),
        (["run"], 2, "no command 'run'; use one of serve, version"),
    ):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert cli.main(argv) == code
        assert words in out.getvalue()


def test_model_is_model_path() -> None:
    parsed = ServerArgs.parser().parse_args(["--model", "x"])
    assert parsed.model_path == "x"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

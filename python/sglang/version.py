"""The version of the package, importable without anything else."""

__version__ = "0.1.0"
VERSION_TEXT = f"sglang-canary {__version__}"

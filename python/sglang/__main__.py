"""`python -m sglang` is the command `sglang`."""

import sys

from sglang.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m sglang` is `python -m sglang.launch_server`."""

import sys

from sglang.launch_server import main

if __name__ == "__main__":
    sys.exit(main())

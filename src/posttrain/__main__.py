"""``python -m posttrain`` is the command ``posttrain``."""

import sys

from posttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m asrd` is the command `asrd`."""

import sys

from asrd.cli import main

if __name__ == "__main__":
    sys.exit(main())

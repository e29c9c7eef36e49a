"""`python -m mpkeras`."""

import sys

from mpkeras.cli import main

if __name__ == "__main__":
    sys.exit(main())

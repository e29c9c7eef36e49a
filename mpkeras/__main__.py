"""`python -m mpkeras`."""

import sys

from _mpkeras_cli import main

if __name__ == "__main__":
    sys.exit(main())

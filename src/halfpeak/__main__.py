"""Entry point of ``python -m halfpeak``."""

import sys

from halfpeak.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

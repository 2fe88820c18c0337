"""Measure numba_kvcache and whatever else is installed that can do its job; see `python bench.py --help`."""

import sys

from benchmarks.command_line import main

if __name__ == "__main__":
    sys.exit(main())

"""Starts the nursery: ``python -m hetkit.worker FD PARENT_PID``; see `hetkit.worker.nursery`."""

import sys

from hetkit.worker.nursery import main

if __name__ == "__main__":
    main(sys.argv[1:])

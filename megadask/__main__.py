"""``python -m megadask``: the same as the ``megadask`` command."""

import sys

from megadask.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m cce_dist ...`` is the command line ``cce-dist ...``; torchrun starts it this way."""

import sys

from cce_dist.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

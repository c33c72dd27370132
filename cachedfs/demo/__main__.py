"""Entry point of `python -m cachedfs.demo`."""

import sys

from cachedfs.demo.comparison import main

if __name__ == "__main__":
    sys.exit(main())

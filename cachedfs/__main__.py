"""`python -m cachedfs` is `cachedfs`."""

from cachedfs.cli import main

if __name__ == "__main__":
    main()

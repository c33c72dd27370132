"""Run the command line interface: `python -m cachedfs` does the same as `cachedfs`."""

from cachedfs.cli import main

if __name__ == "__main__":
    main()

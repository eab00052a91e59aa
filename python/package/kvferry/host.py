"""`python -m kvferry.host`: `kvferry host` of this package."""

import sys

from kvferry._native import main

if __name__ == "__main__":
    sys.exit(main(["host", *sys.argv[1:]]))

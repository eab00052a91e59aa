"""`python -m kvferry.host`: `kvferry host` of this package."""

import sys

from kvferry._native import host

if __name__ == "__main__":
    sys.exit(host(sys.argv[1:]))

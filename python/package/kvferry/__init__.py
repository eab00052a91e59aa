"""kvferry: KV cache transfer between prefill and decode engines.

`kvferry.dropin` holds a package named `mori` that takes MoRI's place where there is no GPU.
"""

import os
import sys

# Whose package `mori` the shim is compiled for. `python3` of the PATH may be another one.
if sys.executable:
    os.environ.setdefault("MORI_PYTHON", sys.executable)

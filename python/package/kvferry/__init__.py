"""kvferry: KV cache transfer between prefill and decode engines.

`kvferry.dropin` holds a package named `mori` that takes MoRI's place where there is no GPU.
"""

"""kvferry's stand-in for MoRI; only `mori.io`."""

"""kvferry's stand-in for MoRI; only `mori.io` and what is of it in `mori.cpp`."""

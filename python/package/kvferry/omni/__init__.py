"""Payloads between the stages of vLLM-Omni: `name: KvferryOmniConnector` in the `connectors` of a pipeline's configuration.
Needs vllm_omni 0.30 and what that brings: torch, numpy, msgspec, Pillow."""

import sys

__all__ = ["KvferryOmniConnector", "PayloadLost", "register"]


def __getattr__(name: str):
    if name not in ("KvferryOmniConnector", "PayloadLost"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.omni import connector

    return getattr(connector, name)


def register() -> None:
    """Makes the connector known to vLLM-Omni, if this process has that. Called by vLLM and by vLLM-Omni, in each process,
    as a plugin of both: the processes in which requests wait for chunks load those of vLLM alone."""
    from kvferry.omni.settings import deployment

    # Before there are other processes.
    deployment()
    # A server of vLLM alone is not to be slowed down, nor changed, by what is beside it on the disk.
    if "vllm_omni" in sys.modules:
        from kvferry.omni.hooks import install

        install()

"""KvferryConnector by the name `NixlConnector`, for launchers and routers that take no other: with
`"kv_connector_module_path": "kvferry.vllm.nixl"` vLLM gets it by that name, and NIXL by none."""

__all__ = ["NixlConnector"]  # noqa: F822


def __getattr__(name: str):
    if name != "NixlConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.vllm import KvferryConnector

    return KvferryConnector

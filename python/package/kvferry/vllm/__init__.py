"""KvferryConnector for vLLM: `--kv-transfer-config '{"kv_connector": "KvferryConnector",
"kv_connector_module_path": "kvferry.vllm", "kv_role": ...}'`.
"""

import sys

__all__ = ["KvferryConnector"]


def __getattr__(name: str):
    if name != "KvferryConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_early()
    _register()
    from kvferry.vllm.connector import KvferryConnector

    return KvferryConnector


def _register() -> None:
    """MultiConnector asks for the class of what it counts by name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name("KvferryConnector")
    except ValueError:
        KVConnectorFactory.register_connector(
            "KvferryConnector", "kvferry.vllm.connector", "KvferryConnector"
        )


def _check_early() -> None:
    """Checks the configuration while vLLM reads it, in the process that was started, where a mistake is
    one line. vLLM makes the connector much later, in processes of their own, and hands its configuration
    to nothing before; but whoever makes one asks for the class meanwhile, and is among the callers."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__post_init__":
            config = frame.f_locals.get("self")
            if hasattr(config, "kv_transfer_config") and hasattr(config, "parallel_config"):
                from kvferry.vllm.check import check
                from kvferry.vllm.roles import ours

                for own in ours(config):
                    check(own, before_start=True)
                return
        frame = frame.f_back

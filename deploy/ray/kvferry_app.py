"""Ray Serve's PD builder with KvferryConnector, on several machines."""

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import build_pd_openai_app


class KvferryBackend(DefaultConnectorBackend):
    """The legs of NIXL, which Ray sends for each connector that it does not know."""

    def setup(self) -> None:
        """Before the engine of a replica is made: the address of its node, which others reach."""
        keys = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        keys["host_ip"] = ray.util.get_node_ip_address()


def build(args: dict):
    """The application, of what `args` of the RayService says: `prefill_config` and `decode_config`."""
    KVConnectorBackendFactory.register_backend("KvferryConnector", "kvferry_app:KvferryBackend")
    return build_pd_openai_app(args)

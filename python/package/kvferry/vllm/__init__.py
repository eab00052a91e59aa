"""KvferryConnector for vLLM: `--kv-transfer-config '{"kv_connector": "KvferryConnector",
"kv_connector_module_path": "kvferry.vllm", "kv_role": ...}'`.
"""

from kvferry.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]

"""What has to hold of vLLM's configuration, as far as it says so itself."""

import json

from vllm.platforms import current_platform

from kvferry._native import check_address, settings


def given(vllm_config) -> str:
    """`kv_connector_extra_config` in JSON, with what the platform calls for."""
    keys = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if current_platform.is_rocm():
        keys.setdefault("backend", "mori-rdma")
    return json.dumps(keys)


def check(vllm_config, before_start: bool = False) -> None:
    """Raises ValueError for what is wrong, and what to do about it. `before_start` also tries whether
    a host may listen at the address, and can at the ports that were given, before there is one that does."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        raise ValueError(
            f'kv_role "{transfer.kv_role}": KvferryConnector needs "kv_producer" for a prefill'
            ' or "kv_consumer" for a decode'
        )
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "DP ranks on several nodes": parallel.data_parallel_size_local
        != parallel.data_parallel_size,
        "speculative decoding": vllm_config.speculative_config is not None,
    }
    if wrong := [what for what, is_on in refused.items() if is_on]:
        raise ValueError(f"KvferryConnector does not support {', '.join(wrong)}")
    keys = given(vllm_config)
    settings(keys)
    if before_start:
        # Which ports a DP rank has is known in its process.
        check_address(keys, parallel.data_parallel_size == 1)

"""What has to hold of vLLM's configuration, as far as it says so itself."""

import json
from pathlib import Path

import vllm
from vllm.platforms import current_platform

from kvferry import start
from kvferry._native import check_address, check_socket, settings
from kvferry.log import logger_of
from kvferry.vllm.drafts import refused as refused_drafts
from kvferry.vllm.roles import BOTH, by_role, check_ports, is_headless

logger = logger_of(__name__)

# Versions of vLLM whose hooks the connector was held against.
KNOWN = ("0.32", "0.33")


def check_version(version: str) -> None:
    """Says which versions of vLLM are known; a warning if this is none of them."""
    known = " and ".join(KNOWN)
    if ".".join(version.split(".")[:2]) in KNOWN:
        logger.info("KvferryConnector in vLLM %s; it knows %s", version, known)
    else:
        logger.warning(
            "KvferryConnector knows vLLM %s, and this is %s: nobody has tried whether it calls the connector"
            " in the same way",
            known,
            version,
        )


def given(vllm_config) -> str:
    """`kv_connector_extra_config` in JSON, with what the platform calls for."""
    keys = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if current_platform.is_rocm():
        keys.setdefault("backend", "mori-rdma")
    return json.dumps(keys)


def _check_head(vllm_config) -> None:
    """Raises ValueError if nobody told where the API server is of ranks that have none on their node."""
    parallel = vllm_config.parallel_config
    keys = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    if is_headless(parallel) and keys.get("proxy_ip") and not keys.get("http_ip"):
        raise ValueError(
            f"http_ip is not given: the router is told where these DP ranks get requests, which is at the API"
            f" server of the first node ({parallel.data_parallel_master_ip}?)"
        )


def check(vllm_config, before_start: bool = False) -> None:
    """Raises ValueError for what is wrong, and what to do about it. `before_start` also tries whether
    a host may listen at the address, and can at the ports that were given, before there is one that does."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    model = vllm_config.model_config
    refused = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "DP ranks on several nodes by Ray": parallel.data_parallel_backend == "ray"
        and parallel.data_parallel_size_local != parallel.data_parallel_size,
        "TP ranks on several nodes": parallel.nnodes_within_dp > 1,
        # It gives the memory of the KV cache away, which peers and hosts have mapped or registered.
        "sleep mode": model is not None and model.enable_sleep_mode,
    }
    wrong = [what for what, is_on in refused.items() if is_on]
    wrong += filter(None, [refused_drafts(vllm_config)])
    if wrong:
        raise ValueError(f"KvferryConnector does not support {', '.join(wrong)}")
    settings(given(vllm_config))
    if transfer.kv_role == BOTH:
        check_ports(vllm_config)
    halves = [(half.kv_transfer_config.engine_id, given(half)) for half in by_role(vllm_config)]
    for _, keys in halves:
        settings(keys)
    if before_start:
        check_version(vllm.__version__)
        _check_head(vllm_config)
        for name, keys in halves:
            # Which ports a DP rank has is known in its process.
            check_address(keys, parallel.data_parallel_size == 1)
            _check_socket(name, keys)


def _check_socket(engine: str, keys: str) -> None:
    """Raises ValueError if no host could listen where the one of an engine is to, unless it is there."""
    socket, spawns, *_ = settings(keys)
    if not spawns:
        return
    try:
        path = Path(socket) if socket else start.socket_at(engine)
    except OSError as why:
        raise ValueError(f"no folder for the socket of the kvferry host: {why}") from why
    check_socket(path)

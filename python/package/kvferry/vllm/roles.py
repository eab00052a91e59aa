"""What a server is to others: prefill, decode, or both with a half and a host for each; and which DP ranks
it has."""

import copy

BOTH = "kv_both"
NAMES = {"kv_producer": "prefill", "kv_consumer": "decode"}
PORTS = ("handshake_port", "notify_port")


def ours(vllm_config) -> list:
    """The configuration of the KvferryConnector, as MultiConnector gives it where that is what vLLM has."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector != "MultiConnector":
        return [vllm_config]
    found = []
    for child in (transfer.kv_connector_extra_config or {}).get("connectors", []):
        if str(child.get("kv_connector_module_path")).startswith("kvferry.vllm"):
            own = copy.copy(vllm_config)
            own.kv_transfer_config = type(transfer)(**{"engine_id": transfer.engine_id} | child)
            found.append(own)
    if len(found) > 1:
        raise ValueError(
            f"MultiConnector with {len(found)} KvferryConnectors: give it one, with kv_both for both roles"
        )
    return found


def by_role(vllm_config) -> list:
    """The configuration of the prefill, of the decode, or of both in this order."""
    if vllm_config.kv_transfer_config.kv_role != BOTH:
        return [vllm_config]
    return [_half(vllm_config, role) for role in NAMES]


def _half(vllm_config, role: str):
    half = copy.copy(vllm_config)
    transfer = half.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    keys = transfer.kv_connector_extra_config = dict(transfer.kv_connector_extra_config or {})
    transfer.kv_role = role
    transfer.engine_id = f"{NAMES[role]}-{transfer.engine_id}"
    if socket := keys.get("socket"):
        keys["socket"] = f"{socket}.{NAMES[role]}"
    parallel = vllm_config.parallel_config
    # The host counts a DP rank as so many ports, and here it has them twice.
    shift = (dp_ranks(parallel)[0] + (role == "kv_consumer")) * parallel.tensor_parallel_size
    for key in PORTS:
        if port := int(keys.get(key) or 0):
            keys[key] = port + shift
    return half


def check_ports(vllm_config) -> None:
    """Raises ValueError if the ports that were given to a server of both roles meet."""
    keys = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    handshake, notify = (int(keys.get(key) or 0) for key in PORTS)
    parallel = vllm_config.parallel_config
    needed = 2 * dp_ranks(parallel)[1] * parallel.tensor_parallel_size
    if handshake and notify and abs(handshake - notify) < needed:
        raise ValueError(
            f"notify_port = {notify}: with kv_both {needed} ports are taken from there and from"
            f" handshake_port = {handshake}, and two are the same; put them {needed} apart"
        )


def dp_ranks(parallel) -> tuple[int, int]:
    """DP rank and number of DP ranks that the API server has: those of all nodes, or of its own where each
    node has an API server."""
    if not parallel.local_engines_only:
        return parallel.data_parallel_index, parallel.data_parallel_size
    return parallel.data_parallel_rank_local or 0, parallel.data_parallel_size_local


def is_headless(parallel) -> bool:
    """Its ranks are told what to do by the API server of another node."""
    return not parallel.local_engines_only and parallel.data_parallel_rank > 0

"""Legs in MoRIIO's form, as routers send them."""

import uuid
from concurrent.futures import ThreadPoolExecutor

from pair import request


def address(handshake: int, notify: int) -> str:
    return f"host:127.0.0.1,handshake:{handshake},notify:{notify}"


def of(server) -> str:
    """Address of a vLLM server."""
    return address(*server.peer_ports())


def router_id(prefill: str, decode: str) -> str:
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{uuid.uuid4().hex}"


def params(transfer: str, to_prefill: bool) -> dict:
    return {
        "kv_transfer_params": {
            "transfer_id": transfer,
            "do_remote_decode": to_prefill,
            "do_remote_prefill": not to_prefill,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_dp_size": 1,
            "remote_tp_size": 1,
        }
    }


def both(mode: str, prefill, decode, ids: list[int]) -> tuple[dict, dict]:
    """Answers of both legs, dispatched as a router does; the callables take a body."""
    transfer = f"tx-{uuid.uuid4().hex}"
    to_prefill = request(ids, max_tokens=1) | params(transfer, True)
    to_decode = request(ids)
    if mode == "READ":
        first = prefill(to_prefill)
        return first, decode(to_decode | {"kv_transfer_params": first["kv_transfer_params"]})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(prefill, to_prefill)
        second = decode(to_decode | params(transfer, False))
        return first.result(), second

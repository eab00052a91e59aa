"""Parameters of legs in the native dialect, as `kvferry router` writes them."""

import uuid

HOST = "127.0.0.1"


def key() -> dict:
    """A transfer of its own."""
    return {"id": f"tx-{uuid.uuid4()}", "prompt": 0}


def to_prefill(pair, key: dict) -> dict:
    leg = {"key": key, "siblings": 1, "mode": _mode(pair), "life": None, "moriio": None}
    return {"kv_transfer_params": {"do_remote_decode": True, "kvferry": leg}}


def to_decode(pair, key: dict) -> dict:
    at = f"{HOST}:{pair.prefill.peer_ports()[0]}"
    leg = {
        "key": key,
        "sibling": 0,
        "mode": _mode(pair),
        "prefill": at,
        "control": f"tcp://{at}",
        "life": None,
        "moriio": None,
    }
    return {"kv_transfer_params": {"do_remote_prefill": True, "kvferry": leg}}


def _mode(pair) -> str:
    return {"WRITE": "Push", "READ": "Pull"}[pair.mode]

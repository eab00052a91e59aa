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
    at = f"{HOST}:{_handshake_port(pair.prefill)}"
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


def _handshake_port(server) -> int:
    """The one that the host of a server chose, from the log."""
    lines = [line for line in server.log.read_text().splitlines() if 'handshake="' in line]
    return int(lines[-1].split('handshake="')[1].split('"')[0].rsplit(":", 1)[1])

"""Parameters of legs in the native dialect, as `kvferry router` writes and seals them."""

import hashlib
import hmac
import uuid

HOST = "127.0.0.1"


def key() -> dict:
    """A transfer of its own."""
    return {"id": f"tx-{uuid.uuid4()}", "prompt": 0}


def to_prefill(pair, key: dict) -> dict:
    leg = {"key": key, "siblings": 1, "mode": _mode(pair), "life": None, "moriio": None}
    return {"kv_transfer_params": {"do_remote_decode": True, "kvferry": leg}}


def to_decode(pair, key: dict, secret: str | None = None) -> dict:
    """Sealed with the fleet's secret, if there is one."""
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
    if secret is not None:
        leg["seal"] = _seal(secret, leg)
    return {"kv_transfer_params": {"do_remote_prefill": True, "kvferry": leg}}


def _seal(secret: str, leg: dict) -> str:
    """As `trust/src/proof.rs` makes it, in the name of a router."""
    fleet = _mac(b"kvferry fleet secret, version 1\0", secret.encode())
    said = [leg["key"]["id"], leg["prefill"], leg["control"], leg["mode"].lower()]
    numbers = [number.to_bytes(4, "little") for number in (leg["key"]["prompt"], leg["sibling"])]
    router = _mac(fleet, b"carrier", b"router")
    seal = _mac(router, *(text.encode() for text in said), *numbers, b"")
    return (_mac(fleet, b"id")[:8] + seal).hex()


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Over parts, each with its length ahead."""
    lengths = (len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, b"".join(lengths), hashlib.sha256)


def _mode(pair) -> str:
    return {"WRITE": "Push", "READ": "Pull"}[pair.mode]

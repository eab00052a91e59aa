"""A prefill and a decode server, each with vLLM's own MoRIIOConnector over the drop-in `mori` or with
KvferryConnector."""

import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ports import free_ports
from router import Router
from server import Server

TOKENS = 16
# At most, of a server of these tests.
RANKS = 2
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
MORIIO = {"kv_connector": "MoRIIOConnector"}
KVFERRY = {"kv_connector": "KvferryConnector", "kv_connector_module_path": "kvferry.vllm"}
# Where its transfer actors are.
PLACES = ["sidecar", "worker"]


def kvferry_at(place: str, **more) -> dict:
    """KvferryConnector with its transfer actors there."""
    return {**KVFERRY, "kv_connector_extra_config": {"transfer": place}, **more}


def prompt(length: int, seed: object) -> list[int]:
    """Random token ids; others for every seed."""
    random_ = random.Random(f"{length} {seed}")
    return [random_.randrange(256) for _ in range(length)]


def request(prompt: list[int], **more) -> dict:
    """A greedy completion whose token ids come back."""
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": TOKENS, **greedy, **more}


def tokens(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


class Pair:
    """Both servers, and the two legs of a request sent straight to them."""

    def __init__(
        self,
        mode: str,
        model: Path,
        logs: Path,
        discovery: int,
        connectors: dict[str, dict],
        env: dict[str, str] | None = None,
        asynchronous: bool = False,
        flags: dict[str, list[str]] | None = None,
    ):
        """`connectors` and the `flags` of vLLM, if there are any, are of each role."""
        self.mode = mode
        self.flags = flags or {}
        self.asynchronous = asynchronous
        self.connectors = connectors
        self.place = model, logs, discovery, env or {}
        self.http = dict(zip(ROLES, free_ports(2), strict=True))
        self.prefill = self._start("prefill")
        self.decode = self._start("decode")

    def restart(self, role: str, flags: list[str]) -> None:
        """Starts a server in place of one that has ended, at the same port."""
        self.flags = self.flags | {role: flags}
        setattr(self, role, self._start(role).ready())

    @contextmanager
    def another(self, role: str, env: dict[str, str]):
        """One more server of a role, at a port of its own, that the router does not hear of."""
        server = self._start(role, free_ports(1)[0], 0, env)
        try:
            yield server.ready()
        finally:
            server.stop()

    def _start(
        self, role: str, http: int | None = None, discovery: int | None = None, more: dict | None = None
    ) -> Server:
        model, logs, known, env = self.place
        discovery = known if discovery is None else discovery
        # Each of its ranks listens for itself.
        http, (handshake, notify) = http or self.http[role], free_ports(2, RANKS)
        connector = self.connectors[role]
        if connector["kv_connector"] != MORIIO["kv_connector"]:
            # It tells its peers which it chose.
            handshake = notify = 0
        extra = {
            "host_ip": "127.0.0.1",
            "http_port": http,
            "handshake_port": handshake,
            "notify_port": notify,
            "read_mode": self.mode == "READ",
            "proxy_ip": "127.0.0.1" if discovery else "",
            "proxy_ping_port": discovery,
            **connector.get("kv_connector_extra_config", {}),
        }
        kv = {
            **connector,
            "kv_role": connector.get("kv_role", ROLES[role]),
            "kv_connector_extra_config": extra,
        }
        if beside := kv.pop("beside", None):
            kv = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [kv, *beside]},
            }
        name = f"{connector['kv_connector']}-{role}-{self.mode.lower()}".lower()
        kv["engine_id"] = f"{name}-{uuid.uuid4().hex[:8]}"
        log = logs / f"{kv['engine_id']}.log"
        flags = self.flags.get(role, [])
        return Server(name, model, http, log, kv, env | (more or {}), self.asynchronous, flags)

    def ready(self) -> "Pair":
        self.prefill.ready()
        self.decode.ready()
        return self

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()

    def complete(self, prompt: list[int], decode_prompt: list[int] | None = None) -> list[int]:
        """Sends both legs without a router; decode may be told another prompt than prefill."""
        transfer = f"tx-{uuid.uuid4()}"
        to_prefill = request(prompt, max_tokens=1)
        to_decode = request(decode_prompt or prompt)
        if self.mode == "READ":
            answer = self.prefill.complete(to_prefill | self.params(transfer, True, None))
            params = answer["kv_transfer_params"]
            return tokens(self.decode.complete(to_decode | {"kv_transfer_params": params}))
        with ThreadPoolExecutor(1) as pool:
            body = to_prefill | self.params(transfer, True, self.decode)
            first = pool.submit(self.prefill.complete, body)
            body = to_decode | self.params(transfer, False, self.prefill)
            answer = self.decode.complete(body)
            first.result()
        return tokens(answer)

    @staticmethod
    def params(transfer: str, to_prefill: bool, peer: Server | None) -> dict:
        """A leg's transfer, as a MoRIIOConnector is told of it."""
        params = {
            "transfer_id": transfer,
            "do_remote_decode": to_prefill,
            "do_remote_prefill": not to_prefill,
            "remote_engine_id": None,
            "remote_block_ids": None,
        }
        if peer is not None:
            handshake, notify = peer.peer_ports()
            params |= {
                "remote_host": "127.0.0.1",
                "remote_handshake_port": handshake,
                "remote_notify_port": notify,
                "remote_dp_size": 1,
                "remote_tp_size": 1,
            }
        return {"kv_transfer_params": params}


@contextmanager
def served(name: str, place, mode: str, connectors: dict, env: dict | None = None, *more, make=Pair, **named):
    """A pair, made as it is by `make`, behind a router of its own, which has its secret."""
    secret = {key: value for key, value in (env or {}).items() if key in place.secret}
    # MoRIIO's registrations are not signed.
    args = ("--allow-unsigned",) if MORIIO in connectors.values() else ()
    router = Router(place.logs / f"router-{name}.log", env=secret, args=args)
    pair = None
    try:
        pair = make(mode, place.model, place.logs, router.discovery, connectors, env, *more, **named)
        pair.router = router
        place.reference.server.ready()
        pair.ready()
        router.wait_for(f"a {mode} pair")
        yield pair
    finally:
        if pair is not None:
            pair.stop()
            router = pair.router
        router.stop()

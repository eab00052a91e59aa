"""Checks of which prompts a server computed, and which KV it received."""

from array import array

from client import metric
from kvferry._native import prompt_hash


def hash_of(ids: list[int]) -> str:
    """Hash of a prompt with token ids only, in the form that errors show."""
    return prompt_hash([("tokens", array("I", ids).tobytes())]).hex()


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def sources(server) -> list[float]:
    """Numbers of prompt tokens by the source of their KV, from vLLM's own metrics."""
    name = "vllm:prompt_tokens_by_source_total"
    return [metric(server.port, name, f'source="{source}"') for source in SOURCES]


def wait_for_transfer(server, before: list[float], tokens: int) -> None:
    """Waits until a server has received the KV of a prompt and computed at most one of its tokens."""

    def grown() -> list[float]:
        return [now - then for now, then in zip(sources(server), before, strict=True)]

    server.wait_until(f"{tokens} tokens are counted", lambda: sum(grown()) >= tokens, 30)
    computed, _, moved = grown()
    assert computed <= 1 and moved >= tokens - 1, (computed, moved)


def assert_hashes_are_logged(decode, ids: list[int], other: list[int]) -> None:
    """Waits until the log of a decode has the hashes of two different prompts of one request."""
    both = f"the decode's has hash {hash_of(other)}, the prefill's {hash_of(ids)}"
    decode.wait_until(f"its log says that {both}", lambda: both in decode.log.read_text(), 30)

"""Which prompt a server computed, and which it was handed."""

from array import array

from client import metric
from kvferry._native import prompt_hash


def hash_of(ids: list[int]) -> str:
    """The hash of a prompt of token ids only, as errors name it."""
    return prompt_hash([("tokens", array("I", ids).tobytes())]).hex()


def computed(server) -> float:
    """Tokens of prompts that a server computed itself, as vLLM's own metrics say."""
    return metric(server.port, "vllm:prompt_tokens_by_source_total", 'source="local_compute"')


def wait_for_tokens(server, before: float, most: int) -> None:
    """A server has computed some tokens since, and no more than so many."""
    server.wait_until(
        f"{most} tokens were computed", lambda: before < computed(server) <= before + most, 30
    )


def assert_hashes_are_logged(decode, ids: list[int], other: list[int]) -> None:
    """A decode that was asked for another prompt than its prefill says so, with both hashes."""
    both = f"the decode's has hash {hash_of(other)}, the prefill's {hash_of(ids)}"
    decode.wait_until(f"its log says that {both}", lambda: both in decode.log.read_text(), 30)

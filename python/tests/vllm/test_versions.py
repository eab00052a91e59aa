"""What vLLM 0.33 has that 0.32 has not. 0.33 need not be there: the test makes its base class."""

import inspect
import logging
from types import SimpleNamespace

import native
import pytest
from halves import LAYERS, TAKEN, TOKENS, Blocks, Pair, compute, config, step
from kvferry.vllm import check
from kvferry.vllm.connector import KvferryConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.request import RequestStatus


class Base33:
    """What the base class of 0.33 adds, as it has it."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        return

    def restore_kv_caches(self) -> None:
        return


class In33(KvferryConnector, Base33):
    """The connector as it is with that base class."""


# The hooks that vLLM 0.33 calls, and with how many arguments; those without a star are in 0.32, too.
CALLS = {
    "supports_sleep_mode*": 1,
    "unregister_kv_caches*": 0,
    "restore_kv_caches*": 0,
    "get_mem_pool_context": 0,
    "register_kv_caches": 1,
    "handle_preemptions": 1,
    "bind_connector_metadata": 1,
    "start_load_kv": 1,
    "wait_for_layer_load": 1,
    "save_kv_layer": 3,
    "finish_forward": 0,
    "wait_for_save": 0,
    "get_transfer_results": 1,
    "get_block_ids_with_load_errors": 0,
    "get_kv_connector_stats": 0,
    "get_kv_connector_kv_cache_events": 0,
    "build_connector_worker_meta": 0,
    "clear_connector_metadata": 0,
    "reset_capture_state": 0,
    "on_new_request": 1,
    "get_num_new_matched_tokens": 2,
    "get_loaded_kv_cache_group_ids": 1,
    "update_state_after_alloc": 3,
    "build_connector_meta": 1,
    "update_connector_output": 1,
    "request_finished_all_groups": 2,
    "has_pending_push_work": 0,
    "has_pending_block_frees": 0,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_hook_is_called_as_it_is_defined(name):
    hook = name.removesuffix("*")
    if hook == name:
        assert any(hasattr(base, hook) for base in (KVConnectorBase_V1, SupportsHMA))
    made = In33.__new__(In33)
    assert inspect.signature(getattr(made, hook)).bind(*range(CALLS[name]))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1rc2+cpu"])
def test_versions_that_are_known_are_said(version, monkeypatch):
    assert said(monkeypatch, version) == [
        (logging.INFO, f"KvferryConnector in vLLM {version}; it knows 0.32 and 0.33")
    ]


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "0.330.0", "dev"])
def test_a_version_that_is_not_known_is_a_warning_with_both(version, monkeypatch):
    [(level, line)] = said(monkeypatch, version)
    assert level == logging.WARNING
    assert "KvferryConnector knows vLLM 0.32 and 0.33" in line and f"this is {version}:" in line


def said(monkeypatch, version: str) -> list[tuple[int, str]]:
    lines = []
    logger = logging.Logger("of the test")
    logger.handle = lambda record: lines.append((record.levelno, record.getMessage()))
    monkeypatch.setattr(check, "logger", logger)
    check.check_version(version)
    return lines


def test_sleep_mode_is_refused(model):
    made = config(model, "prefill", {})
    made.model_config = SimpleNamespace(**vars(made.model_config) | {"enable_sleep_mode": True})
    with pytest.raises(ValueError, match="KvferryConnector does not support sleep mode"):
        check.check(made)
    # By vLLM 0.33 itself, too.
    assert not In33.supports_sleep_mode(made.kv_transfer_config)
    # And by the worker, whoever asks it.
    with pytest.raises(RuntimeError, match="does not support sleep mode"):
        In33.__new__(In33).unregister_kv_caches()


@pytest.fixture
def pair(model, tmp_path):
    made = Pair(model, tmp_path)
    yield made
    made.close()


def test_an_allocation_that_comes_late_is_loaded(pair):
    pair.arrive("r")
    pair.prefill.begin(step({"r": TOKENS}, [("r", 0, (TAKEN,))]))
    compute(pair.prefill, LAYERS)
    pair.prefill.end()
    assert pair.prefill.finish("r", (TAKEN,))[0]
    tokens = pair.decode.matched("r")
    assert pair.decode.scheduler.get_loaded_kv_cache_group_ids(pair.decode.requests["r"]) == (0,)
    for _ in range(20):
        pair.decode.idle()
        # Others are asked meanwhile; the answer stays what it was.
        assert pair.decode.matched("r") == tokens
    assert not pair.decode.loaded
    pair.decode.scheduler.update_state_after_alloc(pair.decode.requests["r"], Blocks((TAKEN,)), tokens)
    pair.assert_handed_over()
    pair.prefill.until(lambda: "r" in pair.prefill.freed)


@pytest.fixture(params=["WRITE", "READ"])
def either(request, model, tmp_path):
    made = Pair(model, tmp_path, mode=request.param)
    yield made
    made.close()


def test_where_blocks_are_free_an_allocation_waits_for_nobody(either):
    """The prefill has not even heard of the request."""
    decode, key = either.decode, native.key()
    free, taken = 100 - 100 // 8 + len(TAKEN), len(TAKEN)
    pool = SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: free)
    decode.scheduler.bind_gpu_block_pool(pool)
    request = decode.arrive("r", native.to_decode(either, key), TOKENS)
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (TOKENS, True)
    free -= 1
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    # What it has computed itself takes none.
    assert decode.scheduler.get_num_new_matched_tokens(request, TOKENS // taken)[1]
    decode.scheduler.update_state_after_alloc(request, Blocks((TAKEN,)), TOKENS)
    for _ in range(20):
        decode.idle()
        assert not decode.loaded | decode.failed
    either.prefill.arrive("r", native.to_prefill(either, key), TOKENS)
    either.prefill.begin(step({"r": TOKENS}, [("r", 0, (TAKEN,))]))
    compute(either.prefill, LAYERS)
    either.prefill.end()
    either.prefill.finish("r", (TAKEN,))
    either.assert_handed_over()


def test_an_allocation_that_never_comes_holds_nothing(pair):
    pair.arrive("r")
    pair.prefill.begin(step({"r": TOKENS}, [("r", 0, (TAKEN,))]))
    compute(pair.prefill, LAYERS)
    pair.prefill.end()
    # vLLM keeps the request, and with it the engine goes on: it needs no other reason.
    assert pair.prefill.finish("r", (TAKEN,))[0]
    assert not pair.prefill.scheduler.has_pending_push_work()
    pair.decode.matched("r")
    assert pair.decode.finish("r", (), RequestStatus.FINISHED_ABORTED) == (False, None)
    pair.prefill.until(lambda: "r" in pair.prefill.freed)
    half = pair.decode.scheduler.schedulers[0]
    assert (half.legs, half.awaited, pair.decode.loaded | pair.decode.failed) == ({}, set(), set())


def test_an_allocation_that_comes_after_the_host_was_lost_has_failed(pair):
    pair.arrive("r")
    pair.prefill.begin(step({"r": TOKENS}, [("r", 0, (TAKEN,))]))
    tokens = pair.decode.matched("r")
    pair.decode.scheduler.schedulers[0].line.lost(ConnectionError("of the test"))
    pair.decode.scheduler.update_state_after_alloc(pair.decode.requests["r"], Blocks((TAKEN,)), tokens)
    assert not pair.decode.outcome("r")

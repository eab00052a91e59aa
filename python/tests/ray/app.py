"""A prefill and a decode behind Ray Serve's PD builder, until SIGTERM. Takes a JSON object: the
folder of the `model`, the `port` to listen at, a `folder` for Ray, and the ports of `metrics` by role."""

import json
import signal
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_pd_openai_app

MODEL = "tiny"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def config(role: str, model: str, metrics: int, engine: dict) -> LLMConfig:
    extra = {"read_mode": True, "handshake_port": 0, "notify_port": 0}
    kv = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": ROLES[role],
        "kv_connector_extra_config": extra,
    }
    return LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": model},
        accelerator_config={"kind": "cpu"},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        runtime_env={"env_vars": {"KVFERRY_HOST_METRICS": f"127.0.0.1:{metrics}"}},
        engine_kwargs=engine | {"kv_transfer_config": kv},
    )


def main() -> None:
    told = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    # More than there are: Ray counts what its actors ask for, not what they use.
    ray.init(num_cpus=16, include_dashboard=False, _temp_dir=told["folder"])
    serve.start(http_options={"host": "127.0.0.1", "port": told["port"]})
    parts = {
        f"{role}_config": config(role, told["model"], told["metrics"][role], told["engine"]) for role in ROLES
    }
    serve.run(build_pd_openai_app(parts), blocking=False)
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM])
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

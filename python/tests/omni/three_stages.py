"""A pipeline of three stages in vLLM-Omni's own processes, with a tiny model in each, over the connector:
`three_stages.py FOLDER`. Prints a line of JSON for each thing that happens."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# vLLM-Omni has no workers for a CPU: they are made of vLLM's own, with the runner that a connector needs.
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

STAGES = 3
POOL = 16 << 20

# A prompt of so many tokens has chunks for which the pool is too small.
LONG = 40


class Runner(CPUModelRunner, GPUARModelRunner):
    pass


class Worker(OmniWorkerMixin, cpu_worker.CPUWorker):
    model_runner_cls = Runner

    def init_device(self):
        cpu_worker.CPUModelRunner = self.model_runner_cls
        super().init_device()


_forward = LlamaForCausalLM.forward


def _without_more(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **_):
    """vLLM-Omni passes its models more."""
    return _forward(self, input_ids, positions, intermediate_tensors, inputs_embeds)


LlamaForCausalLM.forward = _without_more


def to_codes(
    transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool, new_token_ids: Any = ()
) -> Any:
    """What the next stage gets of each token."""
    import torch
    from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct

    tokens = torch.tensor([list(new_token_ids) or [0]])
    if len(request.prompt_token_ids) >= LONG:
        tokens = torch.zeros(1, POOL)
    return OmniPayloadStruct(codes=CodesStruct(audio=tokens))


DEPLOY = """
async_chunk: true
dtype: float32
connectors:
  fast: {{name: KvferryOmniConnector, extra: {{pool_bytes: {pool}, put_wait_s: 1}}}}
stages:
"""

STAGE = """
  - stage_id: {stage}
    max_num_seqs: 2
    max_model_len: 512
    enforce_eager: true
    devices: "0"
    engine_extras: {{worker_cls: three_stages.Worker}}
"""


def deploy(folder: Path) -> Path:
    text = DEPLOY.format(pool=POOL)
    for stage in range(STAGES):
        text += STAGE.format(stage=stage)
        if stage > 0:
            text += f"    input_connectors: {{from_stage_{stage - 1}: fast}}\n"
        if stage < STAGES - 1:
            text += f"    output_connectors: {{to_stage_{stage + 1}: fast}}\n"
    path = folder / "deploy.yaml"
    path.write_text(text)
    return path


def register() -> None:
    from vllm_omni.config.pipeline_registry import register_pipeline
    from vllm_omni.config.stage_config import PipelineConfig, StagePipelineConfig

    stages = []
    for stage in range(STAGES):
        more: dict[str, Any] = {"owns_tokenizer": True} if stage == 0 else {"input_sources": (stage - 1,)}
        if stage < STAGES - 1:
            more["async_chunk_process_next_stage_input_func"] = "three_stages.to_codes"
        stages.append(
            StagePipelineConfig(
                stage_id=stage, model_stage=f"stage{stage}", final_output=True, final_output_type="text", **more
            )
        )
    register_pipeline(PipelineConfig(model_type="llama", model_arch="LlamaForCausalLM", stages=tuple(stages)))


def say(**what: Any) -> None:
    print("SAID", json.dumps(what), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    # A tiny model, of the tests of vLLM.
    sys.path.append(str(Path(__file__).parent.parent / "vllm"))
    import model

    register()
    from vllm import SamplingParams
    from vllm_omni import Omni

    omni = Omni(model=str(model.write(folder / "model")), deploy_config=str(deploy(folder)))
    params = [SamplingParams(max_tokens=4, temperature=0, ignore_eos=True) for _ in range(STAGES)]
    for prompt in ("one", "another"):
        for out in omni.generate([prompt], params):
            say(stage=out.stage_id, tokens=len(out.outputs[0].token_ids))
    begun = time.monotonic()
    try:
        for out in omni.generate(["long " * LONG], params):
            say(stage=out.stage_id, of="a request whose chunks have no room")
    except Exception as error:
        say(error=str(error), seconds=time.monotonic() - begun)
    say(over=True)
    omni.close()


if __name__ == "__main__":
    main()
    os._exit(0)

"""Writes a tiny Llama with random weights and a byte-level tokenizer, without any network: `python model.py FOLDER`.

The weights are wide enough (sigma 0.3) that a greedy answer depends on the whole prompt: an answer
equal to a single server's is then proof that every transferred block held the right bytes.
"""

import json
import sys
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS = 4
HIDDEN = 256
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 64
INNER = 512
VOCAB = 512
POSITIONS = 4096

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
}


def write(folder: Path, **more) -> Path:
    """Writes config, with `more` keys, weights (14 MB, float32) and tokenizer into `folder` and returns
    it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | more))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": POSITIONS,
            }
        )
    )
    return folder


def _weights() -> dict[str, numpy.ndarray]:
    random = numpy.random.default_rng(7)

    def normal(*shape: int) -> numpy.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(numpy.float32)

    def ones() -> numpy.ndarray:
        return numpy.ones(HIDDEN, numpy.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": ones(),
        "lm_head.weight": normal(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            at + "mlp.gate_proj.weight": normal(INNER, HIDDEN),
            at + "mlp.up_proj.weight": normal(INNER, HIDDEN),
            at + "mlp.down_proj.weight": normal(HIDDEN, INNER),
            at + "input_layernorm.weight": ones(),
            at + "post_attention_layernorm.weight": ones(),
        }
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def main(arguments: list[str]) -> str:
    """Returns the folder of the model; writes the model if it is missing."""
    if len(arguments) != 1:
        raise SystemExit("give one folder for the model, e.g. tiny-model")
    folder = Path(arguments[0]).resolve()
    config = folder / "config.json"
    if config.exists() and json.loads(config.read_text()) != CONFIG:
        raise SystemExit(f"{folder}: another model is in this folder; give a new folder")
    # The tokenizer's settings are written last.
    if not (folder / "tokenizer_config.json").exists():
        write(folder)
    return str(folder)


if __name__ == "__main__":
    print(main(sys.argv[1:]))

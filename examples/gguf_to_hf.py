"""Turn a Llama-architecture GGUF file into a Hugging Face checkpoint in BF16.

    python examples/gguf_to_hf.py MODEL.gguf OUT

Needs gguf, tokenizers, safetensors and torch. transformers can do this too, in about 100 s; this takes a few.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_TENSORS = {
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
MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; ValueError for one a Llama model does not have."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in MODEL_TENSORS:
        return f"{MODEL_TENSORS[stem]}.weight"
    parts = stem.split(".")
    if kind == "weight" and len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"
    raise ValueError(f"{name}: not a tensor of a Llama model; only plain Llama architectures can be converted")


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k: it interleaves the two halves that rotary embedding pairs. weight [N, K]."""
    n, k = weight.shape
    return weight.reshape(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)


def read_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json; ValueError for an architecture other than Llama."""
    if fields["general.architecture"] != "llama":
        raise ValueError(f"architecture {fields['general.architecture']!r}: only llama can be converted")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": hidden // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def weights(reader: gguf.GGUFReader, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors in BF16 under Hugging Face names."""
    heads = fields["llama.attention.head_count"]
    rotary = {"q_proj": heads, "k_proj": fields.get("llama.attention.head_count_kv", heads)}
    out = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        module = name.split(".")[-2]
        if module in rotary:
            value = unpermute(value, rotary[module])
        out[name] = value.to(torch.bfloat16).contiguous()
    return out


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as SmolLM uses it: digits one by one, GPT-2's word splitting."""
    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind}: only SmolLM's can be converted")
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    control = [w for w, t in zip(words, fields["tokenizer.ggml.token_type"], strict=True) if t == CONTROL_TOKEN]
    result.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    return result


def convert(source: Path, target: Path) -> Path:
    """Write the checkpoint into `target`, which appears only when it is complete."""
    reader = gguf.GGUFReader(source)
    fields = read_fields(reader)
    tensors = weights(reader, fields)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = model_config(fields, tied="lm_head.weight" not in tensors)
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    words = fields["tokenizer.ggml.tokens"]
    special = {
        key: words[fields[f"tokenizer.ggml.{name}_token_id"]]
        for key, name in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **special,
    }
    (partial / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    tokenizer(fields).save(str(partial / "tokenizer.json"))
    save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("target", type=Path, help="directory to write; replaced if it exists")
    args = parser.parse_args()
    print(f"wrote {convert(args.source, args.target)}")


if __name__ == "__main__":
    main()

"""Llama and Qwen3 by Hugging Face, at odd shapes, and the same in the example's keys."""

from pathlib import Path

import torch
import transformers

SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def keys(
    kind: str, n_head: int, n_kv_head: int, head_dim: int, tied: bool, **changes
) -> dict:
    """Of a configuration: 2,048 tokens, which the tokenizer `builtin` has."""
    model = {
        **{"n_kv_head": n_kv_head, "head_dim": head_dim, "intermediate_size": 78},
        **{"rms_norm_eps": 1e-5, "qk_norm": kind == "qwen3", "rope_theta": 1e4},
        **{"rope_scaling": None, "tie_word_embeddings": tied},
    }
    sizes = {"vocab_size": 2048, "block_size": 40, "n_layer": 2, "n_head": n_head}
    return sizes | {"n_embd": 9 * n_head, "model": model | changes}


SHAPES = {
    "llama, 3 heads a group": keys("llama", 6, 2, 10, tied=False),
    "llama, scaled frequencies, tied": keys(
        "llama", 4, 4, 8, tied=True, rope_scaling=SCALED, rope_theta=5e5
    ),
    "llama, one group": keys("llama", 5, 1, 6, tied=True, rms_norm_eps=1e-3),
    "qwen3, wide heads": keys("qwen3", 6, 3, 16, tied=True, rope_theta=1e6),
    "qwen3, untied": keys("qwen3", 4, 4, 12, tied=False, intermediate_size=130),
}


def make(folder: Path, given: dict) -> transformers.PreTrainedModel:
    """A random model of these keys, which is also saved in `folder`."""
    own = given["model"]
    rope = {"rope_type": "default"} | (own["rope_scaling"] or {})
    same = ("head_dim", "intermediate_size", "rms_norm_eps", "tie_word_embeddings")
    config = transformers.AutoConfig.for_model(
        "qwen3" if own["qk_norm"] else "llama",
        vocab_size=given["vocab_size"],
        max_position_embeddings=4096,
        num_hidden_layers=given["n_layer"],
        num_attention_heads=given["n_head"],
        num_key_value_heads=own["n_kv_head"],
        hidden_size=given["n_embd"],
        rope_parameters=rope | {"rope_theta": own["rope_theta"]},
        **{key: own[key] for key in same},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # norms start as ones: tell them apart
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model

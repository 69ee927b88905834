"""A model of another kind: Llama 3's and Qwen3's shapes, in the place of GPT-2.

Before each part of a layer an RMS norm, rotary positions, groups of heads that share keys and
values, SwiGLU, and for Qwen3 norms of queries and keys (Touvron et al. 2023, Llama Team 2024,
Qwen Team 2025). Modules have the names of `transformers`, so that weights go in and out. To
train it, put this into a cell of the notebook below `RULES`, and set the keys in `model` that
configs/llama-1b-gpu.yaml has. G are the heads of keys and values, and the other letters are as
in step 4.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import normal
from jax.sharding import PartitionSpec as P

from trainkit import ops
from trainkit.config import TrainingConfig


def linear(config: TrainingConfig, rngs: nnx.Rngs) -> partial[nnx.Linear]:
    options = {"kernel_init": normal(0.02), "dtype": config.compute_dtype, "rngs": rngs}
    return partial(nnx.Linear, use_bias=False, **options)


def rms_norm(config: TrainingConfig, size: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    options = {"epsilon": config.model["rms_norm_eps"], "dtype": config.compute_dtype}
    return nnx.RMSNorm(size, **options, rngs=rngs)


def frequencies(config: TrainingConfig) -> np.ndarray:
    """Radians per position, [D/H / 2] (Su et al. 2021).

    Llama 3 divides those of long waves by a factor, after its first training on short texts:
    `_compute_llama3_parameters` in transformers/modeling_rope_utils.py.
    """
    size, theta = config.model["head_dim"], config.model["rope_theta"]
    found = theta ** -(np.arange(0, size, 2) / size)
    scaling = config.model.get("rope_scaling")
    if scaling is None:
        return found.astype(np.float32)
    if scaling["rope_type"] != "llama3":
        raise ValueError(f"model.rope_scaling: expected llama3, found {scaling}")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling["original_max_position_embeddings"] * found / (2 * math.pi)
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return (found * (kept + (1 - kept) / scaling["factor"])).astype(np.float32)


def rotate(x: jax.Array, config: TrainingConfig) -> jax.Array:
    """`x`, [B, T, H, D/H], with its pairs of numbers turned by their position's angles."""
    angles = jnp.arange(x.shape[1])[:, None] * frequencies(config)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # (T, 1, D/H / 2)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: TrainingConfig, *, rngs: nnx.Rngs):
        self.config, D, size = config, config.n_embd, config.model["head_dim"]
        new, width = linear(config, rngs), config.n_head * size
        width_kv = config.model["n_kv_head"] * size
        self.q_proj, self.o_proj = new(D, width), new(width, D)
        self.k_proj, self.v_proj = new(D, width_kv), new(D, width_kv)
        if config.model["qk_norm"]:
            self.q_norm = rms_norm(config, size, rngs)
            self.k_norm = rms_norm(config, size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], -1, self.config.model["head_dim"])
        q, k = self.q_proj(x).reshape(heads), self.k_proj(x).reshape(heads)
        v = self.v_proj(x).reshape(heads)  # (B, T, G, D/H)
        if self.config.model["qk_norm"]:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, self.config), rotate(k, self.config)
        y = ops.causal_attention(q, k, v, self.config.attention)
        return self.o_proj(y.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, config: TrainingConfig, *, rngs: nnx.Rngs):
        D, width = config.n_embd, config.model["intermediate_size"]
        new = linear(config, rngs)
        self.gate_proj, self.up_proj = new(D, width), new(D, width)
        self.down_proj = new(width, D)

    def __call__(self, x: jax.Array) -> jax.Array:
        swiglu = jax.checkpoint(lambda gate, up: nnx.silu(gate) * up)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nnx.Module):
    def __init__(self, config: TrainingConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.input_layernorm = rms_norm(config, config.n_embd, rngs)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = rms_norm(config, config.n_embd, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        y = self.self_attn(self.input_layernorm(x))
        x = x + ops.dropout(y, keys, 0, self.config)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + ops.dropout(y, keys, 1, self.config)


class Llama(nnx.Module):
    def __init__(self, config: TrainingConfig, *, rngs: nnx.Rngs):
        self.config = config
        V, D = config.padded_vocab_size, config.n_embd
        self.embed_tokens = nnx.Embed(V, D, embedding_init=normal(0.02), rngs=rngs)
        blocks = [Block(config, rngs=rngs) for _ in range(config.n_layer)]
        self.layers = nnx.List(blocks)
        self.norm = rms_norm(config, D, rngs)
        if not config.model["tie_word_embeddings"]:
            self.lm_head = linear(config, rngs)(D, V)

    def features(self, tokens: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """The last layer's output, [B, T, D], for `tokens`, int [B, T]."""
        x = self.embed_tokens(tokens).astype(self.config.compute_dtype)
        x = ops.dropout(x, keys, 0, self.config)
        x = ops.run_blocks(self.layers, x, keys, self.config.scan_layers)
        return self.norm(x)

    def table(self) -> jax.Array:
        """Of the output layer, [V, D], with rows that pad the vocabulary."""
        if self.config.model["tie_word_embeddings"]:
            return self.embed_tokens.embedding[...]
        return self.lm_head.kernel[...].T

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The next token's logits, [B, T, V], after each of `tokens`, int [B, T]."""
        x = self.features(tokens)
        return x @ self.table()[: self.config.vocab_size].T.astype(x.dtype)

    def to_hugging_face(self) -> tuple[dict, dict[str, jax.Array]]:
        """Arguments of transformers' configuration, and the tensors of its model."""
        config, own, tensors = self.config, self.config.model, {}
        for path, x in nnx.to_flat_state(nnx.state(self)):
            *modules, kind = map(str, path)
            prefix = [] if modules == ["lm_head"] else ["model"]
            name = ".".join([*prefix, *modules, "weight"])
            tensors[name] = x[...].T if kind == "kernel" else x[...]
            if modules[0] in ("embed_tokens", "lm_head"):
                tensors[name] = tensors[name][: config.vocab_size]  # without padding
        rope = {"rope_type": "default"} | (own.get("rope_scaling") or {})
        arguments = {
            "model_type": "qwen3" if own["qk_norm"] else "llama",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.block_size,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": own["n_kv_head"],
            "hidden_size": config.n_embd,
            "head_dim": own["head_dim"],
            "intermediate_size": own["intermediate_size"],
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": own["rms_norm_eps"],
            "rope_parameters": rope | {"rope_theta": own["rope_theta"]},
            "tie_word_embeddings": own["tie_word_embeddings"],
        }
        if own["qk_norm"]:
            arguments["use_sliding_window"] = False
        return arguments, tensors


def loss_fn(model, windows: jax.Array, config: TrainingConfig, keys=None) -> jax.Array:
    """Mean cross-entropy in nats per token, float32, over windows [B, T + 1]."""
    windows = windows.astype(jnp.int32)
    features, targets = model.features(windows[:, :-1], keys), windows[:, 1:]
    return ops.cross_entropy(model.table(), features, targets, config)


def create_model(config: TrainingConfig) -> Llama:
    return Llama(config, rngs=nnx.Rngs(config.seed))


RULES = {
    "q_proj.kernel": P("fsdp", "tensor"),
    "k_proj.kernel": P("fsdp", "tensor"),
    "v_proj.kernel": P("fsdp", "tensor"),
    "gate_proj.kernel": P("fsdp", "tensor"),
    "up_proj.kernel": P("fsdp", "tensor"),
    "o_proj.kernel": P("tensor", "fsdp"),
    "down_proj.kernel": P("tensor", "fsdp"),
    "lm_head.kernel": P("fsdp", "tensor"),
    "embedding": P(("tensor", "fsdp")),
}

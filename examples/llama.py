"""A model of another kind: Llama's layers, written in Flax NNX as one would anywhere.

Touvron et al. 2023: RMS norms before each layer, rotary positions, SwiGLU, an untied head.
To train it, paste this in place of the notebook's cells of GPT-2 and of its loss. To divide it
by `fsdp` and `tensor_parallel`, write its `RULES` in place of GPT-2's. The keys `attention`,
`loss_chunks`, and `scan_layers` have no effect on it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

RULES = {
    "qkv.kernel": P("fsdp", "tensor"),
    "gate.kernel": P("fsdp", "tensor"),
    "up.kernel": P("fsdp", "tensor"),
    "out.kernel": P("tensor", "fsdp"),
    "down.kernel": P("tensor", "fsdp"),
    # XLA can't look up targets in logits that tensor divides, if data and fsdp do so, too.
    "head.kernel": P("fsdp"),
    "embedding": P(("tensor", "fsdp")),
}


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embeddings (Su et al. 2021) of x, [B, T, H, D/H]."""
    T, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(T)[:, None] / 10_000 ** (jnp.arange(half) / half)  # [T, half]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, config, *, rngs: nnx.Rngs):
        self.n_head, D = config.n_head, config.n_embd
        options = {"dtype": config.compute_dtype, "rngs": rngs}
        linear = partial(nnx.Linear, use_bias=False, **options)
        self.norm_1, self.norm_2 = nnx.RMSNorm(D, **options), nnx.RMSNorm(D, **options)
        self.qkv, self.out = linear(D, 3 * D), linear(D, D)
        self.gate, self.up = linear(D, 2 * D), linear(D, 2 * D)
        self.down = linear(2 * D, D)

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, D = x.shape
        qkv = self.qkv(self.norm_1(x)).reshape(B, T, 3, self.n_head, -1)
        q, k, v = jnp.unstack(qkv, axis=2)
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.reshape(B, T, D))
        h = self.norm_2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class Llama(nnx.Module):
    def __init__(self, config, *, rngs: nnx.Rngs):
        self.config, D = config, config.n_embd
        V = config.padded_vocab_size  # a multiple of 128, which is easy to divide
        options = {"dtype": config.compute_dtype, "rngs": rngs}
        self.embed = nnx.Embed(V, D, **options)
        self.blocks = nnx.List(
            [Block(config, rngs=rngs) for _ in range(config.n_layer)]
        )
        self.norm = nnx.RMSNorm(D, **options)
        self.head = nnx.Linear(D, V, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [B, T, V] of `tokens`, int [B, T]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[..., : self.config.vocab_size]


def create_model(config) -> Llama:
    return Llama(config, rngs=nnx.Rngs(config.seed))


def loss_fn(model: Llama, windows: jax.Array, config) -> jax.Array:
    """Mean cross-entropy in nats per token over windows [B, T + 1]."""
    windows = windows.astype(jnp.int32)
    logits, targets = model(windows[:, :-1]).astype(jnp.float32), windows[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

"""A model of another kind: Llama's layers, written in Flax NNX as one would anywhere.

Touvron et al. 2023: RMS norms before each layer, rotary positions, SwiGLU, an untied head.
To train it, paste this in place of the notebook's cells of GPT-2 and of its loss. To divide it
by `fsdp` and `tensor_parallel`, write its `RULES` in place of GPT-2's.
"""

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
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    def __init__(self, config, *, rngs: nnx.Rngs):
        self.n_head, D = config.n_head, config.n_embd
        self.norm_1, self.norm_2 = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.qkv = nnx.Linear(D, 3 * D, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(D, 2 * D, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, use_bias=False, rngs=rngs)

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
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, rngs=rngs) for _ in range(config.n_layer)]
        )
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, V, use_bias=False, rngs=rngs)

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

"""What Flax lacks for a language model: attention, a loop over blocks, the loss in parts.

Attention has a kernel for each platform; blocks run one by one or scanned; logits are the
largest array of all, so the loss takes them in parts. In the comments, B is the batch, T the
tokens of a window, D the width, H the heads, V the rows of the token embedding.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from trainkit import sharding
from trainkit.config import SPLASH_BLOCK, ModelConfig


def attend(
    kind: str, q: jax.Array, k: jax.Array, v: jax.Array, cache: dict | None = None
) -> jax.Array:
    """Causal attention; q, k, v, and the result are [B, T, H, D/H].

    Args:
        kind: "xla" runs anywhere and keeps a score for each pair of tokens in memory. The
            fast kernels never do: "cudnn" on NVIDIA GPUs, "splash" on TPUs.
        cache: when generating, what `attend_to_cache` needs.
    """
    if cache is not None:
        return attend_to_cache(q, k, v, cache)
    kernel = splash_attention
    if kind != "splash":  # is_causal masks inside the kernel; a mask array is slow
        kernel = partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=kind
        )
    mesh = jax.sharding.get_abstract_mesh()
    if kind == "xla" or "tensor" not in {*mesh.axis_names} - {*mesh.manual_axes}:
        return kernel(q, k, v)
    # XLA can't look into a kernel to divide its work: each device takes its own heads.
    heads = PartitionSpec(None, None, "tensor")
    return jax.shard_map(
        kernel, in_specs=heads, out_specs=heads, axis_names={"tensor"}, check_vma=False
    )(q, k, v)


def splash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by the TPU's Pallas kernel, on one device.

    A TPU keeps the last axis of an array in rows of 128 numbers, and GPT-2's heads have 64:
    with tokens last, q, k, and v take half the memory until the backward pass.
    """
    T, H, size = q.shape[1:]
    mask = splash.MultiHeadMask([splash.CausalMask((T, T))] * H)
    tokens_last = splash.QKVLayout.SEQ_MINOR
    blocks = splash.BlockSizes(
        *[SPLASH_BLOCK] * 6,
        use_fused_bwd_kernel=True,
        q_layout=tokens_last,
        k_layout=tokens_last,
        v_layout=tokens_last,
    )
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    q, k, v = (x.swapaxes(1, 2) for x in (q / math.sqrt(size), k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)  # (B, H, T, D/H) -> (B, T, H, D/H)


def attend_to_cache(q: jax.Array, k: jax.Array, v: jax.Array, cache: dict) -> jax.Array:
    """Attention of one new token, [B, 1, H, D/H], to itself and those before it.

    Args:
        cache: `key` and `value` of the tokens so far, [B, S, H, D/H], which get the new
            token's at `position`, and that moves on by one.
    """
    position = cache["position"]
    cache["position"] = position + 1
    for name, new in (("key", k), ("value", v)):
        new = new.repeat(q.shape[2] // new.shape[2], axis=2)  # of several queries
        cache[name] = jax.lax.dynamic_update_slice_in_dim(cache[name], new, position, 1)
    seen = jnp.arange(cache["key"].shape[1]) <= position
    return jax.nn.dot_product_attention(
        q, cache["key"], cache["value"], mask=seen[None, None, None, :]
    )


def run_blocks(
    blocks: nnx.List, x: jax.Array, caches: list | None = None, scan: bool = False
) -> jax.Array:
    """The last block's output, [B, T, D], from the first block's input `x`.

    With `scan`, one compiled block runs in a loop over all parameters: many blocks compile to
    a long program, and this one stays short. `jax.checkpoint` keeps only each block's input;
    the backward pass computes the rest again, and with `fsdp` fetches the block's parameters
    again. That costs a quarter more arithmetic. To generate, with `caches`, there is no loop.

    Args:
        blocks: called as `block(x, cache)`; in training, `cache` is None.

    Raises:
        ValueError: with `scan`, a block isn't like the first.
    """
    if not scan or caches is not None:
        for block, cache in zip(blocks, caches or [None] * len(blocks)):
            x = block(x, cache)
        return x
    graph, states = nnx.graphdef(blocks[0]), [nnx.state(block) for block in blocks]
    if other := [i for i, block in enumerate(blocks) if nnx.graphdef(block) != graph]:
        raise ValueError(
            f"scan_layers: expected equal blocks, and block {other[0]} differs"
        )
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *states)

    @jax.checkpoint
    def run_block(x, state):
        return nnx.merge(graph, sharding.fetch_marked(state))(x, None), None

    return jax.lax.scan(run_block, x, stacked)[0]


def cross_entropy(
    table: jax.Array,
    features: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
) -> jax.Array:
    """Mean cross-entropy in nats per token, float32, scalar.

    The windows are cut into `loss_chunks` parts along T, and only one part's logits ever exist:
    its gradients are taken in the forward pass, as in Liger Kernel (Hsu et al. 2024), and
    the backward pass only scales them.

    Args:
        table: token embeddings, [V, D].
        features: [B, T, D].
        targets: int, [B, T].
        config: has `vocab_size` and `loss_chunks`.
    """

    def split(x):  # (B, T, ...) -> (chunks, B, T/chunks, ...)
        return jnp.stack(jnp.split(x, config.loss_chunks, axis=1))

    return cross_entropy_of_chunks(
        table, split(features), split(targets), config.vocab_size
    )


@jax.custom_gradient
def cross_entropy_of_chunks(table, features, targets, vocab_size):
    """The same for features [chunks, B, T/chunks, D] and targets [chunks, B, T/chunks].

    The gradient of a token's loss by its logits is softmax minus one-hot. Comparing with
    the target needs no scatter, and like the logits, this is an array of the compute type:
    float32 numbers exist only on their way through the sums.
    """
    rows, n = table.astype(features.dtype), targets.size

    def add_chunk(total, chunk):
        features, targets = chunk
        logits = features @ rows.T  # (B, T, V)
        # The rows that pad the vocabulary can be neither predicted nor trained.
        logits = jnp.where(jnp.arange(len(rows)) < vocab_size, logits, -jnp.inf)
        exact = logits.astype(jnp.float32)
        log_sum = jax.nn.logsumexp(exact, axis=-1, keepdims=True)
        is_target = jnp.arange(len(rows)) == targets[..., None]
        loss = jnp.sum(log_sum) - jnp.sum(exact, where=is_target)

        d_logits = (jnp.exp(exact - log_sum) - is_target) / n
        d_logits = d_logits.astype(features.dtype)
        float32 = {"preferred_element_type": jnp.float32}
        d_table = jnp.einsum("btv,btd->vd", d_logits, features, **float32)
        loss, d_features = loss / n, d_logits @ rows
        return jax.tree.map(jnp.add, total, (loss, d_table)), d_features

    zeros = jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32)
    (loss, d_table), d_features = jax.lax.scan(add_chunk, zeros, (features, targets))

    def backward(d_loss):
        scale = d_loss.astype(d_features.dtype)
        return (d_loss * d_table).astype(table.dtype), scale * d_features, None, None

    return loss, backward

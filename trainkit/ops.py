"""What Flax lacks for a language model: kernels and dropout on a mesh, a loss in parts.

In the comments, B is the batch, T the tokens of a window, D the width, H the heads, and V the
rows of the output layer.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P

from trainkit.config import TrainingConfig

SPLASH_BLOCK = 512  # tokens that the TPU's kernel takes at once


def grid_of(devices: Sequence[jax.Device], fsdp: int, tensor: int) -> np.ndarray:
    """The devices as [data, fsdp, tensor], with neighbors along the last axes.

    Devices of one TPU slice are neighbors, and only data goes over several slices.
    """
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_of(device), []).append(device)
    to_grid = partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    data = len(devices) // (len(slices) * fsdp * tensor)
    grids = [to_grid((data, fsdp, tensor), each) for each in slices.values()]
    return np.concatenate(grids)


def slice_of(device: jax.Device) -> int:
    """The number of a device's TPU slice. Of GPUs, JAX calls each node a slice: here, 0."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, kernel: str
) -> jax.Array:
    """Causal attention, [B, T, H, D/H], by the kernel that the key `attention` names.

    If `k` and `v` have fewer heads than `q`, a group of its heads shares each of theirs.
    """
    attend = _splash_attention
    if kernel != "splash":
        plain = jax.nn.dot_product_attention
        attend = partial(plain, is_causal=True, implementation=kernel)
    return _on_each_device(attend, None, "tensor")(q, k, v)


def _on_each_device(function: Callable, *axes: str | None) -> Callable:
    """`function` of arrays [B, ...], run by each device on its part of B and of `axes`.

    XLA can't look into a kernel to divide its work, as it divides all else. Where `data` is
    divided already, as in `accumulation.mean_over_batch`, the axes that are left divide B.
    """
    divided = jax.sharding.get_abstract_mesh().manual_axes
    batch = tuple(axis for axis in ("data", "fsdp") if axis not in divided)
    part = P(batch, *axes)
    return jax.shard_map(function, in_specs=part, out_specs=part, check_vma=False)


def _splash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention by the TPU's Pallas kernel; q, k, v, and the result are [B, T, H, D/H].

    A TPU keeps the last axis of an array in rows of 128 numbers, and GPT-2's heads have 64:
    with tokens last, q, k, and v take half the memory until the backward pass.
    """
    T, H, size = q.shape[1:]
    mask = splash.MultiHeadMask([splash.CausalMask((T, T))] * H)
    tokens_last = splash.QKVLayout.SEQ_MINOR
    blocks = splash.BlockSizes(
        block_q=SPLASH_BLOCK,
        block_kv=SPLASH_BLOCK,
        block_kv_compute=SPLASH_BLOCK,
        block_q_dkv=SPLASH_BLOCK,
        block_kv_dkv=SPLASH_BLOCK,
        block_kv_dkv_compute=SPLASH_BLOCK,
        use_fused_bwd_kernel=True,
        q_layout=tokens_last,
        k_layout=tokens_last,
        v_layout=tokens_last,
    )
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    q, k, v = (x.swapaxes(1, 2) for x in (q / math.sqrt(size), k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)  # (B, H, T, D/H) -> (B, T, H, D/H)


def run_blocks(
    blocks: Sequence[nnx.Module],
    x: jax.Array,
    keys: jax.Array | None = None,
    scan: bool = False,
) -> jax.Array:
    """The last block's output, [B, T, D], from the first block's input `x`.

    With `scan`, one compiled block runs in a loop over all parameters: many blocks compile to
    a long program, and this one stays short. `jax.checkpoint` keeps only each block's input;
    the backward pass computes the rest again, which costs a third more arithmetic.

    Args:
        keys: of `row_keys`. Each block is called as `block(x, keys)`, with keys of its own, and
            without dropout as `block(x)`.
    """

    def run_block(x, numbered):
        number, block = numbered
        if keys is None:
            return block(x), None
        return block(x, _fold_in(keys, number + 1)), None

    if not scan:
        for numbered in enumerate(blocks):
            x, _ = run_block(x, numbered)
        return x
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)
    numbers = None if keys is None else jnp.arange(len(blocks))
    return jax.lax.scan(jax.checkpoint(run_block), x, (numbers, stacked))[0]


def row_keys(config: TrainingConfig, step: jax.Array) -> jax.Array | None:
    """A random key for each row of a step's batch, [B], by the seed; None without dropout."""
    if not config.dropout:
        return None
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    rows = jnp.arange(config.batch_size)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def dropout(
    x: jax.Array, keys: jax.Array | None, place: int, config: TrainingConfig
) -> jax.Array:
    """`x`, [B, T, D], of which the share `config.dropout` is zero, and the rest is scaled.

    Which numbers are zero depends on the row's key and the `place` in its block, and so neither
    on the mesh nor on micro-batches (Srivastava et al. 2014).

    Args:
        keys: [B], or None, with which `x` stays as it is.
    """
    if keys is None:
        return x
    share = 1 - config.dropout

    def drop(x, keys):
        draw = partial(jax.random.bernoulli, p=share, shape=x.shape[1:])
        return jnp.where(jax.vmap(draw)(keys), x / share, 0)

    return _on_each_device(drop)(x, _fold_in(keys, place))


def _fold_in(keys: jax.Array, number: jax.Array | int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def cross_entropy(
    table: jax.Array, features: jax.Array, targets: jax.Array, config: TrainingConfig
) -> jax.Array:
    """Mean cross-entropy in nats per token, float32, scalar.

    The windows are cut into `loss_chunks` parts along T, and only one part's logits ever
    exist: its gradients are taken in the forward pass, as in Liger Kernel (Hsu et al. 2024),
    and the backward pass only scales them.

    Args:
        table: of the output layer, [V, D]; GPT-2's are its token embeddings.
        features: [B, T, D].
        targets: int, [B, T].
    """

    def split(x):  # (B, T, ...) -> (chunks, B, T/chunks, ...)
        return jnp.stack(jnp.split(x, config.loss_chunks, axis=1))

    # Each device scores its own tokens, and so needs all rows that fsdp divides.
    table = jax.lax.with_sharding_constraint(table, P("tensor"))
    return _mean_over_parts(table, split(features), split(targets), config.vocab_size)


@jax.custom_gradient
def _mean_over_parts(table, features, targets, vocab_size):
    """For features [chunks, B, T/chunks, D] and targets [chunks, B, T/chunks]."""
    n = targets.size

    def loss_of_part(table, features, targets):
        logits = features @ table.astype(features.dtype).T  # (B, T/chunks, V)
        # The rows that pad the vocabulary can be neither predicted nor trained.
        logits = jnp.where(jnp.arange(len(table)) < vocab_size, logits, -jnp.inf)
        return _sum_over_tokens(logits, targets) / n  # so backward multiplies by 1

    def add_part(total, part):
        loss_and_gradients = jax.value_and_grad(loss_of_part, argnums=(0, 1))
        loss, (d_table, d_features) = loss_and_gradients(table, *part)
        return jax.tree.map(jnp.add, total, (loss, d_table)), d_features

    zeros = jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32)
    (loss, d_table), d_features = jax.lax.scan(add_part, zeros, (features, targets))

    def backward(d_loss):
        scaled = d_features * d_loss.astype(d_features.dtype)
        return (d_table * d_loss).astype(table.dtype), scaled, None, None

    return loss, backward


@jax.custom_gradient
def _sum_over_tokens(logits, targets):
    """Of the cross-entropy, whose gradient by the logits is softmax minus one-hot.

    Comparing with the target needs no scatter, and the gradient is of the logits' own type:
    float32 numbers exist only on their way through the sums.
    """
    exact = logits.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(exact, axis=-1, keepdims=True)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    loss = jnp.sum(log_sum) - jnp.sum(exact, where=is_target)

    def backward(d_loss):
        gradient = jnp.exp(exact - log_sum) - is_target
        return (d_loss * gradient).astype(logits.dtype), None

    return loss, backward

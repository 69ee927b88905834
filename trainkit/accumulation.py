"""Gradient accumulation: a mean over a batch, in micro-batches and over replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from trainkit.config import TrainingConfig


def mean_over_batch(
    function: Callable,
    model: nnx.Module,
    batch: Any,
    config: TrainingConfig,
    keys: jax.Array | None = None,
):
    """The mean of `function(model, batch, config)` over a batch, in parts.

    For a function whose result is a mean over its rows, such as a loss or
    `jax.value_and_grad` of one, it is what `function` of the whole batch returns, but for
    rounding. Each device takes its rows in micro-batches, so that it never keeps the
    activations of more than `device_batch_size`. By itself, XLA would sum some gradients over
    devices in every micro-batch, and in the compute type. In a `shard_map` over `data`, each
    replica of the model (`fsdp` times `tensor` devices) sums its own, and replicas average
    once, in float32, as with PyTorch's `no_sync`.

    Args:
        batch: windows [B, T + 1], or any pytree of arrays [B, ...], divided over the axes
            `data` and `fsdp` of the mesh that is set.
        keys: [B], which `function` gets as one more argument, unless they are None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows = len(jax.tree.leaves(batch)[0]) // (mesh.shape["data"] * mesh.shape["fsdp"])
    k = config.micro_batches(rows)
    given = (batch,) if keys is None else (batch, keys)

    def of_micro_batch(model, given):
        batch, *keys = given
        return function(model, batch, config, *keys)

    def mean_of_replica(model, given):
        mean = _mean_over_micro_batches(of_micro_batch, model, given, k)
        return jax.tree.map(lambda x: x[None], mean)  # a row of what shard_map returns

    mean_of_each = jax.shard_map(
        mean_of_replica,
        in_specs=(P(), P("data")),  # data divides the batch, and not the model
        out_specs=P("data"),  # a row for each replica
        axis_names={"data"},  # XLA divides over the other axes
        check_vma=False,  # or jax.grad would sum over replicas, in every micro-batch
    )
    # Here, and only here, replicas communicate.
    return jax.tree.map(lambda x: x.mean(axis=0), mean_of_each(model, given))


def _mean_over_micro_batches(function, model, batch, k):
    """The mean of `function(model, micro_batch)` over k parts of the batch."""

    def split(x):
        # Micro-batch i has rows i, i + k, and so on, so each device keeps its own.
        return x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1)

    micro_batches = jax.tree.map(split, batch)

    def add(sums, micro_batch):
        return jax.tree.map(jnp.add, sums, function(model, micro_batch)), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    shapes = jax.eval_shape(function, model, first)
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    sums, _ = jax.lax.scan(add, zeros, micro_batches)
    return jax.tree.map(lambda x: x / k, sums)

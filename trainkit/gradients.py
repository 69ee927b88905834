"""The gradients of a step: of micro-batches on each device, then summed over all devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainkit.config import TrainingConfig
from trainkit.devices import BATCH_AXES


def mean(
    loss_and_gradients: Callable,
    state: Any,
    windows: jax.Array,
    config: TrainingConfig,
    rules: tuple,
) -> tuple[jax.Array, nnx.State]:
    """The mean loss of a step's windows, and its gradients, float32.

    With one device and one micro-batch, that is what `loss_and_gradients` returns.

    Args:
        loss_and_gradients: what `jax.value_and_grad` makes of a function of parameters,
            windows [B, T + 1], and a key for dropout, which depends on the seed, the step,
            and the micro-batch alone.
        state: with `step` and `params`.
        windows: [B, T + 1], divided over the mesh by `devices.batch_sharding`.
        rules: which mesh axis divides each logical axis of the parameters.
    """
    step_key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    k = config.micro_batches

    def on_device(params, windows):
        def add_micro_batch(total, micro):
            windows, index = micro
            key = jax.random.fold_in(step_key, index)
            found = loss_and_gradients(params, windows, key)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), params)
        micros = micro_batches(windows, config), jnp.arange(k)
        total, _ = jax.lax.scan(
            add_micro_batch, (jnp.zeros((), jnp.float32), zeros), micros
        )
        return jax.tree.map(lambda x: x / k, total)

    params = cast_kernels(state.params, config.compute_dtype)
    if config.dropout:  # XLA divides the work; each window has a draw of its own
        return on_device(params, windows)
    return mean_over_devices(on_device, params, windows, rules)


def micro_batches(windows: jax.Array, config: TrainingConfig) -> jax.Array:
    """[B, T + 1] -> [k, B/k, T + 1], without moving a row to another device.

    Each device keeps its own rows: a micro-batch takes every k-th row of the batch rather
    than the first B/k.
    """
    k = config.micro_batches
    return windows.reshape(-1, k, windows.shape[-1]).swapaxes(0, 1)


def cast_kernels(params: nnx.State, dtype: str) -> nnx.State:
    """`params` with the kernels of layers in the type that these layers compute in.

    They would cast them each time. Once a step is once for all micro-batches, and the
    devices fetch half the bytes from one another.
    """

    def cast(path, param):
        is_kernel = path[-1] == "kernel"
        return param.replace(param[...].astype(dtype)) if is_kernel else param

    return nnx.map_state(cast, params)


def mean_over_devices(
    loss_and_gradients: Callable, params: nnx.State, windows: jax.Array, rules: tuple
) -> tuple[jax.Array, nnx.State]:
    """The mean loss of all windows, and its gradients: computed apart, summed up once.

    Each device fetches the parameters that it lacks, computes the gradients of its own
    windows, however many micro-batches they are, and only then are those of all devices
    summed, in float32. With `fsdp`, each device gets no more of the sum than its part of
    the parameters (a reduce-scatter, as in ZeRO: Rajbhandari et al. 2020, section 5).

    Args:
        loss_and_gradients: a function of all parameters and a device's windows. It returns
            their mean loss and its gradients, float32.
        params: divided over the mesh as `rules` say of their logical axes.
        windows: [B, T + 1], divided over the mesh by `batch_sharding`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    if not axes:
        return loss_and_gradients(params, windows)
    with nnx.logical_axis_rules(rules):
        specs = nnx.get_partition_spec(params)
    # What `tensor` divides is left to XLA.
    specs = jax.tree.map(
        lambda spec: PartitionSpec(*(a if a in axes else None for a in spec)), specs
    )

    def fetch(x, spec):
        if "fsdp" not in spec:
            return x
        return jax.lax.all_gather(x, "fsdp", axis=spec.index("fsdp"), tiled=True)

    def mean(x, spec):
        others = axes
        if "fsdp" in spec:
            dimension = spec.index("fsdp")
            x = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=dimension, tiled=True)
            others = tuple(axis for axis in axes if axis != "fsdp")
        return jax.lax.psum(x, others) / jax.lax.axis_size(axes)

    def on_device(params, windows):
        everything = jax.tree.map(fetch, params, specs)
        loss, gradients = loss_and_gradients(everything, windows)
        return jax.lax.pmean(loss, axes), jax.tree.map(mean, gradients, specs)

    return jax.shard_map(
        on_device,
        in_specs=(specs, PartitionSpec(axes)),
        out_specs=(PartitionSpec(), specs),
        axis_names={*axes} if mesh.shape["tensor"] > 1 else {*mesh.axis_names},
        check_vma=False,
    )(params, windows)

"""The mean over a batch: of its micro-batches on each device, and over all devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainkit import devices
from trainkit.config import TrainingConfig
from trainkit.devices import BATCH_AXES


def mean(
    loss_and_gradients: Callable,
    params: nnx.State,
    windows: jax.Array,
    config: TrainingConfig,
    rules: tuple,
    key: jax.Array | None = None,
) -> tuple[jax.Array, nnx.State]:
    """The mean loss of a step's windows, and its gradients, float32.

    Each device adds up what its own micro-batches give, and the devices are averaged once a
    step. With `fsdp`, a device gets no more of the gradients than its part of the parameters
    (a reduce-scatter, as in ZeRO: Rajbhandari et al. 2020, section 5). It fetches the
    parameters that it lacks before the first micro-batch; with `scan_layers`, it fetches a
    layer's when it computes that layer, forwards and backwards, and never holds two layers.

    Args:
        loss_and_gradients: what `jax.value_and_grad` makes of a function of parameters,
            windows [B, T + 1], and a key.
        params: float32, divided over the mesh as `rules` say.
        windows: [B, T + 1], divided over the mesh by `devices.batch_sharding`.
        rules: which mesh axes divide a parameter; `devices.parameter_specs` explains them.
        key: for dropout; each device and micro-batch draws with one of its own.
    """
    on_devices = partial(over_devices, params, windows, config, rules, key)
    return on_devices(loss_and_gradients, has_gradients=True)


def mean_loss(
    loss: Callable,
    params: nnx.State,
    windows: jax.Array,
    config: TrainingConfig,
    rules: tuple,
) -> jax.Array:
    """The mean loss alone, for evaluation; the arguments are those of `mean`."""
    return over_devices(params, windows, config, rules, None, loss, has_gradients=False)


def over_devices(
    params, windows, config, rules, key, function: Callable, has_gradients: bool
) -> Any:
    """What `mean` and `mean_loss` say; without a mesh, on one device."""
    mesh = jax.sharding.get_abstract_mesh()

    def on_device(params, windows, key, device=0):
        """The mean of the micro-batches."""
        k = config.micro_batches

        def add_micro_batch(total, micro):
            windows, index = micro
            draws = key
            if key is not None:
                draws = jax.random.fold_in(jax.random.fold_in(key, device), index)
            found = function(params, windows, draws)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jnp.zeros((), jnp.float32)
        if has_gradients:
            zeros_like = partial(jnp.zeros_like, dtype=jnp.float32)
            zeros = zeros, jax.tree.map(zeros_like, params)
        micros = micro_batches(windows, config), jnp.arange(k)
        total, _ = jax.lax.scan(add_micro_batch, zeros, micros)
        return jax.tree.map(lambda x: x / k, total)

    if not mesh.shape:
        return on_device(fetch(params, None, config), windows, key)

    axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    specs = devices.parameter_specs(params, rules, mesh)
    # What `tensor` divides is left to XLA.
    specs = jax.tree.map(
        lambda spec: PartitionSpec(*(a if a in axes else None for a in spec)), specs
    )

    def on_each_device(parts, windows, key):
        params = fetch(parts, specs, config)
        found = on_device(params, windows, key, jax.lax.axis_index(BATCH_AXES))
        if not has_gradients:
            return jax.lax.pmean(found, axes)
        loss, gradients = found
        leaves = jax.tree.leaves(gradients)  # without the marks of `fetch`
        gradients = jax.tree.unflatten(jax.tree.structure(parts), leaves)
        gradients = jax.tree.map(mean_of_part, gradients, parts, specs)
        return jax.lax.pmean(loss, axes), gradients

    whole = PartitionSpec()
    return jax.shard_map(
        on_each_device,
        in_specs=(specs, PartitionSpec(BATCH_AXES), whole),
        out_specs=(whole, specs) if has_gradients else whole,
        axis_names={*BATCH_AXES} if mesh.shape["tensor"] > 1 else {*mesh.axis_names},
        check_vma=False,
    )(params, windows, key)


def micro_batches(windows: jax.Array, config: TrainingConfig) -> jax.Array:
    """[B, T + 1] -> [k, B/k, T + 1]: micro-batch i has every k-th window from the i-th on.

    On several devices, each cuts its own windows.
    """
    k = config.micro_batches
    return windows.reshape(-1, k, windows.shape[-1]).swapaxes(0, 1)


def fetch(parts: nnx.State, specs: Any, config: TrainingConfig) -> nnx.State:
    """The whole parameters, kernels in the type in which their layers compute.

    The layers would cast them each time. Once a step is once for all micro-batches, and the
    devices fetch half the bytes from one another. With `scan_layers`, the parts of a list's
    layers are only marked, and `layers.scan_blocks` fetches them one layer at a time.
    """
    divided = {
        devices.name_of(path): spec.index("fsdp")
        for path, spec in jax.tree.leaves_with_path(specs)
        if "fsdp" in spec
    }

    def fetch_one(path, param):
        dtype = config.compute_dtype if path[-1] == "kernel" else param.dtype
        axis = divided.get("/".join(map(str, path)))
        if axis is None:
            return param.replace(param[...].astype(dtype))
        if config.scan_layers and any(isinstance(part, int) for part in path):
            return type(param)(param[...], fetch=(axis, dtype))
        return param.replace(devices.fetch_part(param[...], axis, dtype))

    return nnx.map_state(fetch_one, parts)


def mean_of_part(
    gradient: jax.Array, part: jax.Array, spec: PartitionSpec
) -> jax.Array:
    """The mean over all devices of their gradients, as far as this one holds the parameter."""
    others = [axis for axis in BATCH_AXES if jax.lax.axis_size(axis) > 1]
    if "fsdp" in spec:
        others.remove("fsdp")
        if gradient.shape != part.shape:  # or `fetch_part` has summed it
            gradient = devices.sum_part(gradient, spec.index("fsdp"))
    return jax.lax.psum(gradient, others) / jax.lax.axis_size(BATCH_AXES)

"""The mean over a batch: of its micro-batches on each device, and over all devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trainkit import devices
from trainkit.config import TrainingConfig
from trainkit.devices import BATCH_AXES


def mean(
    function: Callable,
    params: nnx.State,
    windows: jax.Array,
    config: TrainingConfig,
    rules: tuple,
    key: jax.Array | None = None,
) -> Any:
    """What `function` gives for a step's windows: a loss, or a loss and its gradients.

    Each device adds up what its own micro-batches give, in float32, and the devices are
    averaged once a step. With `fsdp`, a device gets no more of the gradients than its part
    of the parameters (a reduce-scatter, as in ZeRO: Rajbhandari et al. 2020, section 5). It
    fetches the parameters that it lacks before the first micro-batch; with `scan_layers`, it
    fetches a layer's when it computes that layer, forwards and backwards, and never holds
    two layers.

    Args:
        function: of parameters, windows [B, T + 1], and a key: the mean loss of the windows,
            or what `jax.value_and_grad` makes of it.
        params: float32, divided over the mesh as `rules` say.
        windows: [B, T + 1], divided over the mesh by `devices.batch_sharding`.
        rules: which mesh axes divide a parameter; `devices.parameter_specs` explains them.
        key: for dropout; each device and micro-batch draws with one of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    form = jax.tree.structure(jax.eval_shape(function, params, windows, key))
    whole = PartitionSpec()

    def on_device(params, windows, key, device=0) -> list:
        """The mean of the micro-batches: the loss and, if there are any, the gradients."""
        k = config.micro_batches

        def add_micro_batch(total, micro):
            windows, index = micro
            draws = key
            if key is not None:
                draws = jax.random.fold_in(jax.random.fold_in(key, device), index)
            found = jax.tree.leaves(function(params, windows, draws))
            return [*map(jnp.add, total, found)], None

        shapes = [(), *(x.shape for x in jax.tree.leaves(params))][: form.num_leaves]
        zeros = [jnp.zeros(shape, jnp.float32) for shape in shapes]
        # Micro-batch i has every k-th window from the i-th on.
        micros = windows.reshape(-1, k, windows.shape[-1]).swapaxes(0, 1)
        total, _ = jax.lax.scan(add_micro_batch, zeros, (micros, jnp.arange(k)))
        return [x / k for x in total]

    if not mesh.shape:
        params = fetch(params, None, config)
        return jax.tree.unflatten(form, on_device(params, windows, key))

    axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    specs = devices.parameter_specs(params, rules, mesh)
    # What `tensor` divides is left to XLA.
    specs = jax.tree.map(
        lambda spec: PartitionSpec(*(a if a in axes else None for a in spec)), specs
    )
    results = [whole, *jax.tree.leaves(specs)][: form.num_leaves]

    def on_each_device(parts, windows, key):
        device = jax.lax.axis_index(BATCH_AXES)
        found = on_device(fetch(parts, specs, config), windows, key, device)
        arrays = [found[0], *jax.tree.leaves(parts)]
        return [*map(mean_of_part, found, arrays, results)]

    found = jax.shard_map(
        on_each_device,
        in_specs=(specs, PartitionSpec(BATCH_AXES), whole),
        out_specs=results,
        axis_names={*BATCH_AXES} if mesh.shape["tensor"] > 1 else {*mesh.axis_names},
        check_vma=False,
    )(params, windows, key)
    return jax.tree.unflatten(form, found)


def fetch(parts: nnx.State, specs: Any, config: TrainingConfig) -> nnx.State:
    """The whole parameters, kernels in the type in which their layers compute.

    The layers would cast them each time. Once a step is once for all micro-batches, and the
    devices fetch half the bytes from one another. With `scan_layers`, the parts of a list's
    layers are only marked, and `layers.run_blocks` fetches them one layer at a time.
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


def mean_of_part(found: jax.Array, part: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The mean of what all devices have found, as far as this one holds the parameter."""
    others = [axis for axis in BATCH_AXES if jax.lax.axis_size(axis) > 1]
    if "fsdp" in spec:
        others.remove("fsdp")
        if found.shape != part.shape:  # or `fetch_part` has summed it
            found = devices.sum_part(found, spec.index("fsdp"))
    return jax.lax.psum(found, others) / jax.lax.axis_size(BATCH_AXES)

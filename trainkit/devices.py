"""The mesh: all devices of all workers along named axes, batches and gradients on it."""

from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # divide the windows of a batch


def make_mesh(config, devices: list | None = None) -> jax.sharding.Mesh:
    """All devices of all workers, along the axes data, fsdp, and tensor."""
    devices = jax.devices() if devices is None else devices
    data, *others = config.mesh_shape(config.worker_range[1])
    options = {"devices": devices, "allow_split_physical_axes": True}
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if devices[0].platform == "tpu" and len(slices) > 1:
        # Only the data axis crosses the slow network between slices.
        grid = mesh_utils.create_hybrid_device_mesh(
            (data // len(slices), *others), (len(slices), 1, 1), **options
        )
    else:
        grid = mesh_utils.create_device_mesh((data, *others), **options)
    return jax.sharding.Mesh(grid, AXES)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """How the windows of a batch, [B, ...], are divided over the mesh."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def divide_windows(x: jax.Array) -> jax.Array:
    """Divide `x`, [B, T, D], by windows only, if there are devices to divide it over.

    In `mean_over_devices`, each device has its own windows already.
    """
    if set(BATCH_AXES) <= automatic_axes():
        return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))
    return x


def automatic_axes() -> set[str]:
    """The mesh axes over which XLA divides what this code computes, if there is a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


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


def local_rows(config, mesh: jax.sharding.Mesh) -> np.ndarray:
    """The places of the global batch that this worker's devices hold, int [rows]."""
    shape = (config.batch_size,)
    held = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    return np.unique([np.arange(config.batch_size)[index] for index in held])


def global_batches(
    batches: Iterable[dict], config, mesh: jax.sharding.Mesh, first_step: int = 0
) -> Iterator[jax.Array]:
    """Present the workers' parts of each step's windows as one array, [B, T + 1].

    The next array is on its way to the devices before the current one is needed.

    Args:
        batches: this worker's rows, step by step: `sequence`, the windows' numbers in the
            run, and `tokens`, uint16 or uint32 [rows, T + 1].

    Raises:
        RuntimeError: a window is missing, repeated, or out of order.
    """
    shape = (config.batch_size, config.block_size + 1)
    sharding, rows = batch_sharding(mesh), local_rows(config, mesh)
    ready = []
    for step, batch in enumerate(batches, first_step):
        expected = step * config.batch_size + rows
        if not np.array_equal(batch["sequence"], expected):
            raise RuntimeError(
                f"step {step}: expected the windows {expected}, found {batch['sequence']}"
            )
        local = batch["tokens"]
        ready.append(jax.make_array_from_process_local_data(sharding, local, shape))
        if len(ready) == 2:
            yield ready.pop(0)
    yield from ready

"""The mesh: all devices of all workers along named axes, and batches on it."""

from collections.abc import Iterable, Iterator

import jax
import numpy as np
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

    In `gradients.mean_over_devices`, each device has its own windows already.
    """
    if set(BATCH_AXES) <= automatic_axes():
        return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))
    return x


def automatic_axes() -> set[str]:
    """The mesh axes over which XLA divides what this code computes, if there is a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return set(mesh.axis_names) - set(mesh.manual_axes)


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

"""The mesh: all devices of all workers along named axes, with parameters and batches on it."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
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


def name_of(path: tuple) -> str:
    """The name of an array in a pytree of NNX variables, such as h/0/attn/query/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def parameter_specs(params: nnx.State, rules: tuple, mesh: jax.sharding.Mesh):
    """A pytree like `params`: which axes of the mesh divide each parameter.

    A row of `rules` has parts of parameters' names, as in "query|key", and a mesh axis or
    None for each axis of their kernels or embedding; the first that fits counts. What
    no row names is divided over `fsdp` along the largest axis that divides, if it has two
    axes or more. A bias is divided as the output of its kernel; smaller arrays aren't.

    Raises:
        ValueError: a row fits no parameter, or doesn't divide one.
    """
    rules = [(name, axes) for names, axes in rules for name in names.split("|")]
    leaves, structure = jax.tree.flatten_with_path(params)
    shapes = {name_of(path): x.shape for path, x in leaves}
    found, fitting = {}, set()
    for name, shape in shapes.items():
        fits = (
            (part, axes)
            for part, axes in rules
            if f"/{part}/" in f"/{name}/" and len(axes) == len(shape)
        )
        part, found[name] = next(fits, (None, default_axes(shape, mesh)))
        fitting.add(part)
        for axis, size in zip(found[name], shape):
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"SHARDING_RULES: {part} divides {name}, {list(shape)}, over {axis}, and "
                    f"{size} is no multiple of {axis}: {mesh.shape[axis]}"
                )
    if unused := [part for part, _ in rules if part not in fitting]:
        raise ValueError(
            f"SHARDING_RULES: {', '.join(unused)} fits no parameter with as many axes that "
            f"isn't in a row above; there are {', '.join([*shapes][:20])} and so on"
        )
    for name, shape in shapes.items():
        kernel = name.removesuffix("bias") + "kernel"
        if name.endswith("bias") and len(shape) < len(shapes.get(kernel, ())):
            found[name] = found[kernel][-len(shape) :]
    return jax.tree.unflatten(structure, [PartitionSpec(*found[n]) for n in shapes])


def default_axes(shape: tuple[int, ...], mesh) -> tuple[str | None, ...]:
    """`fsdp` along the largest axis that it divides, for arrays of two axes or more."""
    sizes = [size if size % mesh.shape["fsdp"] == 0 else 0 for size in shape]
    largest = sizes.index(max(sizes)) if len(shape) > 1 and any(sizes) else None
    return tuple("fsdp" if i == largest else None for i in range(len(shape)))


def fetch_marked(state: nnx.State) -> nnx.State:
    """`state` with the whole parameters where `gradients.fetch` has marked parts of them."""

    def fetch(_, param):
        metadata = param.get_metadata()
        if "fetch" not in metadata:
            return param
        return type(param)(fetch_part(param[...], *metadata["fetch"]))

    return nnx.map_state(fetch, state)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fetch_part(part: jax.Array, axis: int, dtype: str) -> jax.Array:
    """The whole array of which each device on `fsdp` has a part along `axis`.

    Backwards, the devices' gradients are summed in float32, and each gets its part.
    """
    return jax.lax.all_gather(part.astype(dtype), "fsdp", axis=axis, tiled=True)


def sum_part(gradient: jax.Array, axis: int) -> jax.Array:
    """This device's part of the sum of the gradients of all devices on `fsdp`, float32."""
    exact = gradient.astype(jnp.float32)
    return jax.lax.psum_scatter(exact, "fsdp", scatter_dimension=axis, tiled=True)


fetch_part.defvjp(
    lambda part, axis, dtype: (fetch_part(part, axis, dtype), None),
    lambda axis, dtype, _, gradient: (sum_part(gradient, axis),),
)


def local_rows(config, mesh: jax.sharding.Mesh) -> np.ndarray:
    """The places of the global batch that this worker's devices hold, int [rows]."""
    shape = (config.batch_size,)
    held = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    return np.unique([np.arange(config.batch_size)[index] for index in held])


def global_batches(
    batches: Iterable[dict], numbers: list[np.ndarray], config, mesh: jax.sharding.Mesh
) -> Iterator[jax.Array]:
    """Present the workers' parts of each step's windows as one array, [B, T + 1].

    The next array is on its way to the devices before the current one is needed.

    Args:
        batches: for each step, `numbers` and `tokens` of this worker's windows: int64
            [1, rows] and uint16 or uint32 [1, rows, T + 1].
        numbers: those that are expected, int64 arrays [some steps, rows].

    Raises:
        RuntimeError: a window is missing, repeated, or out of order.
    """
    shape, sharding = (config.batch_size, config.block_size + 1), batch_sharding(mesh)

    def arrays():
        remaining = iter(batches)
        for expected in np.concatenate(numbers):
            batch = next(remaining, None)
            found = batch and batch["numbers"][0]
            if not np.array_equal(found, expected):
                raise RuntimeError(f"expected the windows {expected}, found {found}")
            tokens = batch["tokens"][0]
            yield jax.make_array_from_process_local_data(sharding, tokens, shape)
        yield None  # follows the last

    return (array for array, _ in itertools.pairwise(arrays()))

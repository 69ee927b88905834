"""Arrays on many devices: the mesh, what of each array a device holds, and means over all.

The mesh has all devices of all workers along named axes. Batches are divided over it, and so
are the parameters and what an optimizer keeps of them. The notebook defines model and state;
these functions take its `create_model(config)` or `create_state(config)` as an argument.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from trainkit.config import ModelConfig, TrainingConfig

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # divide the windows of a batch
# Parts of parameters' names, and the axes that divide the rows and the columns of their
# matrices; the first that fits counts. So divided over `tensor`, attention and the MLP each
# communicate once forwards and once backwards (Shoeybi et al. 2019, section 3).
RULES = (
    ("query|key|value|c_fc", ("fsdp", "tensor")),
    ("wte|c_proj", ("tensor", "fsdp")),
)


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


def parameter_specs(params: nnx.State, mesh: jax.sharding.Mesh):
    """A pytree like `params`: which axes of the mesh divide each parameter, by `RULES`.

    What no rule names is divided over `fsdp` along the largest axis that divides, if it has
    two axes or more. A bias is divided as the output of its kernel; smaller arrays aren't.

    Raises:
        ValueError: a rule doesn't divide a parameter, or none divides any over `tensor`.
    """
    leaves, structure = jax.tree.flatten_with_path(params)
    shapes, found = {name_of(path): x.shape for path, x in leaves}, {}
    for name, shape in shapes.items():
        fits = (
            axes
            for parts, axes in RULES
            if len(axes) == len(shape)
            and any(f"/{part}/" in f"/{name}/" for part in parts.split("|"))
        )
        sizes = [size if size % mesh.shape["fsdp"] == 0 else 0 for size in shape]
        largest = sizes.index(max(sizes)) if len(shape) > 1 and any(sizes) else None
        default = tuple("fsdp" if i == largest else None for i in range(len(shape)))
        found[name] = next(fits, default)
        if other := {*found[name]} - {"fsdp", "tensor", None}:
            raise ValueError(
                f"sharding.RULES: {name} is divided over {', '.join(other)}; expected fsdp, "
                "tensor, or None"
            )
        for axis, size in zip(found[name], shape):
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f"sharding.RULES: {name}, {list(shape)}, is divided over {axis}, and "
                    f"{size} is no multiple of {axis}: {mesh.shape[axis]}"
                )
    if mesh.shape["tensor"] > 1 and "tensor" not in {*chain(*found.values())}:
        raise ValueError(
            "tensor_parallel: no row of sharding.RULES divides a parameter of this model over "
            f"tensor; there are {', '.join([*shapes][:20])} and so on. Add a row, or set it "
            "to 1 and fsdp higher"
        )
    for name, shape in shapes.items():
        kernel = name.removesuffix("bias") + "kernel"
        if kernel in shapes and shape == shapes[kernel][1:][-len(shape) :]:
            found[name] = found[kernel][-len(shape) :]
    return jax.tree.unflatten(structure, [PartitionSpec(*found[n]) for n in shapes])


def fetch(parts: nnx.State, specs: nnx.State, config) -> nnx.State:
    """The whole parameters, kernels in the type in which their layers compute.

    The layers would cast them each time. Once a step is once for all micro-batches, and the
    devices fetch half the bytes from one another. With `scan_layers`, the parts of the model's
    list of blocks are only marked, and `layers.run_blocks` fetches them block by block.
    """
    specs = dict(nnx.to_flat_state(specs))

    def fetch_one(path, param):
        dtype = config.compute_dtype if path[-1] == "kernel" else param.dtype
        spec = specs[path].get_raw_value()
        if "fsdp" not in spec:
            return param.replace(param[...].astype(dtype))
        axis = spec.index("fsdp")
        if config.scan_layers and isinstance([*path, ""][1], int):
            return type(param)(param[...], fetch=(axis, dtype))
        return param.replace(fetch_part(param[...], axis, dtype))

    return nnx.map_state(fetch_one, parts)


def fetch_marked(state: nnx.State) -> nnx.State:
    """`state` with the whole parameters where `fetch` has marked parts of them."""

    def fetch_one(_, param):
        if "fetch" not in param.get_metadata():
            return param
        return type(param)(fetch_part(param[...], *param.get_metadata("fetch")))

    return nnx.map_state(fetch_one, state)


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
    batches: Iterable[dict], indices: list[np.ndarray], config, mesh: jax.sharding.Mesh
) -> Iterator[jax.Array]:
    """Present the workers' parts of each step's windows as one array, [B, T + 1].

    The next array is on its way to the devices before the current one is needed.

    Args:
        batches: for each step, `indices` and `tokens` of this worker's windows: int64
            [1, rows] and uint16 or uint32 [1, rows, T + 1].
        indices: those that are expected, int64 arrays [some steps, rows].

    Raises:
        RuntimeError: a window is missing, repeated, or out of order.
    """
    shape, sharding = (config.batch_size, config.block_size + 1), batch_sharding(mesh)

    def arrays():
        remaining = iter(batches)
        for expected in np.concatenate(indices):
            batch = next(remaining, None)
            found = batch and batch["indices"][0]
            if not np.array_equal(found, expected):
                raise RuntimeError(f"expected the windows {expected}, found {found}")
            tokens = batch["tokens"][0]
            yield jax.make_array_from_process_local_data(sharding, tokens, shape)
        yield None  # follows the last

    return (array for array, _ in pairwise(arrays()))


def mean(
    function: Callable, params: nnx.State, windows: jax.Array, config: TrainingConfig
) -> Any:
    """What `function` gives for a step's windows: a loss, or a loss and its gradients.

    Each device adds up what its own micro-batches give, in float32, and the devices are
    averaged once a step. With `fsdp`, a device gets no more of the gradients than its part
    of the parameters (a reduce-scatter, as in ZeRO: Rajbhandari et al. 2020, section 5). It
    fetches the parameters that it lacks before the first micro-batch; with `scan_layers`, it
    fetches a layer's when it computes that layer, forwards and backwards, never holds two
    layers, and sums a layer's gradients over `fsdp` for each micro-batch.

    Args:
        function: of parameters, windows [B, T + 1], and `config`: the mean loss of the
            windows, or what `jax.value_and_grad` makes of it.
        params: float32, divided over the mesh as `parameter_specs` says.
        windows: [B, T + 1], divided over the mesh by `batch_sharding`.
    """
    mesh, k = jax.sharding.get_abstract_mesh(), config.micro_batches
    function = partial(function, config=config)
    form = jax.tree.structure(jax.eval_shape(function, params, windows))

    def on_device(params, windows) -> list:
        """The mean of the micro-batches: the loss and, if there are any, the gradients."""

        def add_micro_batch(total, windows):
            found = jax.tree.leaves(function(params, windows))
            return [*map(jnp.add, total, found)], None

        shapes = [(), *(x.shape for x in jax.tree.leaves(params))][: form.num_leaves]
        zeros = [jnp.zeros(shape, jnp.float32) for shape in shapes]
        # Micro-batch i has every k-th window from the i-th on.
        micros = windows.reshape(-1, k, windows.shape[-1]).swapaxes(0, 1)
        total, _ = jax.lax.scan(add_micro_batch, zeros, micros)
        return [x / k for x in total]

    if not mesh.shape:
        whole = jax.tree.map(lambda _: PartitionSpec(), params)
        params = fetch(params, whole, config)
        return jax.tree.unflatten(form, on_device(params, windows))

    axes = [axis for axis in BATCH_AXES if mesh.shape[axis] > 1]
    specs = jax.tree.map(  # what `tensor` divides is left to XLA
        lambda spec: PartitionSpec(*(a if a in axes else None for a in spec)),
        parameter_specs(params, mesh),
    )
    results = [PartitionSpec(), *jax.tree.leaves(specs)][: form.num_leaves]

    def on_each_device(parts, windows) -> list:
        """The mean over the devices, as far as this one holds the parameter."""
        found = on_device(fetch(parts, specs, config), windows)
        arrays, means = [found[0], *jax.tree.leaves(parts)], []
        for x, part, spec in zip(found, arrays, results):
            # What `run_blocks` has fetched, `fetch_part` has summed.
            if "fsdp" in spec and x.shape != part.shape:
                x = sum_part(x, spec.index("fsdp"))
            others = [axis for axis in axes if axis not in spec]
            means.append(jax.lax.psum(x, others) / jax.lax.axis_size(BATCH_AXES))
        return means

    found = jax.shard_map(
        on_each_device,
        in_specs=(specs, PartitionSpec(BATCH_AXES)),
        out_specs=results,
        axis_names={*BATCH_AXES} if mesh.shape["tensor"] > 1 else {*mesh.axis_names},
        check_vma=False,
    )(params, windows)
    return jax.tree.unflatten(form, found)


def count_parameters(create_model: Callable, config: ModelConfig) -> int:
    """The number of parameters, not counting the rows that pad the vocabulary."""
    params = nnx.state(nnx.eval_shape(partial(create_model, config)), nnx.Param)
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    return sum(param.size for param in jax.tree.leaves(params)) - padding


def abstract_state(
    create_state: Callable, config: TrainingConfig, mesh: jax.sharding.Mesh
) -> Any:
    """The shape, dtype, and sharding of every array of the state; allocates nothing.

    What the optimizer keeps of a parameter, under its name and in its shape, is divided as
    the parameter is; all else is whole on each device.

    Args:
        create_state: makes a pytree with `params`.

    Raises:
        ValueError: a parameter isn't float32, as gradients are; or as `parameter_specs` says.
    """
    state = jax.eval_shape(partial(create_state, config))
    for path, x in jax.tree.leaves_with_path(state.params):
        if x.dtype != jnp.float32:
            raise ValueError(
                f"create_model: {name_of(path)} is {x.dtype}; expected float32, which layers "
                "compute with as compute_dtype"
            )
    specs = jax.tree.leaves(parameter_specs(state.params, mesh))
    arrays = jax.tree.leaves_with_path(state.params)
    params = {name_of(path): (x.shape, spec) for (path, x), spec in zip(arrays, specs)}

    def place(path, x):
        # opt_state/1/0/mu/h/0/... ends in its parameter's name, h/0/...
        ends = (name_of(path[i:]) for i in range(len(path)))
        name = next((end for end in ends if end in params), None)
        shape, spec = params.get(name, (None, None))
        sharding = NamedSharding(mesh, spec if shape == x.shape else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map_with_path(place, state)


def initial_state(create_state: Callable, config: TrainingConfig, abstract: Any) -> Any:
    """The state before the first step; each device makes the shards that it keeps.

    With `config.init_from`, every worker reads published weights from a file instead.

    Args:
        abstract: what `abstract_state` says of it.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = jax.jit(create_state, static_argnums=0, out_shardings=shardings)(config)
    if config.init_from != "scratch":
        from trainkit import huggingface  # slow, and needed here only

        state = state._replace(params=huggingface.load_weights(config, state.params))
    return state

"""Traces the model and its loss as on so many devices, without one of them."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from trainkit import checkpoint_reader, huggingface, ops
from trainkit.config import TrainingConfig


def check_parameters(model: nnx.Module) -> None:
    """Refuse a model with arrays that a train step would treat wrong.

    A step trains every array of a model, in float32. It would train a table of constants,
    forget what dropout counts, and train what stands in two places as two arrays. What a
    module holds without an `nnx.Variable`, Flax takes for a part of the program, or trains it.

    Raises:
        ValueError: an array isn't an `nnx.Param` of float32, or stands in two places.
    """
    for place, module in nnx.iter_modules(model):
        for name, held in vars(module).items():
            if isinstance(held, jax.Array | np.ndarray):
                raise ValueError(
                    f"create_model: {'.'.join(map(str, [*place, name]))} is an array and no "
                    "nnx.Param: expected it to be computed where it is used"
                )
    places: dict[int, str] = {}
    variables = jax.tree.leaves_with_path(
        model, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, x in variables:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        other = places.setdefault(id(x), name)
        if not isinstance(x, nnx.Param) or x.dtype != jnp.float32 or other != name:
            raise ValueError(
                f"create_model: {name} is {type(x).__name__} of {x.dtype}, also {other}: "
                "expected each array once, as an nnx.Param of float32"
            )


def check_optimizer(opt_state: optax.OptState) -> None:
    """Refuse numbers that `optax.inject_hyperparams` would take from a checkpoint.

    A branch would go on with them, whatever its configuration says.

    Raises:
        ValueError: an argument is no schedule.
    """
    kept, scheduled = (
        [found for _, found in optax.tree.get_all_with_path(opt_state, key)]
        for key in ("hyperparams", "hyperparams_states")
    )
    numbers = {x for a, b in zip(kept, scheduled, strict=True) for x in a.keys() - b}
    if numbers:
        raise ValueError(
            f"create_optimizer: inject_hyperparams keeps {', '.join(sorted(numbers))} in "
            "checkpoints, so no branch could change it: expected schedules only, and numbers "
            "inside of the function, as in clipped_adamw"
        )


def check_sharding(
    config: TrainingConfig,
    devices: int,
    create_state: Callable,
    abstract_state: Callable,
    loss_fn: Callable,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Refuse what would fail on so many devices, without one of them.

    Returns:
        the state's arrays by name, as shapes and dtypes.

    Raises:
        ValueError: an array's axis isn't divisible by the axes of the mesh that shard it, a
            kernel doesn't take the configuration, a key of `model` isn't used, `init_from` is
            another kind of model, or as `check_parameters` and `check_optimizer`.
        Exception: what the loss raises when it is traced.
    """
    if config.attention == "splash" and config.block_size % ops.SPLASH_BLOCK:
        raise ValueError(
            f"attention: splash takes {ops.SPLASH_BLOCK} tokens at once, and block_size, "
            f"{config.block_size}, is no multiple of that"
        )
    if config.attention == "cudnn" and config.compute_dtype != "bfloat16":
        raise ValueError("attention: cudnn computes in bfloat16. Set compute_dtype")
    data = devices // (config.fsdp * config.tensor_parallel)
    shape = (data, config.fsdp, config.tensor_parallel)
    names = ("data", "fsdp", "tensor")
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * 3)
    # The driver has no kernels of GPUs and TPUs, and shapes don't depend on them.
    traced = dataclasses.replace(config, attention="xla")
    windows = jax.ShapeDtypeStruct(
        (data * config.fsdp, config.block_size + 1), "uint16"
    )

    def loss(model, windows):
        keys = ops.row_keys(traced, 0)
        more = () if keys is None else (keys[: len(windows)],)
        return loss_fn(model, windows, traced, *more)

    given = checkpoint_reader.takes_weights(config)
    is_published = given and not checkpoint_reader.is_one(str(config.init_from))

    def trace():
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(lambda: check_parameters(create_state(traced).model))
            state = abstract_state(traced, mesh)
            check_optimizer(state.opt_state)
            arrays = _check_shards(state, mesh)
            jax.eval_shape(loss, state.model, windows)
            if is_published:
                huggingface.check(config, state.model)
        return arrays

    with ThreadPoolExecutor() as pool:  # a thread has no other mesh set
        arrays = pool.submit(trace).result()
    if unread := traced.model.keys() - traced.model.read:  # type: ignore[attr-defined]
        raise ValueError(
            f"model: neither the model nor its loss has read {', '.join(sorted(unread))}"
        )
    return arrays


def _check_shards(
    state: NamedTuple, mesh: AbstractMesh
) -> dict[str, jax.ShapeDtypeStruct]:
    arrays = {}
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = name.removesuffix(".value")
        arrays[name] = x
        try:
            x.sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"RULES: {name} of shape {x.shape} can't be sharded by "
                f"{x.sharding.spec} on a mesh of {' x '.join(map(str, mesh.axis_sizes))}: "
                f"{error}"
            ) from None
    return arrays

"""Before workers start: what would fail on them, and what each of them gets."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import ray
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from ray.train.v2.api.config import ScalingConfig

from trainkit import checkpoints, huggingface, ops, runs, token_files, tokenizers
from trainkit.config import TrainingConfig


def check(
    config: TrainingConfig,
    scaling: ScalingConfig,
    create_state: Callable,
    abstract_state: Callable,
    loss_fn: Callable,
) -> None:
    """Refuse what would fail on the workers, or couldn't be continued.

    Says what the cluster lacks, and which accelerators stay unused.

    Args:
        create_state: `create_state(config)` gives the first state.
        abstract_state: `abstract_state(config, mesh)` gives the state's shapes and shardings.
        loss_fn: `loss_fn(model, windows, config)`, and with dropout `keys` after them.

    Raises:
        ValueError: the run couldn't be continued, the workers can't share a batch, an array
            can't be sharded, or the model or its loss can't be traced.
        RuntimeError: workers of another launch have the run.
    """
    runs.check_folder(config)
    devices = numbers_of_devices(scaling)
    _check_slices(config, scaling)
    for number in devices:
        config.layout(number)
    for number in devices:
        shapes = check_sharding(config, number, create_state, abstract_state, loss_fn)
    checkpoints.check_start(config, shapes)
    _compare_with_cluster(scaling)
    runs.wait_for_workers(config)


def settings(config: TrainingConfig) -> dict:
    """What a worker gets: the configuration, and what tells its tokens from others.

    `val` has the windows in val.bin, and the bytes of text in a token, if the manifest says so.
    `branch` is what `runs.compare` returns.

    Raises:
        FileNotFoundError: there are no tokens.
        ValueError: they aren't this configuration's, or the run's checkpoints are of other
            tokens or of another recipe.
    """
    manifest = _check_tokens(config)
    val = {"windows": token_files.count_windows(config, "val")}
    if "bytes" in manifest:
        val["bytes_per_token"] = manifest["bytes"]["val"] / manifest["tokens"]["val"]
    tokens = token_files.digest(config)
    branch = runs.compare(config, tokens)
    given = {"config": dict(vars(config)), "tokens": tokens}
    return given | {"val": val, "branch": branch}


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


def check_sharding(
    config: TrainingConfig,
    devices: int,
    create_state: Callable,
    abstract_state: Callable,
    loss_fn: Callable,
) -> dict[str, tuple[int, ...]]:
    """Refuse what would fail on so many devices, without one of them.

    Returns:
        the shapes of the state's arrays by name.

    Raises:
        ValueError: an array's axis isn't divisible by the axes of the mesh that shard it, a
            kernel doesn't take the configuration, a key of `model` isn't used, or `init_from`
            is another kind of model.
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

    is_published = config.init_from and not checkpoints.is_one(config.init_from)

    def trace():
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(lambda: check_parameters(create_state(traced).model))
            state = abstract_state(traced, mesh)
            shapes = _check_shards(state, mesh)
            jax.eval_shape(loss, state.model, windows)
            if is_published and not checkpoints.start_of(config):
                huggingface.check(config, state.model)
        return shapes

    with ThreadPoolExecutor() as pool:  # a thread has no other mesh set
        shapes = pool.submit(trace).result()
    if unread := traced.model.keys() - traced.model.read:  # type: ignore[attr-defined]
        raise ValueError(
            f"model: neither the model nor its loss has read {', '.join(sorted(unread))}"
        )
    return shapes


def _check_shards(state: NamedTuple, mesh: AbstractMesh) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for path, x in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = name.removesuffix(".value")
        shapes[name] = x.shape
        try:
            x.sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"RULES: {name} of shape {x.shape} can't be sharded by "
                f"{x.sharding.spec} on a mesh of {' x '.join(map(str, mesh.axis_sizes))}: "
                f"{error}"
            ) from None
    return shapes


def environment(config: TrainingConfig, scaling: ScalingConfig) -> dict[str, str]:
    """The environment variables that each worker starts with, before it imports JAX."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{config.data_dir}-jax-cache")
    variables = {
        "JAX_PLATFORMS": "tpu" if scaling.use_tpu else "cpu",
        "JAX_PLATFORM_NAME": "",  # or JAX would run on what the driver's says
        "JAX_COMPILATION_CACHE_DIR": cache,  # for restarts
        # Of workers on CPUs, the first alone would use it, and then wait for the others.
        "JAX_ENABLE_COMPILATION_CACHE": str(scaling.use_gpu or scaling.use_tpu),
        "RAY_DATA_LOG_LEVEL": "ERROR",  # or each dataset says that it shows no bar
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "grpc_proxy": "",  # calls between workers don't go through an HTTP proxy
    }
    if scaling.use_gpu:
        variables["JAX_PLATFORMS"] = "cuda"
        # cuBLAS adds biases and GELU while it writes a product, which Triton's products don't
        # (rosetta/docs/GPU_performance.md of NVIDIA/JAX-Toolbox), and none are merged.
        ours = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
        if config.fsdp > 1 and not config.scan_layers:
            # XLA's unrolled loop over micro-batches would end the process: docs/upstream.md.
            ours += (
                " --xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_NO_UNROLL"
            )
        variables["XLA_FLAGS"] = f"{ours} {variables['XLA_FLAGS']}"
        # Random numbers by JAX's kernel: XLA's program of them all compiles for minutes.
        variables["JAX_THREEFRY_GPU_KERNEL_LOWERING"] = "true"
        # Communicate while computing: "Optimization level" there.
        variables["JAX_OPTIMIZATION_LEVEL"] = "O1"
        # Where GKE has its driver. Libraries of the node's could hide those of JAX's packages.
        variables["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64"
        # cuDNN's attention carries an address, which differs in each process.
        variables["JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"] = "true"
    return variables


def _check_tokens(config: TrainingConfig) -> dict:
    """Refuse tokens that were made for another configuration, and that this one can't use.

    Their manifest; {} if there is none.
    """
    path = Path(config.data_dir) / "manifest.json"
    if not path.exists():
        token_files.check(config)
        return {}
    manifest = json.loads(path.read_text())
    ours = f"tokenizer: {tokenizers.identity(config.tokenizer)}"
    if ours not in manifest["made_from"]:
        theirs = [x for x in manifest["made_from"] if x.startswith("tokenizer: ")]
        raise ValueError(
            f"data_dir: {config.data_dir} holds tokens of {theirs}, and this configuration's "
            f"are [{ours!r}]. Set tokenizer or data_dir"
        )
    token_files.check(config, manifest)
    return manifest


def numbers_of_devices(scaling: ScalingConfig) -> list[int]:
    """That the workers may have in all: several, if their number is a range."""
    if scaling.max_workers < 1:
        raise ValueError(
            f"num_workers: expected 1 or more, found {scaling.num_workers}"
        )
    each = max(1, scaling.num_gpus_per_worker, scaling.num_tpus_per_worker)
    step = 1
    if scaling.topology:  # whole TPU slices
        step = math.prod(map(int, scaling.topology.split("x"))) // each
    numbers = range(scaling.min_workers, scaling.max_workers + 1, max(1, int(step)))
    return [int(workers * each) for workers in numbers]


def _check_slices(config: TrainingConfig, scaling: ScalingConfig) -> None:
    """Refuse what would need the slower network between TPU slices, which only `data` uses."""
    if not scaling.topology:
        return
    chips = math.prod(map(int, scaling.topology.split("x")))
    model = config.fsdp * config.tensor_parallel
    if chips % model:
        raise ValueError(
            f"fsdp x tensor_parallel is {model}: expected a divisor of the {chips} chips of a "
            f"slice, topology {scaling.topology}, because only data goes over several slices"
        )
    for workers in (scaling.min_workers, scaling.max_workers):
        if workers * scaling.num_tpus_per_worker % chips:
            raise ValueError(
                f"num_workers: {workers} with {scaling.num_tpus_per_worker:g} chips each are "
                f"no whole slices of {chips} chips, topology {scaling.topology}"
            )


def _compare_with_cluster(scaling: ScalingConfig) -> None:
    """Say what is asked for and isn't there, and which accelerators nobody asks for.

    Without a CPU for Ray Data, the loop would wait for its first batch.
    """
    asked, there = scaling.total_resources, ray.cluster_resources()
    share = scaling.min_workers / scaling.max_workers
    found = {kind: there.get(kind, 0) for kind in asked}
    if any(share * asked[kind] > found[kind] for kind in asked):
        print(f"The workers ask for {asked}. The cluster has {found}, so Ray waits.")
    elif there.get("CPU", 0) - asked.get("CPU", 0) < 1:
        print(
            "The workers take all CPUs, and Ray Data's tasks wait until there is one."
        )
    for kind in ("GPU", "TPU"):
        count, used = there.get(kind, 0), asked.get(kind, 0)
        if count > used:
            print(
                f"The cluster has {count:g} {kind}s, and the workers use {used:g} of them."
            )

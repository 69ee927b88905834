"""Before workers start: what would fail on them, and what each of them gets."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import ray
from ray.train.v2.api.config import ScalingConfig

from trainkit import (
    checkpoint_reader,
    dry_run,
    recipe,
    run_lock,
    s3,
    token_files,
    tokenization,
)
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
        FloatingPointError: it has diverged, and nobody said to go on.
    """
    _check_folder(config)
    needs = {"cudnn": "use_gpu", "splash": "use_tpu"}.get(config.attention)
    if needs and not getattr(scaling, needs):
        raise ValueError(f"attention: {config.attention} needs {needs} in scaling")
    devices = _numbers_of_devices(scaling)
    _check_slices(config, scaling)
    for number in devices:
        config.layout(number)
    jax.clear_caches()  # forget what was traced before an edit
    config.model.read.clear()  # type: ignore[attr-defined]
    for number in devices:
        arrays = dry_run.check_sharding(
            config, number, create_state, abstract_state, loss_fn
        )
    checkpoint_reader.check_start(config, arrays)
    _compare_with_cluster(scaling)
    run_lock.wait_for_workers(config)


def settings(config: TrainingConfig) -> dict:
    """What a worker gets: the configuration, and what tells its tokens from others.

    `val` has the windows in val.bin, and the bytes of text in a token, if the manifest says so.
    `branch` is what `recipe.compare` returns.

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
    branch = recipe.compare(config, tokens)
    given = {"config": dict(vars(config)), "tokens": tokens}
    return given | {"val": val, "branch": branch}


def _check_folder(config: TrainingConfig) -> None:
    """Refuse a launch that couldn't continue its run, before anything is written."""
    if config.run_name is None:
        raise ValueError(
            "run_name: a job or a script has none, so a second try would start over. Add a "
            "line such as 'run_name: my-run' to its configuration."
        )
    if "/working_dir_files/" in config.storage_path:
        raise ValueError(
            f"storage_path: {config.storage_path} is in a job's copy of this folder, which Ray "
            "deletes. Set storage_path and data_dir to folders that all nodes share."
        )
    if config.storage_path.startswith("gs://") and " " in str(config.run_path):
        raise ValueError(
            f"storage_path, run_name: {config.run_path} has a space, with which Ray can't open "
            "gs://. Choose names without"
        )
    is_s3 = config.storage_path.startswith("s3://")
    form = checkpoint_reader.NAME if is_s3 else s3.NAME
    names = [path.name for path in config.run_path.glob("step_*")]
    if other := [name for name in names if re.fullmatch(form, name)]:
        raise ValueError(
            f"storage_path: {config.run_path} has {other[0]}, a checkpoint in the form of "
            f"{'other storage' if is_s3 else 's3://'}, which can't be read here. Continue the "
            "run where it was, or choose another run_name."
        )


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
    manifest = json.loads(path.read_text()) if path.exists() else {}
    if manifest:
        ours = f"tokenizer: {tokenization.identity(config.tokenizer)}"
        theirs = [x for x in manifest["made_from"] if x.startswith("tokenizer: ")]
        if ours not in theirs:
            raise ValueError(
                f"data_dir: {config.data_dir} holds tokens of {theirs}, and this "
                f"configuration's are [{ours!r}]. Set tokenizer or data_dir"
            )
    token_files.check(config, manifest)
    return manifest


def most_shards(scaling: ScalingConfig) -> int:
    """The largest `fsdp * tensor_parallel` that all numbers of workers, and a slice, allow."""
    return math.gcd(*_numbers_of_devices(scaling), _chips_of_slice(scaling))


def _chips_of_slice(scaling: ScalingConfig) -> int:
    """0 for devices that aren't in TPU slices."""
    topology = scaling.topology
    return math.prod(map(int, topology.split("x"))) if topology else 0


def _numbers_of_devices(scaling: ScalingConfig) -> list[int]:
    """That the workers may have in all: several, if their number is a range."""
    if scaling.max_workers < 1:
        raise ValueError(
            f"num_workers: expected 1 or more, found {scaling.num_workers}"
        )
    each = max(1, scaling.num_gpus_per_worker, scaling.num_tpus_per_worker)
    step = max(1, int(_chips_of_slice(scaling) // each))  # whole TPU slices
    numbers = range(scaling.min_workers, scaling.max_workers + 1, step)
    return [int(workers * each) for workers in numbers]


def _check_slices(config: TrainingConfig, scaling: ScalingConfig) -> None:
    """Refuse what would need the slower network between TPU slices, which only `data` uses."""
    chips, model = _chips_of_slice(scaling), config.fsdp * config.tensor_parallel
    if chips % model:
        raise ValueError(
            f"fsdp x tensor_parallel is {model}: expected a divisor of the {chips} chips of a "
            f"slice, topology {scaling.topology}, because only data goes over several slices"
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

"""The workers: what they ask of the cluster, their environment, and how each starts."""

import atexit
import faulthandler
import logging
import os
import socket
import time
from collections.abc import Callable

import jax
import ray
import ray.data
import ray.train
import ray.train.collective
from jax.experimental import multihost_utils
from ray.train import ScalingConfig

from trainkit import layers, run_log, runs, token_files
from trainkit.config import TrainingConfig


def settings(
    config: TrainingConfig,
    scaling: ScalingConfig,
    create_state: Callable,
    abstract_state: Callable,
    loss_fn: Callable,
) -> dict:
    """What `start` gets. Prints what the cluster lacks or has left, and refuses mistakes.

    Args:
        create_state: `create_state(config)` gives the first state.
        abstract_state: `abstract_state(config, mesh)` gives the state's shapes and shardings.
        loss_fn: `loss_fn(model, windows, config)`.

    Raises:
        FileNotFoundError: there are no tokens.
        ValueError: the run couldn't be continued, the workers can't share a batch, an array
            can't be sharded, or the model or its loss can't be traced.
    """
    runs.check_folder(config)
    if scaling.max_workers < 1:
        raise ValueError(
            f"num_workers: expected 1 or more, found {scaling.num_workers}"
        )
    each = max(1, scaling.num_gpus_per_worker, scaling.num_tpus_per_worker)
    step = scaling.min_workers if scaling.topology else 1  # whole TPU slices
    numbers = range(scaling.min_workers, scaling.max_workers + 1, step)
    devices = [int(workers * each) for workers in numbers]
    for number in devices:
        config.split(number)
    jax.eval_shape(lambda: layers.check_parameters(create_state(config).model))
    for number in devices:
        layers.check_sharding(config, number, abstract_state, loss_fn)
    asked = scaling.total_resources
    share = scaling.min_workers / scaling.max_workers
    there = {kind: ray.cluster_resources().get(kind, 0) for kind in asked}
    atexit.register(run_log.close_bars)
    if any(share * asked[kind] > there[kind] for kind in asked):
        print(f"The workers ask for {asked}. The cluster has {there}, so Ray waits.")
    for kind in ("GPU", "TPU"):
        count = ray.cluster_resources().get(kind, 0)
        if count > asked.get(kind, 0):
            used = asked.get(kind, 0)
            print(
                f"The cluster has {count:g} {kind}s, and the workers use {used:g} of them."
            )
    return {"config": dict(vars(config)), "tokens": token_files.digest(config)}


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
        variables["XLA_FLAGS"] = f"{ours} {variables['XLA_FLAGS']}"
        # Random numbers by JAX's kernel: XLA's program of them all compiles for minutes.
        variables["JAX_THREEFRY_GPU_KERNEL_LOWERING"] = "true"
        # Communicate while computing: "Optimization level" there.
        variables["JAX_OPTIMIZATION_LEVEL"] = "O1"
        # That of each node, and where GKE keeps its driver.
        variables["LD_LIBRARY_PATH"] = "${LD_LIBRARY_PATH}:/usr/local/nvidia/lib64"
        # cuDNN's attention carries an address, which differs in each process.
        variables["JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"] = "true"
    return variables


def start(settings: dict) -> TrainingConfig:
    """Start as one of the workers; only one launch has the run, with the same tokens on all.

    From here on, a worker that hangs for `stall_timeout_s` ends, and prints where.

    Args:
        settings: those of the function `settings`; without token files, `tokens` is None.

    Raises:
        RuntimeError: another launch has the run, or the workers form no JAX program.
        ValueError: this node has other tokens, or devices that can't share a batch.
    """
    config = TrainingConfig(**settings["config"])
    runs.lock(config)
    ray.train.collective.barrier()  # for as long as it takes, where JAX would give up
    faulthandler.dump_traceback_later(config.stall_timeout_s, exit=True)  # see RunLog
    context = ray.train.get_context()
    if settings["tokens"] and context.get_local_rank() == 0:  # once for each node
        found = token_files.digest(config)
        if found != settings["tokens"]:
            raise ValueError(
                f"data_dir: on {socket.gethostname()}, {config.data_dir} holds {found}, and "
                f"where the run was launched {settings['tokens']}. Set it to storage that all "
                "nodes share."
            )
    workers = context.get_world_size()
    if jax.process_count() != workers:
        raise RuntimeError(
            f"JAX sees {jax.process_count()} of {workers} workers. On CPUs, pass "
            "jax_config=JaxConfig(use_gpu=True) to JaxTrainer."
        )
    config.split(jax.device_count())
    # Connected now, workers may compile for longer than the 30 s that Gloo waits on CPUs.
    multihost_utils.sync_global_devices("start")
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
    limit_data()
    return config


def limit_data() -> None:
    """Let the datasets that this process makes read a little ahead, and then wait."""

    class Pause:  # in here, or tasks, which get these settings, would import this module
        """Sleeps in each step of a scheduler that would take a core (docs/upstream.md)."""

        def on_execution_step(self, *about: object) -> None:
            time.sleep(0.01)

        before_execution_starts = after_execution_succeeds = on_execution_step
        after_execution_fails = on_execution_step

    data = ray.data.DataContext.get_current()
    data.custom_execution_callback_classes = [Pause]
    data.enable_progress_bars = False
    data.target_max_block_size = 2**23  # bytes; in more, step 1 waits for others
    # Without limits, each worker's dataset asks an autoscaler for more, and fills the store.
    limits = ray.data.ExecutionResources.for_limits(cpu=1, object_store_memory=2**28)
    data.execution_options.resource_limits = limits

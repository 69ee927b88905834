"""How each worker starts, and how far its datasets read ahead."""

import faulthandler
import logging
import os
import socket
import time

import jax
import ray
import ray.data
import ray.train
import ray.train.collective
from jax.experimental import multihost_utils

from trainkit import recipe, run_lock, token_files
from trainkit.config import TrainingConfig

_AHEAD = 2**28  # bytes that a dataset keeps in the object store
_BLOCK = 2**23  # bytes; with larger ones, a run's first step waits for those of others
_PAUSE = 0.01  # seconds


def start(settings: dict) -> TrainingConfig:
    """Start as one of the workers; only one launch has the run, with the same tokens on all.

    It prints its rank and its host, so that the one that others wait for can be found.

    From here on, a worker that hangs for `stall_timeout_s` ends, and prints where. The wait for
    the run isn't counted.

    Args:
        settings: those of `launch.settings`; without token files, `tokens` is None.

    Raises:
        RuntimeError: another launch has the run, or the workers form no JAX program.
        ValueError: this node has other tokens, the run has another recipe, or the devices
            can't share a batch.
    """
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
    config = TrainingConfig(**settings["config"])
    context = ray.train.get_context()
    place = f"process {os.getpid()} on {socket.gethostname()}"
    print(f"worker {context.get_world_rank()} of {context.get_world_size()}: {place}")
    # A shared folder may be dead on the first worker, for which the others wait.
    faulthandler.dump_traceback_later(
        run_lock.PATIENCE + config.stall_timeout_s, exit=True
    )
    run_lock.lock(config)
    ray.train.collective.barrier()  # for as long as it takes, where JAX would give up
    faulthandler.dump_traceback_later(config.stall_timeout_s, exit=True)  # see RunLog
    if context.get_world_rank() == 0:
        # Another launch may have saved since the driver asked.
        recipe.compare(config, settings["tokens"] or {})
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
    config.layout(jax.device_count())
    # Connected now, workers may compile for longer than the 30 s that Gloo waits on CPUs.
    multihost_utils.sync_global_devices("start")
    limit_data()
    return config


def limit_data() -> None:
    """Let the datasets that this process makes read a little ahead, and then wait."""

    class Pause:  # in here, or tasks, which get these settings, would import this module
        """Sleeps in each step of a scheduler that would take a core (docs/upstream.md)."""

        def on_execution_step(self, *about: object) -> None:
            time.sleep(_PAUSE)

        before_execution_starts = after_execution_succeeds = on_execution_step
        after_execution_fails = on_execution_step

    data = ray.data.DataContext.get_current()
    data.custom_execution_callback_classes = [Pause]  # type: ignore[list-item] # no base
    data.enable_progress_bars = False
    data.target_max_block_size = _BLOCK
    # Without limits, each worker's dataset asks an autoscaler for more, and fills the store.
    limits = ray.data.ExecutionResources.for_limits(cpu=1, object_store_memory=_AHEAD)
    data.execution_options.resource_limits = limits

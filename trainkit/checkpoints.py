"""Save and restore a run's state, and refuse what can't be restored.

A checkpoint holds all that a run needs to go on as if nothing had happened: parameters,
optimizer state, step, and, as metadata, the configuration. Orbax writes it in the
background, every worker its own shards. On a file system that all nodes share, the shards
go straight into the run's folder. For an object store, such as S3, each worker writes its
shards to a folder of its own, and the folders add up to a whole checkpoint when they are
uploaded. `ray.train.report` records a checkpoint once all workers are done with it; Ray
Train then deletes those that are no longer needed, and hands the latest to a run that
restarts.
"""

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import pyarrow.fs
import ray.train
from etils import epath

from trainkit.config import TrainingConfig


class Saved(NamedTuple):
    """A checkpoint that is being written, for `ray.train.report`."""

    checkpoint: ray.train.Checkpoint
    options: dict[str, Any]  # the other arguments of `report`


class Checkpointer:
    """Saves and restores the state of one run, on every worker together."""

    def __init__(self, config: TrainingConfig):
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
        self.config = config
        self.orbax = create_orbax(config)

    def save(self, state: Any, step: int) -> Saved:
        """Start to write `state`, a pytree of arrays; training goes on meanwhile."""
        config, name = self.config, new_name(self.config, step)
        stored, folder = in_storage(name), Path(tempfile.gettempdir())
        staging = folder / f"{config.run_name}-{jax.process_index()}" / name
        written = ray.train.Checkpoint(staging) if config.remote else stored
        settings = dataclasses.asdict(config)
        save_in_background(
            self.orbax, written.path, state, custom_metadata=settings, force=True
        )

        def finish(written, name):
            """Called by Ray Train in a thread: return when the checkpoint is whole."""
            self.orbax.wait_until_finished()
            if config.remote:
                pyarrow.fs.copy_files(
                    written.path,
                    stored.path,
                    destination_filesystem=stored.filesystem,
                    use_threads=False,  # as Ray does: apache/arrow#32372
                )
            return stored

        return Saved(
            written,
            {
                "checkpoint_dir_name": name,
                "checkpoint_upload_mode": ray.train.CheckpointUploadMode.ASYNC,
                "checkpoint_upload_fn": finish,
                "delete_local_checkpoint_after_upload": config.remote,
            },
        )

    def wait(self) -> None:
        """Wait until this worker's part of the last checkpoint is written."""
        self.orbax.wait_until_finished()

    def restore(self, recorded: ray.train.Checkpoint | None, target: Any) -> Any:
        """The state of the run's latest good checkpoint, or None if it has none.

        Args:
            recorded: what `ray.train.get_checkpoint()` says. A later one was not written
                by all workers: its steps come again.
            target: a pytree of the state's shapes, dtypes, and shardings.

        Raises:
            RuntimeError: the latest checkpoint is damaged or of another model. It is not
                tried again: the next start takes the one before it.
        """
        config = self.config
        newest = Path(recorded.path).name if recorded else ""
        names = [name for name in saved(config) if name <= newest]
        if names:
            with in_storage(names[0]).as_directory() as folder:
                try:
                    state = read(self.orbax, folder, target)
                except jax.errors.JaxRuntimeError:
                    raise  # another worker died, say; the checkpoint may be good
                except Exception as error:
                    raise RuntimeError(refuse(config, names[0], error)) from error
            print(f"Going on from {config.run_path / names[0]}")
            return state
        if recorded:
            raise RuntimeError(
                f"No checkpoint in {config.run_path} can be restored; the files "
                "step_*.refused say why. Delete these files to try again, or that folder "
                "to start over."
            )
        return None


def create_orbax(config: TrainingConfig) -> ocp.AsyncCheckpointer:
    """Writes and reads pytrees of sharded arrays, without blocking on a save."""
    together = ocp.options.MultiprocessingOptions(
        primary_host=None if config.remote else 0
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=not config.remote,  # one database, which would merge all workers' shards
        multiprocessing_options=together,
    )
    # In the background, the first folder that is ready would be the signal for all
    # workers to write, though theirs may not be there yet.
    folders = ocp.options.AsyncOptions(
        create_directories_asynchronously=not config.remote
    )
    return ocp.AsyncCheckpointer(
        handler, async_options=folders, multiprocessing_options=together
    )


def save_in_background(orbax, path: str, state: Any, **options) -> None:
    """Write `state` in threads that leave the processor to the training step.

    On Linux, a thread's scheduling policy is its own, and those it starts inherit it.
    """

    def save():
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        orbax.save(path, args=ocp.args.PyTreeSave(state), **options)

    with ThreadPoolExecutor(1) as executor:
        executor.submit(save).result()


def read(orbax, folder: str, target: Any, partial_restore: bool = False) -> Any:
    """The pytree in `folder`, with the shapes, dtypes, and shardings of `target`."""
    return orbax.restore(
        folder,
        args=ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=partial_restore,
        ),
    )


def load_params(
    checkpoint: ray.train.Checkpoint, shapes_of: Callable[[TrainingConfig], Any]
) -> tuple[TrainingConfig, Any]:
    """The configuration and the parameters in a checkpoint, on this process's device.

    Args:
        checkpoint: on this machine or in an object store, from where it is downloaded.
        shapes_of: gives the parameters' shapes and dtypes, a pytree, for a configuration.
    """
    orbax = ocp.PyTreeCheckpointer()
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with checkpoint.as_directory() as folder:
        config = TrainingConfig(**orbax.metadata(folder).custom_metadata)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
            shapes_of(config),
        )
        state = read(orbax, folder, {"params": target}, partial_restore=True)
    return config, state["params"]


def in_storage(name: str) -> ray.train.Checkpoint:
    """The checkpoint of that name in the run's folder, whether it exists or not.

    Ray has no stable call that says where a checkpoint will be: `get_storage` is marked
    DeveloperAPI, and what it returns may change with Ray's version, which is pinned.
    """
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(name)
    return ray.train.Checkpoint(path, storage.storage_filesystem)


def saved(config: TrainingConfig) -> list[str]:
    """The names of the run's good checkpoints, newest first."""
    names = {path.name for path in config.run_path.glob("step_*")}
    complete = {name for name in names if re.fullmatch(r"step_\d+(-again)*", name)}
    return sorted(
        (n for n in complete if refusal(config, n).name not in names), reverse=True
    )


def new_name(config: TrainingConfig, step: int) -> str:
    """A name for the checkpoint of `step` that no refused one has."""
    name = f"step_{step:08d}"
    while refusal(config, name).exists():  # Ray still has that one on record
        name += "-again"
    return name


def refusal(config: TrainingConfig, name: str) -> epath.Path:
    """The note that keeps a checkpoint from being used."""
    return config.run_path / f"{name}.refused"


def refuse(config: TrainingConfig, name: str, error: Exception) -> str:
    """Keep a checkpoint from being used again; return a message that says so."""
    note = refusal(config, name)
    message = f"Cannot restore {config.run_path / name}: {error}"
    note.write_text(message)
    return (
        f"{message}\nThe next start takes the checkpoint before it. To try this one "
        f"again, delete {note}."
    )

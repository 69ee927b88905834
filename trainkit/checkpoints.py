"""Save and restore a run's state, and refuse what is damaged.

A checkpoint holds all that a run needs to go on as if nothing had happened: parameters,
optimizer state, step, and, as metadata, the configuration. Orbax writes it in the
background, every worker its own shards. On a file system that all nodes share, the shards
go straight into the run's folder. For an object store, such as S3, each worker writes its
shards to a folder of its own, and the folders add up to a whole checkpoint when they are
uploaded. `ray.train.report` records a checkpoint once all workers are done with it, and
Ray Train then deletes those that are no longer needed. A run that restarts takes the
newest whole checkpoint on storage, whatever Ray has on record (`trainkit.records`).
"""

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import pyarrow.fs
import ray.train
import ray.train.collective

from trainkit import records, storage
from trainkit.config import TrainingConfig


class Saved(NamedTuple):
    """A checkpoint that is being written, for `ray.train.report`."""

    checkpoint: ray.train.Checkpoint | None  # None: Ray has that name on record
    options: dict[str, Any]  # the other arguments of `report`


class Checkpointer:
    """Saves and restores the state of one run, on every worker together."""

    def __init__(self, config: TrainingConfig):
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
        self.config, self.orbax = config, create_orbax(config)
        self.thread, self.saving = ThreadPoolExecutor(1), None
        self.recorded = ""  # the latest that Ray had on record when the run went on
        if config.remote:
            # What a worker that was killed left, of whatever rank.
            shutil.rmtree(staging(config), ignore_errors=True)

    def save(self, state: Any, step: int) -> Saved:
        """Start to write `state`, a pytree of arrays; training goes on meanwhile.

        A checkpoint of the same step, which was damaged, is replaced.

        Raises:
            Exception: the save before this one has failed.
        """
        self.wait()
        config, name = self.config, f"step_{step:08d}"
        stored = records.in_storage(name)
        known = name <= self.recorded and name in records.on_record()
        written = Path(stored.path)
        if config.remote:
            written = staging(config) / str(jax.process_index()) / name
            if jax.process_index() == 0:  # before any worker writes: `orbax.save` waits
                delete = stored.filesystem.delete_dir_contents
                storage.patiently(delete, stored.path, missing_dir_ok=True)
        settings = dataclasses.asdict(config)
        save_in_background(
            self.orbax, written, state, custom_metadata=settings, force=True
        )
        self.saving = saving = self.thread.submit(self.finish, written, stored)
        return Saved(
            None if known else stored,
            {
                "checkpoint_dir_name": name,
                "checkpoint_upload_mode": ray.train.CheckpointUploadMode.ASYNC,
                "checkpoint_upload_fn": lambda *_: saving.result(),
                "delete_local_checkpoint_after_upload": False,
            },
        )

    def finish(
        self, written: Path, stored: ray.train.Checkpoint
    ) -> ray.train.Checkpoint:
        """Return when this worker's part of a checkpoint is on storage."""
        self.orbax.wait_until_finished()
        config, name = self.config, written.name
        if config.remote:
            storage.patiently(upload, written, stored)
            part = jax.process_index(), jax.process_count()
            storage.patiently(records.mark(config, name, *part).write_text, "")
            shutil.rmtree(written)
        if jax.process_index() == 0:
            records.refusal(config, name).unlink(missing_ok=True)
        return stored

    def wait(self) -> None:
        """Wait until this worker's part of the last checkpoint is on storage.

        Raises:
            Exception: it could not be written.
        """
        if self.saving:
            self.saving.result()

    def restore(self, recorded: ray.train.Checkpoint | None, target: Any) -> Any:
        """The state of the run's newest whole checkpoint, or None if it has none.

        Args:
            recorded: what `ray.train.get_checkpoint()` says. Whole checkpoints that are
                newer are reported to Ray.
            target: a pytree of the state's shapes, dtypes, and shardings.

        Raises:
            RuntimeError: the newest checkpoint is damaged. It is not tried again: the
                next start takes the one before it.
            ValueError: it is of another model.
            FileNotFoundError: a part of it can't be seen.
            Exception: it can't be read now, and may be good.
        """
        config = self.config
        self.recorded = latest = Path(recorded.path).name if recorded else ""
        names = storage.patiently(records.saved, config, latest)[:20]
        # What the first worker sees counts, in case that others don't see it yet.
        names = ray.train.collective.broadcast_from_rank_zero(names)
        if not names:
            records.refuse_to_start_over(config)
            return None
        try:
            unless = (jax.errors.JaxRuntimeError, WrongModel)  # or another worker died
            state = storage.patiently(self.load, names[0], target, unless=unless)
        except Exception as error:
            if not isinstance(error, unless) and storage.is_missing(error):
                raise FileNotFoundError(
                    f"{config.run_path / names[0]} lacks files that belong to it, or they "
                    "can't be seen yet, and nothing is refused. If they don't come back, "
                    "delete that folder: the run then goes on from the checkpoint before."
                ) from error
            if isinstance(error, unless) or not storage.is_damage(error):
                raise
            raise RuntimeError(records.refuse(config, names[0], error)) from error
        print(f"Going on from {config.run_path / names[0]}")
        records.report_unrecorded(config, [name for name in names if name > latest])
        return state

    def load(self, name: str, target: Any) -> Any:
        """The state in a checkpoint, which is downloaded from an object store."""
        with records.in_storage(name).as_directory() as folder:
            found = self.orbax.metadata(folder).item_metadata
            check_shapes(
                found.tree if found else {}, target, self.config.run_path / name
            )
            return read(self.orbax, folder, target)


class WrongModel(ValueError):
    """A checkpoint holds other arrays than the model of this run."""


def check_shapes(tree: Any, target: Any, place: Any) -> None:
    """Compare the arrays that a checkpoint lists with those of `target`, by name and shape.

    Raises:
        WrongModel: with the first few that differ.
    """
    found, expected = array_shapes(tree), array_shapes(target)
    differing = [
        f"{name}: found {found.get(name)}, expected {expected.get(name)}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if found and differing:  # nothing at all isn't another model but damage
        raise WrongModel(
            f"{place} is a checkpoint of another model: {'; '.join(differing[:3])}"
            f"{' ...' if differing[3:] else ''}. Choose another run_name."
        )


def array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a pytree's arrays, by name, such as params.wte.embedding.value."""
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }


def staging(config: TrainingConfig) -> Path:
    """Where a node's workers write a checkpoint before it is uploaded, user by user.

    Runs of one name may belong to different object stores.
    """
    store = f"{zlib.crc32(config.storage_path.encode()):08x}"
    user = f"trainkit-{os.getuid()}"
    return Path(tempfile.gettempdir(), user, store, config.run_name)


def upload(folder: Path, checkpoint: ray.train.Checkpoint) -> None:
    """Copy a folder's files to where `checkpoint` is, in an object store."""
    pyarrow.fs.copy_files(
        str(folder),
        checkpoint.path,
        destination_filesystem=checkpoint.filesystem,
        chunk_size=2**26,  # bytes; as Ray does
        use_threads=False,  # as Ray does: apache/arrow#32372
    )


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


def save_in_background(orbax, path: str | Path, state: Any, **options) -> None:
    """Write `state` in threads that leave the processor to the training step.

    On Linux, a thread's scheduling policy is its own, and those it starts inherit it. An
    accelerator needs no processor for its steps, and where tasks keep all processors
    busy, threads that only get what is left would hold up the loop.
    """

    def save():
        if jax.default_backend() == "cpu":
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

    Raises:
        ValueError: it is no checkpoint of this tutorial's.
    """
    if checkpoint is None:
        raise ValueError("checkpoint: found None, as of a run that has saved none yet")
    orbax = ocp.PyTreeCheckpointer()
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with checkpoint.as_directory() as folder:
        settings = orbax.metadata(folder).custom_metadata
        if not settings:
            raise ValueError(
                f"checkpoint: {checkpoint.path} holds no configuration; expected a folder "
                "that a run has saved, such as step_00001000"
            )
        fields = {field.name for field in dataclasses.fields(TrainingConfig)}
        known = {k: v for k, v in settings.items() if k in fields}  # of older versions
        config = TrainingConfig(**known)
        if config.attention != "xla" and config.platform != jax.default_backend():
            config = dataclasses.replace(
                config, attention="xla"
            )  # the one that runs here
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
            shapes_of(config),
        )
        state = read(orbax, folder, {"params": target}, partial_restore=True)
    return config, state["params"]

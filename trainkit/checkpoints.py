"""One launch of a run at a time, checkpoints of its recipe, their model, and buckets.

The notebook's `save` and `restore` rely on Orbax, which renames a checkpoint that is whole. In
object stores nothing can be renamed: there, those of this module take their place.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import ray.train
import ray.train.collective
from etils import epath
from filelock import FileLock, Timeout
from flax import nnx
from orbax.checkpoint import v1 as orbax

from trainkit.config import TrainingConfig

_PATIENCE = 150  # seconds; NFSv4 frees the lock of a node that died after about 90
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP
_lock: FileLock | None = None  # held until this process ends, however it does


def lock_run(config: TrainingConfig) -> None:
    """Keep other launches out of the run's folder, on the first worker, until it ends.

    Raises:
        RuntimeError: workers of another launch have the run.
    """
    global _lock
    if "://" in config.storage_path or ray.train.get_context().get_world_rank():
        return  # an object store has no locks
    config.run_path.mkdir(parents=True, exist_ok=True)
    file = config.run_path / "lock"
    holder = config.run_path / "locked-by.txt"
    _lock = FileLock(file, fallback_to_soft=False)
    try:
        with contextlib.suppress(Timeout):
            _lock.acquire(timeout=1)
        if not _lock.is_locked:
            print(f"{config.run_path} is locked: waiting for {_PATIENCE} s at most")
            _lock.acquire(timeout=_PATIENCE)
    except Timeout:
        raise RuntimeError(
            f"run_name: {config.run_path} is in use by {holder.read_text()}. Wait for it, end "
            f"it, or choose another run_name. If that worker doesn't live, delete {file}."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(f"{config.run_path} has no locks: don't launch this run twice ({error})")
    place = f"process {os.getpid()} on {socket.gethostname()}"
    holder.write_text(f"{place}, since {time.ctime()}")


@contextlib.contextmanager
def reading(config: TrainingConfig, path: epath.PathLike) -> Iterator[None]:
    """While a checkpoint is read: refuse another recipe's, and add to errors what to do.

    Raises:
        ValueError: its recipe is another one: key by key, what it was, and what it is.
    """
    try:
        saved = TrainingConfig(**orbax.metadata(path).custom_metadata).recipe
        differing = [
            f"{key} was {saved[key]!r}, is {value!r}"
            for key, value in config.recipe.items()
            if value != saved[key]
        ]
        if differing:
            raise ValueError(f"run_name: another recipe: {'; '.join(differing)}")
        yield
    except Exception as error:
        error.add_note(
            f"On {socket.gethostname()}, in {path}. For another recipe, choose another "
            "run_name. If the checkpoint is damaged, delete its folder, and Ray's record "
            "beside it, checkpoint_manager_snapshot.json, to continue from the one before."
        )
        raise


def load_model(create_model: Callable, checkpoint: ray.train.Checkpoint) -> nnx.Module:
    """The model in a checkpoint, which may be in a bucket, on this process's first device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with checkpoint.as_directory() as folder:
        values = orbax.metadata(folder).custom_metadata
        # These run anywhere, for texts of any length.
        values |= {"attention": "xla", "scan_layers": False}
        model = jax.eval_shape(partial(create_model, TrainingConfig(**values)))
        abstract = {
            f"model.{name}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
            for name, x in _named(model).items()
        }
        context = orbax.Context()
        context.pytree.loading.partial_load = True  # without the optimizer's state
        with context:
            arrays = orbax.load(folder, abstract)
    return jax.tree.unflatten(jax.tree.structure(model), [arrays[n] for n in abstract])


def save(config: TrainingConfig, state: tuple, step: int, metrics: dict) -> None:
    """As the notebook's, for a bucket: each worker writes to its own disk, and Ray uploads."""
    context = orbax.Context()
    context.multiprocessing.primary_host = None  # each worker makes its own folders
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.use_ocdbt = False  # whose files have one name on all workers
    context.array.saving.use_replica_parallel = False
    context.array.saving.use_zarr3 = False  # whose arrays are more files
    # Of each attempt; Ray takes the first worker's. What killed workers uploaded stays.
    name = f"step_{step:08d}_{uuid.uuid4().hex[:8]}"
    folder = _staging(config) / name
    values = dataclasses.asdict(config)
    with context, orbax.training.Checkpointer(folder) as checkpointer:
        checkpointer.save(step, _named(state), force=True, custom_metadata=values)
    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint(folder / str(step)),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def restore(
    config: TrainingConfig, abstract: tuple, restore_from: str | None = None
) -> tuple | None:
    """As the notebook's, for a bucket, where Ray's record tells which checkpoint is whole.

    A run that has none there begins with the one at `restore_from`, of whatever recipe.

    Raises:
        RuntimeError: the run has checkpoints, and Ray has none of them on record.
    """
    shutil.rmtree(_staging(config), ignore_errors=True)  # of a worker that was killed
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None and restore_from is None:
        found = sorted(path.name for path in config.run_path.glob("step_*"))
        if len({name.rpartition("_")[0] for name in found}) > 1:
            raise RuntimeError(
                f"{config.run_path} has {', '.join(found)}, and Ray has no record of them. "
                "Pass restore_from=PATH to `restore`, or choose another run_name."
            )
        return None  # a first checkpoint at most, which may have been cut off
    with (checkpoint or ray.train.Checkpoint(restore_from)).as_directory() as folder:
        with reading(config, folder) if checkpoint else contextlib.nullcontext():
            arrays = orbax.load(folder, _named(abstract))
    values = [arrays[name] for name in _named(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), values)


def _staging(config: TrainingConfig) -> Path:
    """Where this worker writes a checkpoint before it is uploaded."""
    rank = ray.train.get_context().get_world_rank()
    return Path(tempfile.gettempdir(), f"{config.run_name}-{os.getuid()}", str(rank))


def _named(tree: tuple) -> dict:
    """As the notebook's `named`. Slashes would make folders, of which each is a request."""
    arrays = jax.tree.leaves_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path).removesuffix(".value"): x for path, x in arrays}

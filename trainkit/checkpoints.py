"""One launch of a run at a time, checkpoints of its recipe, their model, and buckets.

The notebook's `save` and `restore` rely on Orbax, which renames a checkpoint that is whole. In
buckets nothing can be renamed: there, those of this module take their place.
"""

import contextlib
import errno
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
import ray.train
from etils import epath
from filelock import FileLock, Timeout
from flax import nnx
from orbax.checkpoint import v1 as orbax
from pyarrow.fs import FileSystem
from ray.train import Checkpoint, collective

from trainkit import layers
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
def reading(
    config: TrainingConfig, path: epath.PathLike, packed: Checkpoint | None = None
) -> Iterator[epath.PathLike]:
    """Gives a checkpoint's folder, also of a `packed` one, and adds to errors what to do.

    Raises:
        ValueError: its recipe is another one: key by key, what it was, and what it is.
    """
    try:
        with _unpacked(packed) if packed else contextlib.nullcontext(path) as folder:
            saved = TrainingConfig(**orbax.metadata(folder).custom_metadata).recipe
            differing = [
                f"{key} was {saved[key]!r}, is {value!r}"
                for key, value in config.recipe.items()
                if value != saved[key]
            ]
            if differing:
                raise ValueError(f"run_name: another recipe: {'; '.join(differing)}")
            yield folder
    except Exception as error:
        error.add_note(
            f"On {socket.gethostname()}, in {path}. For another recipe, choose another "
            "run_name. If the checkpoint is damaged, delete its folder, and Ray's record "
            "beside it, checkpoint_manager_snapshot.json, to continue from the one before."
        )
        raise


def load_model(create_model: Callable, checkpoint: Checkpoint) -> nnx.Module:
    """The model in a checkpoint, which may be in a bucket, on this process's first device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with _unpacked(checkpoint) as folder:
        values = orbax.metadata(folder).custom_metadata
        # These run anywhere, for texts of any length.
        values |= {"attention": "xla", "scan_layers": False}
        model = jax.eval_shape(partial(create_model, TrainingConfig(**values)))
        abstract = {
            f"model.{name}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
            for name, x in layers.named(model).items()
        }
        context = orbax.Context()
        context.pytree.loading.partial_load = True  # without the optimizer's state
        with context:
            arrays = orbax.load(folder, abstract)
    return jax.tree.unflatten(jax.tree.structure(model), [arrays[n] for n in abstract])


def save(config: TrainingConfig, state: tuple, step: int, metrics: dict):
    """As the notebook's `save`; Ray uploads one file of each worker, not hundreds."""
    context = orbax.Context()
    context.multiprocessing.primary_host = None  # each worker makes its own folders
    context.asynchronous.create_directories_asynchronously = False
    context.array.saving.use_ocdbt = False  # whose files have one name on all workers
    context.array.saving.use_replica_parallel = False
    workers = ray.train.get_context().get_world_size()
    # Of each attempt; Ray takes the first worker's. What killed workers uploaded stays.
    name = f"step_{step:08d}_{workers}_{uuid.uuid4().hex[:8]}"
    folder = _staging(config) / name
    with context, orbax.training.Checkpointer(folder) as checkpointer:
        checkpointer.save(step, layers.named(state), custom_metadata=asdict(config))
    rank = folder.parent.name
    shutil.make_archive(f"{folder}/packed/{rank}", "tar", folder / str(step))
    shutil.rmtree(folder / str(step))
    ray.train.report(
        metrics,
        checkpoint=Checkpoint(folder / "packed"),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def restore(config: TrainingConfig, abstract: tuple) -> tuple | None:
    """As the notebook's `restore`; a checkpoint with the files of all workers is whole."""
    shutil.rmtree(_staging(config), ignore_errors=True)  # of a worker that was killed

    def is_whole(path: epath.Path) -> bool:
        return len([*path.glob("*.tar")]) == int(path.name.split("_")[2])

    newest = max(filter(is_whole, config.run_path.glob("step_*")), default=None)
    files, root = FileSystem.from_uri(config.storage_path)
    place = newest and Checkpoint(f"{root}/{config.run_name}/{newest.name}", files)
    found = collective.broadcast_from_rank_zero(place)
    if found is None:
        return None
    with reading(config, found.path, found) as folder:
        arrays = orbax.load(folder, layers.named(abstract))
    values = [arrays[name] for name in layers.named(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), values)


@contextlib.contextmanager
def _unpacked(checkpoint: Checkpoint) -> Iterator[str]:
    """A folder with a checkpoint's files, also of one that `save` packed."""
    with checkpoint.as_directory() as folder, tempfile.TemporaryDirectory() as unpacked:
        packed = [*Path(folder).glob("*.tar")]
        for archive in packed:
            shutil.unpack_archive(archive, unpacked)
        yield unpacked if packed else folder


def _staging(config: TrainingConfig) -> Path:
    """Where this worker writes a checkpoint before it is uploaded."""
    run = config.run_path.as_posix().split("://")[-1].lstrip("/")
    rank = ray.train.get_context().get_world_rank()
    return Path(tempfile.gettempdir(), f"staging-{os.getuid()}", run, str(rank))

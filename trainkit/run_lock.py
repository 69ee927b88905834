"""Keeps a run from a second launch, and from any once it has diverged."""

import contextlib
import errno
import os
import socket
import time

import ray.train
from etils import epath
from filelock import FileLock, Timeout

from trainkit import paths
from trainkit.config import TrainingConfig

PATIENCE = 150  # seconds; NFSv4 frees the lock of a node that died after about 90
_HOLDER = "locked-by.txt"
_DIVERGED = "diverged.txt"  # the notebook's `fit` looks for it, too
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP
_lock: FileLock | None = None  # held until this process ends, however it does


def wait_for_workers(config: TrainingConfig) -> None:
    """Wait until no worker of an earlier launch has the run: they may outlive their driver.

    Raises:
        FloatingPointError: the run has diverged, and nobody said to go on.
        RuntimeError: one has it for longer than the file system keeps a dead node's lock.
    """
    if not paths.is_object_store(config.run_path) and config.run_path.exists():
        _acquire(config).release()
    if (note := config.run_path / _DIVERGED).exists():
        raise FloatingPointError(note.read_text())


def lock(config: TrainingConfig) -> None:
    """Keep workers of other launches out of the run's folder, on the first worker.

    Raises:
        RuntimeError: another one has the run.
    """
    global _lock
    folder = config.run_path
    if paths.is_object_store(folder) or ray.train.get_context().get_world_rank():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _lock = None  # of an earlier run of this process
    _lock = _acquire(config)
    place = f"process {os.getpid()} on {socket.gethostname()}"
    (folder / _HOLDER).write_text(f"{place}, since {time.ctime()}")


def note_divergence(config: TrainingConfig, found: str) -> None:
    """Leave a note in the run's folder that no launch should go on."""
    path = config.run_path / _DIVERGED
    path.write_text(
        f"{config.run_name} diverged at {found}. Start another run, with a lower "
        "learning_rate, or a branch of a checkpoint whose val_loss is good (branch_from). To "
        f"go on with this one, delete {path}"
    )


def _acquire(config: TrainingConfig) -> FileLock:
    """The workers' lock, which isn't held where the file system has none."""
    folder = config.run_path
    lock = FileLock(folder / "lock", fallback_to_soft=False)
    try:
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=1)
        if not lock.is_locked:
            print(f"{folder} is locked: waiting for {PATIENCE} s at most")
            lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise RuntimeError(
            f"run_name: {folder} is in use by {_describe_holder(folder)}. Wait for it, end it, "
            "or choose another run_name. If its node died, try again in some minutes. Only if "
            f"you know that the node is gone, and this stays, delete {folder}/lock."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(f"{folder} has no locks: don't launch this run twice ({error})")
    return lock


def _describe_holder(folder: epath.Path) -> str:
    """Who has the run's lock, and how long ago it wrote its last line."""
    holder, log = folder / _HOLDER, folder / "metrics.jsonl"
    said = holder.read_text() if holder.exists() else "a launch that just starts"
    if log.exists():
        said += f", whose last line is {time.time() - os.stat(log).st_mtime:,.0f} s old"
    return said

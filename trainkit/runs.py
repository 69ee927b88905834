"""What keeps a run one: its name, its folder for one launch at a time, its recipe and tokens.

The notebook's `newest`, `save`, and `restore` know nothing of recipes and launches. A launch
calls `check_folder` before workers start, `lock` on the first worker, and `check_recipe`
between `newest` and `restore`.
"""

import contextlib
import dataclasses
import errno
import os
import re
import socket
import time
from collections.abc import Mapping

import ray.train
from etils import epath
from filelock import FileLock, Timeout
from orbax.checkpoint import v1 as orbax

from trainkit import buckets
from trainkit.config import RecipeConfig, TrainingConfig

_PATIENCE = 150  # seconds; NFSv4 frees the lock of a node that died after about 90
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP
_lock: FileLock | None = None  # held until this process ends, however it does


def check_folder(config: TrainingConfig) -> None:
    """Refuse a launch that couldn't continue its run, before anything is written.

    Raises:
        ValueError: the run has no name, its folder won't stay, or its checkpoints have the form
            of another storage.
    """
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
    form = r"step_\d{8}" if config.in_bucket else buckets.NAME
    names = [path.name for path in config.run_path.glob("step_*")]
    if other := [name for name in names if re.fullmatch(form, name)]:
        here, there = ("a bucket", "a folder")[:: 1 if config.in_bucket else -1]
        raise ValueError(
            f"storage_path: {config.run_path} has {other[0]}, a checkpoint that was written "
            f"to {there} and copied to {here}, where it can't be read. Continue the run where "
            "it was, or choose another run_name."
        )


def check_recipe(path: epath.PathLike, settings: Mapping) -> None:
    """Refuse to continue with a checkpoint of another recipe or of other tokens.

    A key that the checkpoint lacks had its default then; one that no longer exists is ignored.

    Args:
        path: the checkpoint's folder.
        settings: those of `launch.settings`, as the checkpoint's own are.

    Raises:
        ValueError: key by key, what it was, and what it is.
    """
    saved = orbax.metadata(path).custom_metadata
    was = {field.name: field.default for field in dataclasses.fields(RecipeConfig)}
    was |= {key: value for key, value in saved["config"].items() if key in was}
    now = TrainingConfig(**settings["config"]).recipe
    for recipe, about in ((was, saved), (now, settings)):
        recipe |= {f"{split}.bin": x for split, x in (about["tokens"] or {}).items()}
    differing = [
        f"{key} was {was.get(key)!r}, is {now.get(key)!r}"
        for key in was | now
        if was.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(
            f"run_name: {path} is from another recipe or other tokens: "
            f"{'; '.join(differing)}. Choose another run_name, or undo the change."
        )


def lock(config: TrainingConfig) -> None:
    """Keep other launches out of the run's folder, on the first worker, until it ends.

    Raises:
        RuntimeError: workers of another launch have the run.
    """
    global _lock
    if config.in_bucket or ray.train.get_context().get_world_rank():
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
        other = holder.read_text() if holder.exists() else "a launch that just starts"
        raise RuntimeError(
            f"run_name: {config.run_path} is in use by {other}. Wait for it, end "
            "it, or choose another run_name. If its node died, try again in some minutes."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(f"{config.run_path} has no locks: don't launch this run twice ({error})")
    place = f"process {os.getpid()} on {socket.gethostname()}"
    holder.write_text(f"{place}, since {time.ctime()}")

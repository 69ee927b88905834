"""What keeps a run one: its name, its folder for one launch at a time, its recipe and tokens.

The notebook's `newest`, `save`, and `restore` know nothing of recipes and launches. A launch
calls `check_folder`, `wait_for_workers`, and `compare` before workers start, and `lock` on the
first worker.
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

from trainkit import checkpoints, paths, s3
from trainkit.config import SHAPE, RecipeConfig, TrainingConfig

PATIENCE = 150  # seconds; NFSv4 frees the lock of a node that died after about 90
_HOLDER = "locked-by.txt"
_DIVERGED = "diverged.txt"  # the notebook's `fit` looks for it, too
_NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP
_lock: FileLock | None = None  # held until this process ends, however it does


def check_folder(config: TrainingConfig) -> None:
    """Refuse a launch that couldn't continue its run, before anything is written.

    Raises:
        FloatingPointError: the run has diverged, and nobody said to go on.
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
    if config.storage_path.startswith("gs://") and " " in str(config.run_path):
        raise ValueError(
            f"storage_path, run_name: {config.run_path} has a space, with which Ray can't open "
            "gs://. Choose names without"
        )
    is_s3 = config.storage_path.startswith("s3://")
    form = r"step_\d{8}(_[0-9a-f]{8})?" if is_s3 else s3.NAME
    names = [path.name for path in config.run_path.glob("step_*")]
    if other := [name for name in names if re.fullmatch(form, name)]:
        raise ValueError(
            f"storage_path: {config.run_path} has {other[0]}, a checkpoint in the form of "
            f"{'other storage' if is_s3 else 's3://'}, which can't be read here. Continue the "
            "run where it was, or choose another run_name."
        )
    _refuse_diverged(config)


def _refuse_diverged(config: TrainingConfig) -> None:
    if (note := config.run_path / _DIVERGED).exists():
        raise FloatingPointError(note.read_text())


def note_divergence(config: TrainingConfig, found: str) -> None:
    """Leave a note in the run's folder that no launch should go on."""
    path = config.run_path / _DIVERGED
    path.write_text(
        f"{config.run_name} diverged at {found}. What was saved before is good. Lower "
        f"learning_rate in a new run. To go on with this one, delete {path}"
    )


def compare(config: TrainingConfig, tokens: Mapping) -> dict | None:
    """Refuse to go on with a checkpoint of another recipe or of other tokens.

    A key that the checkpoint lacks had its default then; one that no longer exists is ignored.
    A branch may have another recipe, but for shapes, the batch, and where weights came from.

    Args:
        tokens: `token_files.digest` of the configuration's.

    Returns:
        What the run is a branch of, if it is one: `{"from": folder, "differs": [...]}`, which
        its checkpoints keep.

    Raises:
        ValueError: key by key, what it was, and what it is. Or `branch_from` names no
            checkpoint, or isn't where the run's own checkpoints began.
    """
    if config.storage_path.startswith("s3://"):
        own = s3.about(config.run_path)
    else:
        path = checkpoints.newest(config.run_path)
        own = checkpoints.about("run_name", str(path)) if path else None
    if own:
        branch = own.get("branch")
        began = branch and branch["from"]
        if config.branch_from not in (None, began):
            raise ValueError(
                f"branch_from: {config.run_path} has checkpoints of its own, which began with "
                f"{began}, and not with {config.branch_from}. Choose another run_name"
            )
        if differing := _differences(own, config, tokens):
            raise ValueError(
                f"run_name: {config.run_path} is from another recipe or other tokens: "
                f"{'; '.join(differing.values())}. Choose another run_name, or undo the change."
            )
        return branch
    if not config.branch_from:
        return None
    saved = checkpoints.about("branch_from", config.branch_from)
    differing = _differences(saved, config, tokens)
    fixed = [*SHAPE, "batch_size", "init_from", *(f"{x}.bin" for x in tokens)]
    if refused := [differing[key] for key in fixed if key in differing]:
        raise ValueError(
            f"branch_from: a branch of {config.branch_from} can't differ in these: "
            f"{'; '.join(refused)}. Undo the change, or start with its weights, by init_from"
        )
    step = re.match(r"step_(\d{8})", os.path.basename(config.branch_from))
    if step and int(step[1]) >= config.max_steps:
        raise ValueError(
            f"branch_from: {config.branch_from} is of step {int(step[1]):,}: expected less "
            f"than max_steps, {config.max_steps:,}"
        )
    return {"from": config.branch_from, "differs": [*differing.values()]}


def _differences(saved: Mapping, config: TrainingConfig, tokens: Mapping) -> dict:
    """By key, in words, how a recipe and its tokens differ from those of a checkpoint."""
    was = {field.name: field.default for field in dataclasses.fields(RecipeConfig)}
    was |= {key: value for key, value in saved["config"].items() if key in was}
    was |= {f"{split}.bin": x for split, x in (saved["tokens"] or {}).items()}
    now = config.recipe | {f"{split}.bin": x for split, x in tokens.items()}
    return {
        key: f"{key} was {was.get(key)!r}, is {now.get(key)!r}"
        for key in was | now
        if was.get(key) != now.get(key)
    }


def wait_for_workers(config: TrainingConfig) -> None:
    """Wait until no worker of an earlier launch has the run: they may outlive their driver.

    Raises:
        FloatingPointError: the run has diverged, and nobody said to go on.
        RuntimeError: one has it for longer than the file system keeps a dead node's lock.
    """
    if not paths.is_object_store(config.run_path) and config.run_path.exists():
        _acquire(config).release()
    _refuse_diverged(config)  # they may have left the note just now


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

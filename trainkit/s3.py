"""`newest` and `save` for `s3://`, where Orbax can't write, in place of the notebook's.

A checkpoint is one tar file of each worker, and whole if it has the files of all workers, whose
number is in its name.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import ray.train
from etils import epath
from orbax.checkpoint import v1 as orbax
from pyarrow import fs
from ray.train import Checkpoint, collective

NAME = re.compile(r"step_\d{8}_(\d+)_[0-9a-f]{8}")  # step, workers, save


def about(folder: epath.PathLike) -> dict | None:
    """What was saved beside the arrays of the run's newest whole checkpoint, if there is one.

    It is in a file that comes first in a tar file.
    """
    files, root = _open(folder)
    name, _ = _find(files, root)
    if not name:
        return None
    with (
        files.open_input_stream(f"{root}/{name}/0.tar") as stream,
        tarfile.open(fileobj=stream, mode="r|") as packed,
    ):
        for member in packed:
            if Path(member.name).name == "_CHECKPOINT_METADATA":
                file = packed.extractfile(member)
                return json.load(file)["custom_metadata"]  # type: ignore[arg-type]
    raise ValueError(f"{folder}/{name} has no _CHECKPOINT_METADATA")


def _find(files: fs.FileSystem, root: str) -> tuple[str, set[str]]:
    """The name of a run's newest whole checkpoint, or "", and the names of unfinished ones."""
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    found = files.get_file_info(selector)
    tars = Counter(Path(x.path).parts[-2] for x in found if x.extension == "tar")
    named = [match for match in map(NAME.fullmatch, tars) if match]
    whole = {match[0] for match in named if tars[match[0]] == int(match[1])}
    return max(whole, default=""), {match[0] for match in named} - whole


def newest(folder: epath.PathLike) -> Path | None:
    """A copy of the run's newest whole checkpoint, on this node; None if there is none.

    The first worker searches, and deletes parts of those before that never became whole. One
    worker of each node downloads. Other checkpoints' copies are deleted.
    """
    context = ray.train.get_context()
    shutil.rmtree(_staging(folder), ignore_errors=True)  # of a worker that was killed
    files, root = _open(folder)
    name = ""
    if context.get_world_rank() == 0:
        name, others = _find(files, root)
        for other in others:
            if other[:13] < name[:13]:  # an earlier step's
                files.delete_dir(f"{root}/{other}")
    name = collective.broadcast_from_rank_zero(name)
    if not name:
        return None
    copy = _copy(folder)
    if context.get_local_rank() == 0:
        shutil.rmtree(copy, ignore_errors=True)
        unpack(files, f"{root}/{name}", copy / name)
    collective.barrier()
    return copy / name


def save(
    folder: epath.PathLike, arrays: dict, step: int, metrics: dict | None, about=None
):
    """Start to save the arrays, on all workers; Ray records them once they are uploaded.

    Without metrics, Ray doesn't record the checkpoint, and so never deletes it.
    """
    context = ray.train.get_context()
    if context.get_local_rank() == 0:
        shutil.rmtree(_copy(folder), ignore_errors=True)  # restored, and of no more use
    options = orbax.Context()
    options.multiprocessing.primary_host = None  # each worker makes its own folders
    options.asynchronous.create_directories_asynchronously = False
    options.array.saving.use_ocdbt = False  # whose files have one name on all workers
    options.array.saving.use_replica_parallel = False
    # Of each save; Ray takes the first worker's.
    name = f"step_{step:08d}_{context.get_world_size()}_{secrets.token_hex(4)}"
    local = _staging(folder) / name
    with options:
        checkpointer = orbax.training.Checkpointer(local)
        saving = checkpointer.save_async(step, arrays, custom_metadata=about)
    packed = f"{context.get_world_rank()}.tar"

    uploaded: Future[None] = Future()

    def pack_and_upload(checkpoint: Checkpoint | None, name: str) -> Checkpoint:
        """Ray calls this up to three times, if the connection to the bucket fails."""
        if not (local / packed).exists():
            saving.result()
            checkpointer.close()
            with tarfile.open(local / f"{packed}.new", "w") as tar:
                tar.add(local / str(step), ".")
            (local / f"{packed}.new").rename(local / packed)
            shutil.rmtree(local / str(step))
        files, root = _open(folder)
        there = {"destination_filesystem": files}
        fs.copy_files(str(local / packed), f"{root}/{name}/{packed}", **there)
        shutil.rmtree(local)
        uploaded.set_result(None)
        return Checkpoint(f"{root}/{name}", files)

    def try_three_times(name: str) -> Checkpoint:
        for _ in range(2):
            with contextlib.suppress(OSError):
                return pack_and_upload(None, name)
        return pack_and_upload(None, name)

    if metrics is None:
        name = collective.broadcast_from_rank_zero(name)
        return ThreadPoolExecutor(1).submit(try_three_times, name)
    ray.train.report(
        metrics,
        checkpoint=Checkpoint(local),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=pack_and_upload,
        delete_local_checkpoint_after_upload=False,
    )
    return uploaded  # so that, before the next one, the loop waits for it


def unpack(files: fs.FileSystem, path: str, folder: Path) -> None:
    """Write what is in the tar files of a checkpoint to a folder.

    With Python 3.11.4 or later, an entry that would be outside of the folder is refused.
    """
    for each in files.get_file_info(fs.FileSelector(path)):
        with (
            files.open_input_stream(each.path) as stream,
            tarfile.open(fileobj=stream, mode="r|") as packed,
        ):
            packed.extraction_filter = getattr(tarfile, "data_filter", None)
            packed.extractall(folder)


def _open(folder: epath.PathLike) -> tuple[fs.FileSystem, str]:
    """The file system of a run's folder, and its path there, whose name may have spaces."""
    files, root = fs.FileSystem.from_uri(os.fspath(epath.Path(folder).parent))
    return files, f"{root}/{epath.Path(folder).name}"


def _place(folder: epath.PathLike) -> Path:
    """This user's folder on this node for a run's checkpoints."""
    run = os.fspath(folder).split("://")[-1].lstrip("/")
    return Path(tempfile.gettempdir(), f"checkpoints-{os.getuid()}", run)


def _copy(folder: epath.PathLike) -> Path:
    """What this node's workers restore."""
    return _place(folder) / "newest"


def _staging(folder: epath.PathLike) -> Path:
    """Where this worker writes a checkpoint before it is uploaded."""
    return _place(folder) / str(ray.train.get_context().get_world_rank())

"""Save and restore a run's state; which checkpoints are whole, and which are refused.

A checkpoint holds all that a run needs to go on as if nothing had happened: parameters,
optimizer state, step, and, as metadata, the configuration. Orbax writes it in the
background, every worker its own shards. On a file system that all nodes share, the shards
go straight into the run's folder, which gets its name once all are there. For an object
store, such as S3, where nothing can be renamed, each worker writes its shards to a folder of
its own, uploads them, and adds a mark. `ray.train.report` records a checkpoint once all
workers are done with it, and Ray Train then deletes those that are no longer needed.

A run that restarts takes the newest whole checkpoint on storage. Ray's own record of them
lasts for a launch: a full disk can empty it, and Ray refuses one that names what isn't there.
So each launch deletes it, and tells Ray anew which checkpoints there are.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import jax
import orbax.checkpoint as ocp
import pyarrow.fs
import ray.train
import ray.train.collective
from etils import epath

from trainkit import lock
from trainkit.config import LAYOUT, TrainingConfig

ASKED_EVERY = 10  # steps; asking takes some milliseconds
PAUSES = (1, 2, 4)  # seconds before the second, third, and fourth attempt
UNSEEN_PAUSES = (*PAUSES, 8, 16, 32)  # for files that may come late, as on NFS
PASSING = re.compile(  # in the words of TensorStore, and of the operating system
    "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|RESOURCE_EXHAUSTED|"
    "PERMISSION_DENIED|UNAUTHENTICATED|OS error|Errno|AWS Error|(?i:timed? ?out)"
)
MISSING = re.compile("NOT_FOUND|File not found|No such file|Checkpoint at .* not found")
COPYING = {"chunk_size": 2**26, "use_threads": False}  # as Ray does: apache/arrow#32372
# Listings of a bucket must not be kept: other processes write there, too.
for protocol in ("s3", "s3a", "gs", "gcs"):
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
RECORD = "checkpoint_manager_snapshot.json"  # Ray's


class Saved(NamedTuple):
    """A checkpoint that is being written, for `ray.train.report`."""

    checkpoint: ray.train.Checkpoint | None  # None: Ray has that name on record
    name: str  # of its folder, in the run's
    finish: Callable[
        ..., ray.train.Checkpoint
    ]  # returns when this worker's part is there

    @property
    def options(self) -> dict:
        """What `ray.train.report` is told of it."""
        return {
            "checkpoint": self.checkpoint,
            "checkpoint_dir_name": self.name,
            "checkpoint_upload_mode": ray.train.CheckpointUploadMode.ASYNC,
            "checkpoint_upload_fn": self.finish,  # Ray records it when this returns
            "delete_local_checkpoint_after_upload": False,  # there is no other copy
        }


class Checkpointer:
    """Saves and restores the state of one run, on every worker together."""

    def __init__(self, config: TrainingConfig):
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
        self.config, self.orbax = config, create_orbax(config)
        self.thread, self.saving = ThreadPoolExecutor(1), None
        self.noticed = False  # that a machine will be taken away
        self.recorded = ""  # the latest that Ray had on record when the run went on
        if config.remote:
            # What a worker that was killed left, of whatever rank.
            shutil.rmtree(staging(config), ignore_errors=True)

    def is_due(self, step: int) -> bool:
        """Whether to save between two evaluations: at the interval, or on Ray's notice.

        Ray knows a few minutes before that a spot machine will be taken away. All workers
        take part when one asks, so they ask every few steps.
        """
        interval = self.config.checkpoint_interval
        if interval and step % interval == 0:
            return True
        if self.noticed or step % ASKED_EVERY:
            return False
        self.noticed = ray.train.get_preemption_info() is not None
        if self.noticed and jax.process_index() == 0:
            print(f"A machine will be taken away: saving step {step}, before its time")
        return self.noticed

    def save(self, state: Any, step: int) -> Saved:
        """Start to write `state`, a pytree of arrays; training goes on meanwhile.

        A checkpoint of the same step, which was damaged, is replaced.

        Raises:
            RuntimeError: another launch has taken the run.
            Exception: the save before this one has failed.
        """
        self.wait()
        if jax.process_index() == 0:  # or has another launch taken the run?
            retry(lock.confirm, self.config, unless=(RuntimeError,))
        config, name = self.config, f"step_{step:08d}"
        stored = in_storage(config, name)
        known = name <= self.recorded and name in on_record()
        written = Path(stored.path)
        if config.remote:
            written = staging(config) / str(jax.process_index()) / name
            if jax.process_index() == 0:  # before any worker writes: `orbax.save` waits
                delete = stored.filesystem.delete_dir_contents
                retry(delete, stored.path, missing_dir_ok=True)
        settings = dataclasses.asdict(config)
        save_in_background(
            self.orbax, written, state, custom_metadata=settings, force=True
        )
        self.saving = saving = self.thread.submit(self.finish, written, stored)
        return Saved(None if known else stored, name, lambda *_: saving.result())

    def finish(
        self, written: Path, stored: ray.train.Checkpoint
    ) -> ray.train.Checkpoint:
        """Return when this worker's part of a checkpoint is on storage."""
        self.orbax.wait_until_finished()
        config, name = self.config, written.name
        if config.remote:
            retry(upload, written, stored)
            part = jax.process_index(), jax.process_count()
            retry(mark(config, name, *part).write_text, "")
            shutil.rmtree(written)
        if jax.process_index() == 0:
            refusal(config, name).unlink(missing_ok=True)
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
        names = retry(list_saved, config)
        # What the first worker sees counts, in case that others don't see it yet.
        names = ray.train.collective.broadcast_from_rank_zero(names)
        if not names:
            refuse_to_start_over(config)
            return None
        unless = (jax.errors.JaxRuntimeError, WrongModel)  # the first: a worker died
        try:
            with fetched(config, names[0]) as folder:
                state = retry(self.load, folder, target, unless=unless)
        except unless:
            raise
        except Exception as error:
            if is_missing(error):
                raise FileNotFoundError(
                    f"{config.run_path / names[0]} lacks files that belong to it, or they "
                    "can't be seen yet, and nothing is refused. If they don't come back, "
                    "delete that folder: the run then continues from the checkpoint before."
                ) from error
            if not is_damage(error):
                raise
            raise RuntimeError(refuse(config, names[0], error)) from error
        if jax.process_index() == 0:
            print(f"Continuing from {config.run_path / names[0]}")
        report_unrecorded(config, [name for name in names if name > latest])
        return state

    def load(self, folder: Path, target: Any) -> Any:
        """The state in a checkpoint that this node sees."""
        found = self.orbax.metadata(folder).item_metadata
        place = self.config.run_path / folder.name
        check_shapes(found.tree if found else {}, target, place)
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
    filesystem = checkpoint.filesystem
    pyarrow.fs.copy_files(
        str(folder), checkpoint.path, destination_filesystem=filesystem, **COPYING
    )


@contextlib.contextmanager
def fetched(config: TrainingConfig, name: str) -> Iterator[Path]:
    """The folder of a checkpoint; from an object store, a copy that a node's workers share.

    All workers enter and leave it together.
    """
    stored = in_storage(config, name)
    if not config.remote:
        yield Path(stored.path)
        return
    folder = staging(config) / "fetched" / name
    first = ray.train.get_context().get_local_rank() == 0
    if first:
        folder.mkdir(parents=True)
        filesystem = stored.filesystem
        copy = pyarrow.fs.copy_files
        retry(copy, stored.path, str(folder), source_filesystem=filesystem, **COPYING)
    ray.train.collective.barrier()
    yield folder
    ray.train.collective.barrier()
    if first:
        shutil.rmtree(folder)


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
    options = ocp.options.AsyncOptions(
        timeout_secs=math.ceil(config.stall_timeout_s),
        create_directories_asynchronously=not config.remote,
    )
    return ocp.AsyncCheckpointer(
        handler, async_options=options, multiprocessing_options=together
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
        if (layout := settings.get("layout", 1)) != LAYOUT:
            raise ValueError(
                f"checkpoint: {checkpoint.path} has layout {layout}, of an older version of "
                f"this tutorial, and this one reads layout {LAYOUT}. Read it with that "
                "version, or train anew"
            )
        fields = {field.name for field in dataclasses.fields(TrainingConfig)}
        known = {k: v for k, v in settings.items() if k in fields}  # of older versions
        config = TrainingConfig(**known)
        if config.attention != "xla" and config.platform != jax.default_backend():
            config = dataclasses.replace(config, attention="xla")  # which runs here
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
            shapes_of(config),
        )
        state = read(orbax, folder, {"params": target}, partial_restore=True)
    return config, state["params"]


def list_saved(config: TrainingConfig) -> list[str]:
    """The names of the run's whole checkpoints that aren't refused, newest first."""
    names = [
        name for name in list_folders(config) if not refusal(config, name).exists()
    ]
    marked = whole(config) if config.remote else names
    return [name for name in names if name in marked]


def list_folders(config: TrainingConfig) -> list[str]:
    """The names of all the run's checkpoints, whole or not, newest first."""
    names = (path.name for path in config.run_path.glob("step_*"))
    return sorted((n for n in names if re.fullmatch(r"step_\d+", n)), reverse=True)


def step_of(name: str) -> int:
    """The step of a checkpoint with that name."""
    return int(re.search(r"\d+", name)[0])


def mark(config: TrainingConfig, name: str, part: int, parts: int) -> epath.Path:
    """The empty object that says: this worker's part of a checkpoint is there."""
    return config.run_path / name / f"part-{part}-of-{parts}"


def whole(config: TrainingConfig) -> set[str]:
    """The checkpoints in an object store that have the marks of all workers."""
    marks = defaultdict(set)
    for path in config.run_path.glob("step_*/part-*-of-*"):
        _, part, _, parts = path.name.split("-")
        marks[path.parent.name, int(parts)].add(int(part))
    return {name for (name, parts), found in marks.items() if len(found) == parts}


def refusal(config: TrainingConfig, name: str) -> epath.Path:
    """The note that keeps a checkpoint from being used."""
    return config.run_path / f"{name}.refused"


def refuse(config: TrainingConfig, name: str, error: Exception) -> str:
    """Keep a damaged checkpoint from being used; return a message that says so."""
    note = refusal(config, name)
    message = f"Cannot restore {config.run_path / name}, which is damaged: {error}"
    note.write_text(message)
    return (
        f"{message}\nThe next start takes the checkpoint before it. To try this one "
        f"again, delete {note}."
    )


def refuse_to_start_over(config: TrainingConfig) -> None:
    """Raise if the run has checkpoints, but only refused ones.

    Raises:
        RuntimeError: with what to do.
    """
    if any(refusal(config, name).exists() for name in list_folders(config)):
        raise RuntimeError(
            f"No checkpoint in {config.run_path} can be restored; the files "
            "step_*.refused say why. Delete these files to try again, or that folder "
            "to start over."
        )


def newest_settings(config: TrainingConfig) -> dict:
    """The configuration in the newest checkpoint that can be read; empty if none can."""
    for name in list_folders(config):
        metadata = read_json(config.run_path / name / "_CHECKPOINT_METADATA")
        if settings := metadata.get("custom_metadata"):
            return settings
    return {}


def read_log(config: TrainingConfig) -> dict[int, dict]:
    """The lines of the run's log by step; a line that was cut off isn't among them."""
    path, lines = config.run_path / "metrics.jsonl", {}
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            lines[line["step"]] = line
    return lines


def in_storage(config: TrainingConfig, name: str) -> ray.train.Checkpoint:
    """The checkpoint of that name in the run's folder, whether it exists or not."""
    filesystem, path = open_storage(config.storage_path)
    return ray.train.Checkpoint(f"{path}/{config.run_name}/{name}", filesystem)


@functools.lru_cache
def open_storage(place: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """A file system, and a path on it; a store may be asked where its bucket is."""
    return pyarrow.fs.FileSystem.from_uri(place)


def on_record() -> set[str]:
    """The names of the checkpoints that Ray has on record."""
    reported = ray.train.get_all_reported_checkpoints()
    return {each.checkpoint.path.rpartition("/")[2] for each in reported}


def read_json(path: epath.Path) -> dict:
    """What a file says; empty if there is none, or none that is JSON.

    Raises:
        OSError: it is there, and can't be read now.
    """
    try:
        found = json.loads(retry(path.read_text, unless=(FileNotFoundError,)))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: epath.Path, text: str) -> None:
    """Write a file whole or not at all: a disk may fill up, and others read it meanwhile."""
    if "://" in str(path):  # an object store does so by itself
        path.write_text(text)
        return
    new = path.with_suffix(f".{uuid.uuid4().hex[:8]}")  # another process may write, too
    new.write_text(text)
    new.replace(path)


def metrics_of(line: dict) -> dict:
    """What Ray is told of a checkpoint: one that isn't evaluated is no best one.

    Ray would rank a report that lacks the metric before all others.
    """
    return {"val_loss": math.inf} | line


def prepare_folder(config: TrainingConfig) -> None:
    """Delete, before a launch, Ray's record and what saves that were cut off have left."""
    (config.run_path / RECORD).unlink(missing_ok=True)
    for path in config.run_path.glob("step_*.orbax-checkpoint-tmp*"):
        path.rmtree()


def report_unrecorded(config: TrainingConfig, names: list[str]) -> None:
    """Tell Ray of whole checkpoints that it doesn't know, the oldest first.

    It knows none in a new launch, and not the last one if a worker dies between the end of
    a save and its report. Their metrics are those of the run's log.
    """
    lines = read_log(config) if names else {}
    for name in sorted(names):
        step = step_of(name)
        ray.train.report(
            metrics_of(lines.get(step, {"step": step})),
            checkpoint=in_storage(config, name),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )


def retry(
    function: Callable, *args, unless: tuple[type[Exception], ...] = (), **options
) -> Any:
    """The result of `function`, which is called up to four times while it raises.

    While what it reads can't be seen, it is called for a minute.

    Args:
        unless: exceptions that another attempt can't help.

    Raises:
        Exception: what the last attempt raised.
    """
    for attempt in itertools.count():
        try:
            return function(*args, **options)
        except unless:
            raise
        except Exception as error:
            pauses = UNSEEN_PAUSES if is_missing(error) else PAUSES
            if attempt >= len(pauses):
                raise
            name = getattr(function, "__name__", function)
            reason = f"{type(error).__name__}: {error!s:.300}"
            print(f"{name} failed; again in {pauses[attempt]} s ({reason})")
            time.sleep(pauses[attempt])


def causes(error: BaseException | None) -> list[BaseException]:
    """`error`, and what it came from."""
    found = []
    while error and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def is_missing(error: BaseException) -> bool:
    """Whether `error` says that a file isn't there, or can't be seen yet."""
    return any(
        isinstance(cause, FileNotFoundError) or MISSING.search(str(cause))
        for cause in causes(error)
    )


def is_damage(error: BaseException) -> bool:
    """Whether `error`, from reading a file, says that what was read is damaged.

    A file that isn't there may come; a file server that doesn't answer, or a full disk,
    says nothing about the file.
    """
    found = causes(error)
    if is_missing(error) or any(isinstance(e, OSError) for e in found):
        return False
    kinds = (ValueError, LookupError, TypeError, EOFError)
    of_content = any(isinstance(e, kinds) for e in found)
    return of_content and not any(PASSING.search(str(e)) for e in found)

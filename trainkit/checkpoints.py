"""Save and restore a run's state; which of its checkpoints are whole.

A checkpoint holds all that a run needs to go on as if nothing had happened: parameters,
optimizer state, step, and, as metadata, the configuration. Orbax writes it in the
background, every worker its own shards. On a file system that all nodes share, the shards
go straight into the run's folder, which gets its name once all are there. For an object
store, such as S3, where nothing can be renamed, each worker writes its shards to a folder of
its own, uploads them, and adds a mark. `ray.train.report` records a checkpoint once all
workers are done with it, and Ray Train then deletes those that are no longer needed.

A run that restarts takes the newest whole checkpoint on storage that all workers can read.
Ray's own record of them lasts for a launch: a full disk can empty it, and Ray refuses one
that names what isn't there. So each launch deletes it, and tells Ray anew which there are.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.fs
import ray.train
import ray.train.collective
from etils import epath
from filelock import FileLock
from jax.experimental import multihost_utils

from trainkit import lock, sharding
from trainkit.config import TrainingConfig

PAUSES = (1, 2, 4, 8, 16, 32)  # seconds before each further attempt: a minute in all
COPYING = {"chunk_size": 2**26, "use_threads": False}  # as Ray does: apache/arrow#32372
RECORD = "checkpoint_manager_snapshot.json"  # Ray's
# Ray would rank a report that lacks the metric before all others.
NOT_EVALUATED = {"val_loss": math.inf}
# A file system and a path on it; a store is asked where its bucket is, so once only.
open_storage = functools.lru_cache(pyarrow.fs.FileSystem.from_uri)
# Listings of a bucket must not be kept: other processes write there, too.
for protocol in ("s3", "s3a", "gs", "gcs"):
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False


class OtherModel(ValueError):
    """A checkpoint holds other arrays than the model of this run."""


# What another attempt can't help: memory that runs out, a worker that died.
FINAL = (OtherModel, MemoryError, jax.errors.JaxRuntimeError)


class Checkpointer:
    """Saves and restores the state of one run, on every worker together."""

    def __init__(self, config: TrainingConfig):
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
        self.config, self.orbax = config, create_writer(config)
        self.thread, self.saving = ThreadPoolExecutor(1), None
        self.noticed = False  # that a machine will be taken away
        self.asked = None  # the last step that asked for a notice, and the seconds then
        self.ask_at = 0  # the next step
        if config.remote:
            # What a worker that was killed left, of whatever rank.
            shutil.rmtree(staging(config), ignore_errors=True)

    def is_due(self, step: int) -> bool:
        """Whether to save between two evaluations: at the interval, or on Ray's notice.

        Ray knows half a minute or more before that a spot machine will be taken away. To
        ask takes some milliseconds, and all workers take part. So they do it every few
        seconds, as the first one's clock says, but at least every ten steps.
        """
        interval = self.config.checkpoint_interval
        if interval and step % interval == 0:
            return True
        if self.noticed or step < self.ask_at:
            return False
        self.noticed = ray.train.get_preemption_info() is not None
        before, then = self.asked or (step, -math.inf)
        self.asked = step, time.monotonic()
        pace = (step - before) / (self.asked[1] - then)  # steps a second; at first, 0
        wait = min(10, math.ceil(5 * pace))
        self.ask_at = step + ray.train.collective.broadcast_from_rank_zero(wait)
        if self.noticed and jax.process_index() == 0:
            print(f"A machine will be taken away: saving step {step}, before its time")
        return self.noticed

    def save(self, state: Any, step: int) -> dict[str, Any]:
        """Start to write `state`, a pytree of arrays; training goes on meanwhile.

        A checkpoint of the same step, which could not be read, is replaced.

        Returns:
            What `ray.train.report` takes to record it when all of it is there.

        Raises:
            RuntimeError: another launch has taken the run.
            Exception: the save before this one has failed.
        """
        self.wait()
        config, name, recorded = self.config, f"step_{step:08d}", on_record()
        stored = in_storage(config, name)
        written = Path(stored.path)
        if config.remote:
            written = staging(config) / str(jax.process_index()) / name
        if jax.process_index() == 0:
            retry(lock.confirm, config, unless=(RuntimeError,))
            if config.remote:
                delete = stored.filesystem.delete_dir_contents
                retry(delete, stored.path, missing_dir_ok=True)
            others = [in_storage(config, other).path for other in recorded - {name}]
            for found in retry(stored.filesystem.get_file_info, others):
                if found.type == pyarrow.fs.FileType.NotFound:  # Ray would end the run
                    retry(stored.filesystem.create_dir, found.path)
        ray.train.collective.barrier()  # the first may try for longer than Orbax waits
        settings, args = dataclasses.asdict(config), ocp.args.PyTreeSave(state)
        self.orbax.save(written, args=args, custom_metadata=settings, force=True)
        self.saving = saving = self.thread.submit(self.finish, written, stored)
        return {
            "checkpoint": None if name in recorded else stored,
            "checkpoint_dir_name": name,
            "checkpoint_upload_mode": ray.train.CheckpointUploadMode.ASYNC,
            "checkpoint_upload_fn": lambda *_: saving.result(),  # then Ray records it
            "delete_local_checkpoint_after_upload": False,  # there is no other copy
        }

    def finish(
        self, written: Path, stored: ray.train.Checkpoint
    ) -> ray.train.Checkpoint:
        """Return when this worker's part of a checkpoint is on storage."""
        self.orbax.wait_until_finished()
        if self.config.remote:
            there = {"destination_filesystem": stored.filesystem} | COPYING
            retry(pyarrow.fs.copy_files, str(written), stored.path, **there)
            mark = f"part-{jax.process_index()}-of-{jax.process_count()}"
            retry((self.config.run_path / written.name / mark).write_text, "")
            shutil.rmtree(written)
        return stored

    def wait(self) -> None:
        """Wait until this worker's part of the last checkpoint is on storage.

        Raises:
            Exception: it could not be written.
        """
        if self.saving:
            self.saving.result()

    def restore(
        self, recorded: ray.train.Checkpoint | None, create_state: Callable
    ) -> Any:
        """The state that the run continues from, or the one before its first step.

        Args:
            recorded: as `newest` takes it.
            create_state: makes the state, a pytree with `params`, for a configuration.
                The state is divided over the mesh that `workers.start_worker` has set.

        Raises:
            OtherModel, RuntimeError: as `newest` says.
        """
        config, mesh = self.config, jax.sharding.get_mesh()
        target = sharding.abstract_state(create_state, config, mesh)
        state = self.newest(recorded, target)
        if state is None:
            state = sharding.initial_state(create_state, config, target)
        return state

    def newest(self, recorded: ray.train.Checkpoint | None, target: Any) -> Any:
        """The state of the run's newest checkpoint that all workers can read.

        Args:
            recorded: what `ray.train.get_checkpoint()` says. Whole checkpoints that are
                newer are reported to Ray.
            target: a pytree of the state's shapes, dtypes, and shardings.

        Returns:
            The state, or None if the run has no checkpoint.

        Raises:
            OtherModel: the newest checkpoint that can be read is of another model.
            RuntimeError: there are checkpoints, and none can be read.
        """
        config, names, reasons = self.config, None, []
        if jax.process_index() == 0:
            retry(remove_leftovers, config)
            names = retry(list_saved, config)
        # What the first worker sees counts, in case that others don't see it yet.
        names = ray.train.collective.broadcast_from_rank_zero(names)
        for name in names:
            place, state = config.run_path / name, None
            try:
                state = retry(load, config, name, target, unless=FINAL)
            except FINAL:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error!s:.1000}"
                reasons.append(f"{place} on {socket.gethostname()}: {reason}")
                print(f"Cannot restore {reasons[-1]}")
            everywhere = on_all_workers(state is not None)
            shutil.rmtree(staging(config) / "fetched" / name, ignore_errors=True)
            if everywhere:
                if jax.process_index() == 0:
                    print(f"Continuing from {place}")
                latest = Path(recorded.path).name if recorded else ""
                report_unrecorded(config, [n for n in names if latest < n <= name])
                return state
            del state  # before the next is read: there may be room for one
        if names:
            raise RuntimeError(
                f"No checkpoint in {config.run_path} can be restored on all workers, and a "
                "run never starts over by itself. Mend what is wrong and launch it again, "
                "or choose another run_name to start anew. "
                + "; ".join(reasons or ["Other workers say why."])
            )


def on_all_workers(true: bool) -> bool:
    """Whether it is true on each; all workers call this, and wait for the last."""
    ray.train.collective.barrier()  # for as long as it takes, where JAX would give up
    return bool(multihost_utils.process_allgather(np.array(true)).all())


def load(config: TrainingConfig, name: str, target: Any) -> Any:
    """The state in a checkpoint; from an object store, one of a node's workers fetches it."""
    stored = in_storage(config, name)
    if not config.remote:
        return read(stored.path, target)
    folder = staging(config) / "fetched" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(staging(config) / "fetching.lock"):
        if not folder.exists():
            new = folder.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)  # of the attempt before
            new.mkdir()
            there = {"source_filesystem": stored.filesystem} | COPYING
            pyarrow.fs.copy_files(stored.path, str(new), **there)
            new.rename(folder)
    return read(folder, target)


def read(folder: str | Path, target: Any, partial_restore: bool = False) -> Any:
    """The pytree in `folder`, with the shapes, dtypes, and shardings of `target`.

    Each process reads by itself, so that one that can't doesn't leave the others waiting.

    Args:
        partial_restore: whether `target` may lack arrays that are there.

    Raises:
        OtherModel: with the first few arrays whose names or shapes differ.
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"worker-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    orbax = ocp.Checkpointer(handler, multiprocessing_options=alone)
    metadata = orbax.metadata(folder).item_metadata
    found, expected = map(array_shapes, (metadata.tree if metadata else {}, target))
    differing = [key for key, shape in expected.items() if found.get(key) != shape]
    if not partial_restore:
        differing += found.keys() - expected.keys()
    if found and differing:  # nothing at all isn't another model but damage
        each = (
            f"{key}: found {found.get(key)}, expected {expected.get(key)}"
            for key in sorted(differing)[:3]
        )
        raise OtherModel(
            f"{folder} is a checkpoint of another model: {'; '.join(each)}. Choose another "
            "run_name."
        )
    each = ocp.checkpoint_utils.construct_restore_args(target)
    return orbax.restore(
        folder,
        args=ocp.args.PyTreeRestore(
            target, restore_args=each, partial_restore=partial_restore
        ),
    )


def array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a pytree's arrays, by name, such as params.wte.embedding.value."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # as which it is saved
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found[name] = tuple(leaf.shape)
    return found


def create_writer(config: TrainingConfig) -> ocp.AsyncCheckpointer:
    """Writes pytrees of sharded arrays, all processes together, without blocking."""
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
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with checkpoint.as_directory() as folder:
        settings = read_settings(epath.Path(folder))
        if not settings:
            raise ValueError(
                f"checkpoint: {checkpoint.path} holds no configuration; expected a folder "
                "that a run has saved, such as step_00001000"
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
        state = read(folder, {"params": target}, partial_restore=True)
    return config, state["params"]


def list_saved(config: TrainingConfig) -> list[str]:
    """The names of the run's whole checkpoints, newest first."""
    names = list_folders(config)
    if config.remote:
        marks = config.run_path.glob("step_*/part-*-of-*")
        found = Counter((p.parent.name, int(p.name.split("-")[-1])) for p in marks)
        whole = {name for (name, parts), n in found.items() if n == parts}
        # Those of a run that was copied from a folder, which has no marks
        whole |= {p.parent.name for p in config.run_path.glob("step_*/manifest.ocdbt")}
        names = [name for name in names if name in whole]
    return names


def list_folders(config: TrainingConfig) -> list[str]:
    """The names of all the run's checkpoints, whole or not, newest first."""
    names = (path.name for path in config.run_path.glob("step_*"))
    return sorted((n for n in names if re.fullmatch(r"step_\d+", n)), reverse=True)


def remove_leftovers(config: TrainingConfig) -> None:
    """Delete what saves that were cut off have left, of processes that are gone."""
    for path in config.run_path.glob("step_*.orbax-checkpoint-tmp*"):
        path.rmtree()
    for name in {*list_folders(config)} - {*list_saved(config)}:
        stored = in_storage(config, name)
        stored.filesystem.delete_dir(stored.path)


def step_of(name: str) -> int:
    """The step of a checkpoint with that name."""
    return int(name.removeprefix("step_"))


def in_storage(config: TrainingConfig, name: str) -> ray.train.Checkpoint:
    """The checkpoint of that name in the run's folder, whether it exists or not."""
    filesystem, path = open_storage(config.storage_path)
    return ray.train.Checkpoint(f"{path}/{config.run_name}/{name}", filesystem)


def staging(config: TrainingConfig) -> Path:
    """Where a node's workers write a checkpoint before it is uploaded, user by user.

    Runs of one name may belong to different object stores.
    """
    store = f"{zlib.crc32(config.storage_path.encode()):08x}"
    user = f"trainkit-{os.getuid()}"
    return Path(tempfile.gettempdir(), user, store, config.run_name)


def on_record() -> set[str]:
    """The names of the checkpoints that Ray has on record."""
    reported = ray.train.get_all_reported_checkpoints()
    return {each.checkpoint.path.rpartition("/")[2] for each in reported}


def report_unrecorded(config: TrainingConfig, names: list[str]) -> None:
    """Tell Ray of whole checkpoints that it doesn't know, the oldest first.

    It knows none in a new launch, and not the last one if a worker dies between the end of
    a save and its report.
    """
    lines = read_log(config) if names else {}
    for name in sorted(names):
        step = step_of(name)
        ray.train.report(
            NOT_EVALUATED | lines.get(step, {"step": step}),
            checkpoint=in_storage(config, name),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )


def newest_settings(config: TrainingConfig) -> dict:
    """The configuration in the newest checkpoint that can be read; empty if none can."""
    found = (read_settings(config.run_path / name) for name in list_folders(config))
    return next(filter(None, found), {})


def read_settings(folder: epath.Path) -> dict:
    """The configuration in a checkpoint, which is Orbax's custom metadata."""
    return read_json(folder / "_CHECKPOINT_METADATA").get("custom_metadata") or {}


def read_log(config: TrainingConfig) -> dict[int, dict]:
    """The lines of the run's log by step; a line that was cut off isn't among them."""
    path, lines = config.run_path / "metrics.jsonl", {}
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            lines[line["step"]] = line
    return lines


def read_json(path: epath.Path) -> dict:
    """What a file says; empty if there is none, or none that is JSON.

    Raises:
        OSError: it is there, and can't be read now.
    """
    other = FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError
    try:
        found = json.loads(retry(path.read_text, unless=other))
    except other:
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: epath.Path, text: str) -> None:
    """Write a file whole or not at all: a disk may fill up, and others read it meanwhile."""
    if "://" in str(path):  # an object store does so by itself
        path.write_text(text)
        return
    new = path.with_suffix(f".{uuid.uuid4().hex[:8]}")  # another process may write, too
    try:
        new.write_text(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def retry(
    function: Callable, *args, unless: tuple[type[Exception], ...] = (), **options
) -> Any:
    """The result of `function`, which is called for a minute while it raises.

    Args:
        unless: exceptions that another attempt can't help.
    """
    for pause in PAUSES:
        try:
            return function(*args, **options)
        except unless:
            raise
        except Exception as error:
            name = getattr(function, "__name__", function)
            reason = f"{type(error).__name__}: {error!s:.300}"
            print(f"{name} failed; again in {pause} s ({reason})")
            time.sleep(pause)
    return function(*args, **options)

"""Checkpoints: whole, readable for years; what can't be read is passed over."""

import asyncio
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.fs
import pytest
import ray
import ray.train
from conftest import read_arrays
from etils import epath
from flax import nnx
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,
)
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

import trainkit.checkpoints
import trainkit.config
import trainkit.generate
import trainkit.sharding

DATA = Path(__file__).parent / "data"
FIRST, SECOND, THIRD = "step_00000010", "step_00000020", "step_00000030"


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The seconds that are waited between attempts, which pass at once."""
    pauses = []
    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def checkpointer(small, recorded):
    """A Checkpointer outside of Ray."""
    config = small()
    config.run_path.mkdir(parents=True)
    return trainkit.checkpoints.Checkpointer(config)


def save_steps(checkpointer, *steps, **others) -> dict:
    """Save steps, one after the other; returns what Ray is told of the last."""
    for step in steps:
        kernel = np.full((64, 64), step, np.float32)
        told = checkpointer.save(others or {"kernel": kernel}, step)
        checkpointer.wait()
    return told


@pytest.fixture
def restore(checkpointer, monkeypatch):
    """What a checkpointer in this process restores, and what it reports to Ray."""
    reports = []
    report = lambda metrics, **options: reports.append((metrics, options))  # noqa: E731
    monkeypatch.setattr(ray.train, "report", report)

    def restore(latest: str = "", **others):
        known = ray.train.Checkpoint(f"/anywhere/{latest}") if latest else None
        target = {"kernel": jnp.zeros((64, 64))} | others
        state = checkpointer.newest(known, target)
        return state and int(state["kernel"][0, 0]), list(reports)

    return restore


# Saving.


def test_a_failed_save_is_seen_by_the_loop_and_by_rays_thread(
    checkpointer, monkeypatch
):
    good = save_steps(checkpointer, 10)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(checkpointer.orbax, "wait_until_finished", Mock(side_effect=full))
        patch.setattr(checkpointer.orbax, "save", lambda *_, **__: None)
        bad, again = checkpointer.save({}, 20), partial(checkpointer.save, {}, 30)
        for see in (bad["checkpoint_upload_fn"], checkpointer.wait, again) * 2:
            with pytest.raises(OSError, match="No space"):
                see()
    assert good["checkpoint_upload_fn"]("from", "to").path.endswith(FIRST)
    assert trainkit.checkpoints.list_saved(checkpointer.config) == [FIRST]


def test_no_worker_waits_in_orbax_while_the_first_tries(checkpointer, monkeypatch):
    """Its attempts may take a minute, and there are limits to waiting there."""
    order = Mock()
    monkeypatch.setattr(trainkit.checkpoints.lock, "confirm", order.confirm)
    monkeypatch.setattr(ray.train.collective, "barrier", order.barrier)
    monkeypatch.setattr(checkpointer.orbax, "save", order.save)
    save_steps(checkpointer, 10)
    assert [name for name, *_ in order.mock_calls] == ["confirm", "barrier", "save"]


def test_a_step_that_is_saved_again_is_on_record_once(checkpointer, recorded):
    """After a run went on from the checkpoint before; what is there is replaced.

    One on record that somebody has deleted becomes an empty folder, or Ray would end the
    run when it comes to delete it itself.
    """
    path = checkpointer.config.run_path / FIRST
    assert save_steps(checkpointer, 10)["checkpoint"].path == str(path)
    recorded.append(FIRST)
    again = save_steps(checkpointer, 10, kernel=np.ones(3))
    assert again["checkpoint"] is None and again["checkpoint_dir_name"] == FIRST
    assert [array.tolist() for array in read_arrays(path)] == [[1, 1, 1]]
    path.rmtree()
    save_steps(checkpointer, 20)
    assert path.is_dir() and not [*path.iterdir()]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    path = epath.Path(tmp_path) / "metrics.jsonl"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        trainkit.checkpoints.write_whole(path, "text")
    assert [*tmp_path.iterdir()] == [tmp_path / path.name]


def test_a_key_is_restored(checkpointer):
    """As optax.add_noise keeps one."""
    save_steps(checkpointer, 10, key=jax.random.key(7))
    path = checkpointer.config.run_path / FIRST
    found = trainkit.checkpoints.read(path, {"key": jax.random.key(0)})
    assert jax.random.key_data(found["key"]).tolist() == [0, 7]


def test_a_save_that_is_not_evaluated_is_no_best_checkpoint(tutorial, small):
    """For Ray's own bookkeeping: four evaluations, with four more saves before each."""
    config, losses = small(), {1_000: 3.0, 2_000: 2.5, 3_000: 2.9, 4_000: 3.3}
    kept = tutorial.make_run_config(config).checkpoint_config
    storage = StorageContext(config.storage_path, config.run_name)

    async def record() -> CheckpointManager:
        manager = CheckpointManager(kept, storage)
        for step in range(200, 4_001, 200):
            (config.run_path / f"step_{step:08d}").mkdir(parents=True)
            saved = trainkit.checkpoints.in_storage(config, f"step_{step:08d}")
            line = {"val_loss": losses[step]} if step in losses else {}
            line = trainkit.checkpoints.NOT_EVALUATED | line
            manager.register_checkpoint(_TrainingReport(saved, line, False))
        return manager

    manager = asyncio.run(record())
    left = map(trainkit.checkpoints.step_of, trainkit.checkpoints.list_saved(config))
    assert [*left] == [4_000, 3_000, 2_000]
    assert manager.best_checkpoint_result.metrics["val_loss"] == 2.5


def test_saves_between_evaluations(small, recorded, monkeypatch):
    """At the interval; and once, when Ray gives notice that a machine will go."""
    now, asked = [0.0], []
    monkeypatch.setattr(trainkit.checkpoints.time, "monotonic", lambda: now[0])

    def due(seconds, notice, steps: int, start: int = 0, **changes) -> list[int]:
        """Of so many steps, which take some seconds each, with a notice at some time."""

        def ask():
            asked.append(step)
            return "soon" if now[0] >= notice else None

        now[0], found = 0.0, []
        asked.clear()
        monkeypatch.setattr(ray.train, "get_preemption_info", ask)
        checkpointer = trainkit.checkpoints.Checkpointer(small(**changes))
        for step in range(start + 1, start + steps + 1):
            now[0] += seconds
            found += [step] if checkpointer.is_due(step) else []
        return found

    assert due(0.1, math.inf, 25) == [] and asked == [1, 2, 12, 22]
    assert due(0.1, 1.5, 100, checkpoint_interval=25) == [22, 25, 50, 75, 100]
    # Of slow steps, each: a notice comes half a minute before, also to a run that goes on.
    for start in (0, 10_000):
        assert due(10.0, 95.0, 12, start) == [start + 10]
        assert asked == [*range(start + 1, start + 11)]


# Reading.


def test_the_newest_is_restored_and_ray_is_told_of_what_it_does_not_know(
    checkpointer, restore, capsys
):
    """In order, with the log's lines, as far as the log has them.

    What a save that was cut off has left goes; what a person calls much the same stays.
    """
    assert restore() == (None, [])  # of a run that has none
    config = checkpointer.config
    save_steps(checkpointer, 10, 20, 25)
    left = config.run_path / f"{THIRD}.orbax-checkpoint-tmp"
    mine = config.run_path / f"{FIRST}-backup"
    for folder in (left / "d", mine):
        folder.mkdir(parents=True)
    lines = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (config.run_path / "metrics.jsonl").write_text(text)
    step, reports = restore(FIRST)
    assert step == 25 and mine.exists() and not left.exists()
    lines = [{"val_loss": math.inf} | line for line in (lines[1], {"step": 25})]
    assert [metrics for metrics, _ in reports] == lines
    names = [options["checkpoint_dir_name"] for _, options in reports]
    assert names == [SECOND, "step_00000025"]
    assert [Path(o["checkpoint"].path).name for _, o in reports] == names
    assert all(o["checkpoint_upload_mode"].name == "NO_UPLOAD" for _, o in reports)
    assert "Continuing from" in capsys.readouterr().out
    assert len(restore("step_00000025")[1]) == 2  # Ray knows all, and is told nothing


def cut_off(folder: Path) -> None:
    data = max(folder.rglob("d/*"), key=lambda file: file.stat().st_size)
    half = data.read_bytes()[: data.stat().st_size // 2]
    data.unlink()  # and not in place: a process that still maps it would die
    data.write_bytes(half)


@pytest.mark.parametrize(
    "harm",
    [
        cut_off,
        lambda folder: (folder / "_METADATA").write_text("{"),
        lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    ],
    ids=["cut off", "no JSON", "nothing"],
)
def test_what_cannot_be_read_for_a_minute_is_passed_over(
    checkpointer, restore, pauses, capsys, harm
):
    """The one before is taken; the first is named, with the reason, and stays."""
    save_steps(checkpointer, 10, 20, 30)
    folder = Path(checkpointer.config.run_path / THIRD)
    harm(folder)
    step, reports = restore()
    assert step == 20 and 60 < sum(pauses) < 70
    assert [o["checkpoint_dir_name"] for _, o in reports] == [FIRST, SECOND]
    said = capsys.readouterr().out
    assert f"Cannot restore {folder} on " in said and folder.exists()
    assert f"Continuing from {folder.with_name(SECOND)}" in said


def test_a_checkpoint_that_cannot_be_seen_yet_is_waited_for(
    checkpointer, restore, monkeypatch
):
    """As on NFS: it is there after 40 s."""
    save_steps(checkpointer, 10, 20)
    data = Path(checkpointer.config.run_path / SECOND / "d")
    hidden, pauses = data.rename(data.with_name("hidden")), []

    def sleep(seconds):
        pauses.append(seconds)
        if sum(pauses) > 40 and hidden.exists():
            hidden.rename(data)

    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", sleep)
    assert restore()[0] == 20 and sum(pauses) > 40


def test_a_run_never_starts_over_by_itself(checkpointer, restore, pauses, monkeypatch):
    """If none of its checkpoints can be listed, or read, the launch says why."""
    save_steps(checkpointer, 10, 20)
    with monkeypatch.context() as patch:
        denied = PermissionError("AWS Error ACCESS_DENIED")
        patch.setattr(trainkit.checkpoints, "list_folders", Mock(side_effect=denied))
        with pytest.raises(PermissionError):
            restore()
        assert 60 < sum(pauses) < 70
    assert restore()[0] == 20  # with the right credentials
    for name in (FIRST, SECOND):
        cut_off(Path(checkpointer.config.run_path / name))
    match = f"(?s)No checkpoint.*{SECOND} on .*Error.*{FIRST} on .*Error"
    with pytest.raises(RuntimeError, match=match):
        restore()


def test_what_another_attempt_cannot_help_is_told_at_once(
    checkpointer, restore, pauses, monkeypatch
):
    """Another model, with at most three differences of its shapes; too little memory."""
    save_steps(checkpointer, 10, 20)
    kernel = re.escape("another model: kernel: found (64, 64), expected (64, 65).")
    with pytest.raises(ValueError, match=kernel):
        restore(kernel=jnp.zeros((64, 65)))
    others = r"model: a: found None, expected \(1,\); b: .*; c: [^;]*$"
    with pytest.raises(ValueError, match=others):
        restore(**dict.fromkeys("abcd", jnp.zeros(1)))
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")):
        monkeypatch.setattr(trainkit.checkpoints, "read", Mock(side_effect=error))
        with pytest.raises(type(error)):
            restore()
    assert not pauses


def test_all_workers_take_the_same_checkpoint(checkpointer, restore, monkeypatch):
    """The newest that each can read; this worker can read all."""
    save_steps(checkpointer, 10, 20, 30)
    said = []

    def on_all_workers(true):
        said.append(true)
        return len(said) == 2

    monkeypatch.setattr(trainkit.checkpoints, "on_all_workers", on_all_workers)
    assert restore()[0] == 20 and said == [True, True]
    with pytest.raises(RuntimeError, match="Other workers say why"):
        restore()


def hashes(tree) -> dict[str, str]:
    """What `data/old_checkpoint/arrays.json` holds of each array."""
    found = {}
    for name, array in ocp.tree.to_flat_dict(tree, sep=".").items():
        array = np.asarray(array)
        text = f"{array.dtype} {array.shape}".encode()
        found[name] = hashlib.sha256(text + array.tobytes()).hexdigest()[:16]
    return found


def test_an_old_checkpoint_is_still_read(tutorial):
    """The model alone, and the whole state, bit for bit."""
    expected = json.loads((DATA / "old_checkpoint/arrays.json").read_text())
    checkpoint = ray.train.Checkpoint(DATA / "old_checkpoint/step_00000003")
    model = trainkit.generate.load_model(tutorial.create_model, checkpoint)
    params = hashes({"params": nnx.state(model, nnx.Param)})
    assert params == {k: v for k, v in expected.items() if k.startswith("params.")}

    config = dataclasses.replace(
        model.config, num_workers=1, run_name="old_checkpoint", storage_path=str(DATA)
    )
    (name,) = trainkit.checkpoints.list_saved(config)
    target = trainkit.sharding.abstract_state(
        tutorial.create_state, config, trainkit.sharding.make_mesh(config)
    )
    state = trainkit.checkpoints.load(config, name, target)
    assert hashes(state) == expected and int(state.step) == 3


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    empty = ray.train.Checkpoint(str(tmp_path))
    for given, words in ((empty, f"{tmp_path} holds no conf"), (None, "found None")):
        with pytest.raises(ValueError, match=words):
            trainkit.checkpoints.load_params(given, None)


# An object store, played by a folder: each worker stages its part and uploads it.


@pytest.fixture
def bucket(checkpointer, monkeypatch, tmp_path):
    """The checkpointer's configuration, whose storage now counts as an object store."""
    monkeypatch.setattr(trainkit.config.TrainingConfig, "remote", True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    checkpointer.__init__(checkpointer.config)
    return checkpointer.config


def test_parts_add_up_to_a_checkpoint_when_all_are_there(
    checkpointer, request, restore
):
    """What a killed worker has left of one goes before it is written anew.

    Checkpoints of a run that was copied from a folder have no marks, and are whole.
    """
    save_steps(checkpointer, 5)
    bucket = request.getfixturevalue("bucket")
    assert restore()[0] == 5
    bucket.run_path.rmtree()
    (bucket.run_path / FIRST).mkdir(parents=True)
    for name in ("left", "part-1-of-2"):
        (bucket.run_path / FIRST / name).touch()
    save_steps(checkpointer, 10)
    assert not (bucket.run_path / FIRST / "left").exists()
    assert [x.name for x in bucket.run_path.glob("*/part-*")] == ["part-0-of-1"]
    assert trainkit.checkpoints.list_saved(bucket) == [FIRST]
    assert restore()[0] == 10  # from a copy
    assert list(Path(tempfile.tempdir).rglob("step_*")) == []

    other = bucket.run_path / SECOND
    other.mkdir()
    for name in ("part-0-of-2", "part-1-of-3"):
        (other / name).touch()
    assert trainkit.checkpoints.list_saved(bucket) == [FIRST]
    (other / "part-1-of-2").touch()
    assert trainkit.checkpoints.list_saved(bucket) == [SECOND, FIRST]
    (other / "part-1-of-2").unlink()
    assert restore()[0] == 10 and not other.exists()


def test_how_a_bucket_is_written_and_listed(bucket, checkpointer):
    """A worker writes when its own folder is there, not at the signal of another's.

    Orbax gives a write as long as the watchdog gives a step; no listing is kept.
    """
    assert not checkpointer.orbax._create_directories_asynchronously
    limit = checkpointer.orbax._async_manager._timeout_secs
    assert limit == checkpointer.config.stall_timeout_s
    for protocol in ("s3", "gs", "gcs"):
        assert fsspec.config.conf[protocol]["use_listings_cache"] is False


def test_uploads_and_downloads_are_tried_for_a_minute(
    bucket, checkpointer, restore, pauses, monkeypatch
):
    """And the loop waits for them, after the last step, too, so that it is watched.

    The workers of a node share a download; what a failed one has left is removed.
    """
    copy, attempts = pyarrow.fs.copy_files, []
    failing, ours = {1, 2, 5, *range(7, 99)}, trainkit.checkpoints

    def copy_files(source, target, **options):
        attempts.append(target)
        if len(attempts) in failing:
            if "source_filesystem" in options:
                Path(target, "left").touch()
            raise OSError("AWS Error SLOW_DOWN")
        copy(source, target, **options)

    monkeypatch.setattr(pyarrow.fs, "copy_files", copy_files)
    save_steps(checkpointer, 10)
    assert pauses == [1, 2] and ours.list_saved(bucket) == [FIRST]
    assert restore()[0] == 10
    with monkeypatch.context() as patch:
        patch.setattr(ours, "read", lambda folder, _: folder)
        folders = [ours.retry(ours.load, bucket, FIRST, None) for _ in range(2)]
    assert pauses == [1, 2, 1] and len(attempts) == 6 and folders[0] == folders[1]
    assert not (folders[0] / "left").exists() and len(read_arrays(folders[0])) == 1
    with pytest.raises(OSError, match="SLOW_DOWN"):
        save_steps(checkpointer, 20)
    assert ours.list_saved(bucket) == [FIRST]


def test_what_a_killed_worker_staged_is_removed(bucket, monkeypatch):
    """Whatever its rank was; those of other runs, users, and stores stay."""
    mine = trainkit.checkpoints.staging(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12_345)
        other_user = trainkit.checkpoints.staging(bucket)
    elsewhere = dataclasses.replace(bucket, storage_path="s3://another-bucket/runs")
    other_store = trainkit.checkpoints.staging(elsewhere)
    others = {mine.with_name(f"{bucket.run_name}-2"), other_user, other_store}
    for folder in (mine, *others):
        (folder / "7" / FIRST).mkdir(parents=True)
    trainkit.checkpoints.Checkpointer(bucket)
    assert not mine.exists() and len(others) == 3
    assert all((other / "7" / FIRST).exists() for other in others)

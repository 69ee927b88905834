"""Checkpoints: whole, readable for years; what can't be read is passed over."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

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

from trainkit import checkpoints, generate, sharding
from trainkit.config import TrainingConfig

DATA = Path(__file__).parent / "data"
FIRST, SECOND, THIRD = "step_00000010", "step_00000020", "step_00000030"


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The seconds that are waited between attempts, which pass at once."""
    pauses = []
    monkeypatch.setattr(checkpoints.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def checkpointer(small, recorded):
    """A Checkpointer outside of Ray."""
    config = small()
    config.run_path.mkdir(parents=True)
    return checkpoints.Checkpointer(config)


def save_steps(checkpointer, *steps, **others) -> dict:
    """Save steps, one after the other; returns what Ray is told of the last.

    As optax.add_noise does, the state keeps a key.
    """
    for step in steps:
        kernel, key = np.full((64, 64), step, np.float32), jax.random.key(step)
        told = checkpointer.save(others or {"kernel": kernel, "key": key}, step)
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
        target = {"kernel": jnp.zeros((64, 64)), "key": jax.random.key(0)} | others
        state = checkpointer.newest(known, target)
        step = state and int(jax.random.key_data(state["key"])[1])
        assert not state or (state["kernel"] == step).all()
        return step, list(reports)

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
    assert checkpoints.list_saved(checkpointer.config) == [FIRST]


def test_no_worker_waits_in_orbax_while_the_first_tries(checkpointer, monkeypatch):
    """Its attempts may take a minute, and there are limits to waiting there."""
    order = Mock()
    monkeypatch.setattr(checkpoints.lock, "confirm", order.confirm)
    monkeypatch.setattr(ray.train.collective, "barrier", order.barrier)
    monkeypatch.setattr(checkpointer.orbax, "save", order.save)
    save_steps(checkpointer, 10)
    assert [name for name, *_ in order.mock_calls] == ["confirm", "barrier", "save"]


def test_a_step_that_is_saved_again_is_on_record_once(checkpointer, recorded):
    """After a run went on from the checkpoint before; what is there is replaced.

    One on record that somebody has deleted becomes an empty folder, or Ray would end the
    run when it comes to delete it itself.
    """
    path, told = checkpointer.config.run_path / FIRST, save_steps(checkpointer, 10)
    assert told["checkpoint"].path == str(path)
    assert told["checkpoint_upload_mode"] is ray.train.CheckpointUploadMode.ASYNC
    assert not told["delete_local_checkpoint_after_upload"]
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
        checkpoints.write_whole(path, "text")
    assert [*tmp_path.iterdir()] == [tmp_path / path.name]


def test_saves_between_evaluations(small, recorded, monkeypatch):
    """At the interval; and once, when Ray gives notice that a machine will go."""
    now, asked = [0.0], []
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])

    def due(seconds, notice, steps: range, **changes) -> list[int]:
        """Of these steps, which take some seconds each, with a notice at some time."""

        def ask():
            asked.append(step)
            return "soon" if now[0] >= notice else None

        monkeypatch.setattr(ray.train, "get_preemption_info", ask)
        checkpointer, now[0], found = checkpoints.Checkpointer(small(**changes)), 0, []
        asked.clear()
        for step in steps:
            now[0] += seconds
            found += [step] if checkpointer.is_due(step) else []
        return found

    assert due(0.1, math.inf, range(1, 26)) == [] and asked == [1, 2, 12, 22]
    found = due(0.1, 1.5, range(1, 101), checkpoint_interval=25)
    assert found == [22, 25, 50, 75, 100]
    # Of slow steps, each: a notice comes half a minute before, also to a run that goes on.
    for first in (1, 10_001):
        assert due(10.0, 95.0, range(first, first + 12)) == [first + 9]
        assert asked == [*range(first, first + 10)]


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
    text = '{"step": 10, "loss": 3.0}\n{"step": 20, "loss": 2.0}\n'
    (config.run_path / "metrics.jsonl").write_text(text)
    step, reports = restore(FIRST)
    assert step == 25 and mine.exists() and not left.exists()
    lines = {"step": 20, "loss": 2.0}, {"step": 25}
    assert [x for x, _ in reports] == [{"val_loss": math.inf} | line for line in lines]
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


HARMS = {
    "cut off": cut_off,
    "no JSON": lambda folder: (folder / "_METADATA").write_text("{"),
    "nothing": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
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
    """As on NFS: it is there after half a minute."""
    save_steps(checkpointer, 10, 20)
    data = Path(checkpointer.config.run_path / SECOND / "d")
    hidden = data.rename(data.with_name("hidden"))

    def sleep(seconds):
        if seconds == 32:
            hidden.rename(data)

    monkeypatch.setattr(checkpoints.time, "sleep", sleep)
    assert restore()[0] == 20


def test_a_run_never_starts_over_by_itself(checkpointer, restore, pauses, monkeypatch):
    """If none of its checkpoints can be listed, or read, the launch says why."""
    save_steps(checkpointer, 10, 20)
    with monkeypatch.context() as patch:
        denied = PermissionError("AWS Error ACCESS_DENIED")
        patch.setattr(checkpoints, "list_folders", Mock(side_effect=denied))
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
    for expected, words in (
        ({"kernel": jnp.zeros((64, 65))}, r"found \(64, 64\), expected \(64, 65\)\."),
        ({"key": None}, r"key: found \(2,\), expected None\."),
        (dict.fromkeys("abcd", jnp.zeros(1)), r"a: found None, .*; b: .*; c: [^;]*$"),
    ):
        with pytest.raises(ValueError, match=f"another model: .*{words}"):
            restore(**expected)
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")):
        monkeypatch.setattr(checkpoints, "read", Mock(side_effect=error))
        with pytest.raises(type(error)):
            restore()
    assert not pauses


def test_all_workers_take_the_same_checkpoint(checkpointer, restore, monkeypatch):
    """The newest that each can read; this worker can read all."""
    save_steps(checkpointer, 10, 20, 30)
    answers = Mock(side_effect=[False, True, *[False] * 3])
    monkeypatch.setattr(checkpoints, "on_all_workers", answers)
    assert restore()[0] == 20 and answers.mock_calls == [call(True)] * 2
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
    model = generate.load_model(tutorial.create_model, checkpoint)
    params = hashes({"params": nnx.state(model, nnx.Param)})
    assert params == {k: v for k, v in expected.items() if k.startswith("params.")}

    config = dataclasses.replace(
        model.config, num_workers=1, run_name="old_checkpoint", storage_path=str(DATA)
    )
    (name,) = checkpoints.list_saved(config)
    target = sharding.abstract_state(
        tutorial.create_state, config, sharding.make_mesh(config)
    )
    state = checkpoints.load(config, name, target)
    assert hashes(state) == expected and int(state.step) == 3


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    empty = ray.train.Checkpoint(str(tmp_path))
    for given, words in ((empty, f"{tmp_path} holds no conf"), (None, "found None")):
        with pytest.raises(ValueError, match=words):
            checkpoints.load_params(given, None)


# An object store, played by a folder: each worker stages its part and uploads it.


@pytest.fixture
def bucket(checkpointer, monkeypatch, tmp_path):
    """The checkpointer's configuration, whose storage now counts as an object store."""
    monkeypatch.setattr(TrainingConfig, "remote", True)
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
    (bucket.run_path / FIRST / "part-1-of-2").touch()
    save_steps(checkpointer, 10)
    assert [x.name for x in bucket.run_path.glob("*/part-*")] == ["part-0-of-1"]
    assert restore()[0] == 10  # from a copy
    assert list(Path(tempfile.tempdir).rglob("step_*")) == []

    other = bucket.run_path / SECOND
    other.mkdir()
    for name in ("part-0-of-2", "part-1-of-3"):
        (other / name).touch()
    assert checkpoints.list_saved(bucket) == [FIRST]
    (other / "part-1-of-2").touch()
    assert checkpoints.list_saved(bucket) == [SECOND, FIRST]
    (other / "part-1-of-2").unlink()
    assert restore()[0] == 10 and not other.exists()


def test_how_a_bucket_is_written_and_listed(bucket, checkpointer):
    """A worker writes when its own folder is there, not at the signal of another's.

    Orbax gives a write as long as the watchdog gives a step; no listing is kept.
    """
    assert not checkpointer.orbax._create_directories_asynchronously
    assert checkpointer.orbax._async_manager._timeout_secs == bucket.stall_timeout_s
    for protocol in ("s3", "gs", "gcs"):
        assert fsspec.config.conf[protocol]["use_listings_cache"] is False


def test_uploads_and_downloads_are_tried_for_a_minute(
    bucket, checkpointer, restore, pauses, monkeypatch
):
    """And the loop waits for them, after the last step, too, so that it is watched.

    The workers of a node share a download; what a failed one has left is removed.
    """
    copy, attempts = pyarrow.fs.copy_files, []
    failing = {1, 2, 5, *range(7, 99)}

    def copy_files(source, target, **options):
        attempts.append(target)
        if len(attempts) in failing:
            if "source_filesystem" in options:
                Path(target, "left").touch()
            raise OSError("AWS Error SLOW_DOWN")
        copy(source, target, **options)

    monkeypatch.setattr(pyarrow.fs, "copy_files", copy_files)
    save_steps(checkpointer, 10)
    assert pauses == [1, 2] and checkpoints.list_saved(bucket) == [FIRST]
    assert restore()[0] == 10
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read", lambda folder, _: folder)
        download = partial(checkpoints.load, bucket, FIRST, None)
        folders = [checkpoints.retry(download) for _ in range(2)]
    assert pauses == [1, 2, 1] and len(attempts) == 6 and folders[0] == folders[1]
    assert not (folders[0] / "left").exists() and len(read_arrays(folders[0])) == 2
    with pytest.raises(OSError, match="SLOW_DOWN"):
        save_steps(checkpointer, 20)
    assert checkpoints.list_saved(bucket) == [FIRST]


def test_what_a_killed_worker_staged_is_removed(bucket, monkeypatch):
    """Whatever its rank was; those of other runs, users, and stores stay."""
    mine = checkpoints.staging(bucket)
    elsewhere = dataclasses.replace(bucket, storage_path="s3://another-bucket/runs")
    others = {mine.with_name(f"{bucket.run_name}-2"), checkpoints.staging(elsewhere)}
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12_345)
        others.add(checkpoints.staging(bucket))
    for folder in (mine, *others):
        (folder / "7" / FIRST).mkdir(parents=True)
    checkpoints.Checkpointer(bucket)
    assert not mine.exists() and len(others) == 3
    assert all((other / "7" / FIRST).exists() for other in others)

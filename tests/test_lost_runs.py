"""No run is lost: full disks, passing faults, changed recipes, records that Ray can't read."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import ray.train
from accidents import (
    assert_equal_runs,
    at_step,
    copy_run,
    disk_of,
    in_the_background,
    log_of,
    wait_for,
)
from conftest import read_arrays

import trainkit.checkpoints

ROOT = Path(__file__).resolve().parent.parent
RECORD = "checkpoint_manager_snapshot.json"


# What decides is on storage.


@pytest.fixture
def run_of(small):
    """A function that makes the folder of a run with checkpoints of these names."""

    def make(*names, **changes):
        config = small(**changes)
        for name in names:
            folder = config.run_path / name
            folder.mkdir(parents=True)
            metadata = {"custom_metadata": dataclasses.asdict(config)}
            (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
        return config

    return make


FIRST, SECOND = "step_00000010", "step_00000020"


def test_what_is_half_written_or_refused_does_not_count(run_of):
    config = run_of(FIRST, SECOND, "step_00000030.orbax-tmp")
    trainkit.checkpoints.refuse(config, SECOND, ValueError())
    assert trainkit.checkpoints.list_saved(config) == [FIRST]
    assert trainkit.checkpoints.step_of(SECOND) == 20


# Each save has an outcome of its own.


@pytest.fixture
def checkpointer(small):
    """A Checkpointer outside of Ray."""
    config = small()
    config.run_path.mkdir(parents=True)
    return trainkit.checkpoints.Checkpointer(config)


def upload(saved) -> ray.train.Checkpoint:
    """What Ray's upload thread does."""
    return saved.finish(saved.checkpoint, "name")


def test_failed_save_is_seen_by_the_loop_and_by_rays_thread(checkpointer, monkeypatch):
    state = {"kernel": np.ones((8, 8), np.float32)}
    good = checkpointer.save(state, 10)
    checkpointer.wait()

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer.orbax, "wait_until_finished", full)
        patch.setattr(trainkit.checkpoints, "save_in_background", lambda *_, **__: None)
        bad = checkpointer.save(state, 20)
        for see in (lambda: upload(bad), checkpointer.wait) * 2:
            with pytest.raises(OSError, match="No space left"):
                see()
        with pytest.raises(OSError, match="No space left"):
            checkpointer.save(state, 30)
    assert upload(good).path.endswith(FIRST)
    assert trainkit.checkpoints.list_saved(checkpointer.config) == [FIRST]


def test_damaged_checkpoint_is_replaced_when_its_step_comes_again(
    checkpointer, monkeypatch
):
    """Under its name, which Ray has on record, so Ray isn't told again."""
    config, state = checkpointer.config, {"kernel": np.ones((8, 8), np.float32)}
    checkpointer.save(state, 10)
    checkpointer.wait()
    trainkit.checkpoints.refuse(config, FIRST, ValueError("DATA_LOSS"))
    assert trainkit.checkpoints.list_saved(config) == []
    monkeypatch.setattr(trainkit.checkpoints, "on_record", lambda: {FIRST})
    checkpointer.recorded = FIRST
    saved = checkpointer.save(jax.tree.map(lambda x: 2 * x, state), 10)
    checkpointer.wait()
    assert saved.checkpoint is None
    assert trainkit.checkpoints.list_saved(config) == [FIRST]
    (kernel,) = read_arrays(config.run_path / FIRST)
    assert (kernel == 2).all()
    # One that Ray doesn't know, as after its record was set aside, is reported.
    trainkit.checkpoints.refuse(config, FIRST, ValueError("DATA_LOSS"))
    monkeypatch.setattr(trainkit.checkpoints, "on_record", set)
    assert checkpointer.save(state, 10).checkpoint is not None
    checkpointer.wait()


def test_saves_between_evaluations(small, monkeypatch):
    """At the interval; and once, when Ray gives notice that a machine will go."""
    asked, notices = [], [None, None, "soon", "soon"]

    def notice():
        asked.append(1)
        return notices[len(asked) - 1]

    monkeypatch.setattr(ray.train, "get_preemption_info", notice)
    checkpointer = trainkit.checkpoints.Checkpointer(small(checkpoint_interval=25))
    due = [step for step in range(1, 101) if checkpointer.is_due(step)]
    assert due == [25, 30, 50, 75, 100]
    assert len(asked) == 3  # of ten steps; a second notice would be of the same machine
    never = trainkit.checkpoints.Checkpointer(small())
    asked[:] = []
    assert [step for step in range(1, 21) if never.is_due(step)] == []


@pytest.fixture
def alone(checkpointer, monkeypatch):
    """`restore` of a checkpointer in this process, and what it reports to Ray."""
    reports = []
    monkeypatch.setattr(
        ray.train,
        "report",
        lambda metrics, **options: reports.append((metrics, options)),
    )
    collective = ray.train.collective
    monkeypatch.setattr(collective, "broadcast_from_rank_zero", lambda value: value)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kernel = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=place)

    def restore(recorded: str | None = None):
        known = recorded and ray.train.Checkpoint(f"/anywhere/{recorded}")
        return checkpointer.restore(known, {"kernel": kernel}), list(reports)

    return restore


def save_steps(checkpointer, *steps) -> None:
    for step in steps:
        state = {"kernel": np.full((4, 2), step, np.float32)}
        checkpointer.save(state, step)
        checkpointer.wait()


def test_a_run_without_checkpoints_starts_anew_unless_all_are_refused(
    checkpointer, alone
):
    assert alone() == (None, [])
    save_steps(checkpointer, 10)
    trainkit.checkpoints.refuse(checkpointer.config, FIRST, ValueError())
    with pytest.raises(RuntimeError, match="No checkpoint in .* can be restored"):
        alone()


def test_the_newest_whole_checkpoint_is_restored_and_unknown_ones_are_reported(
    checkpointer, alone, capsys
):
    """In order, with the log's lines, as far as the log has them."""
    config = checkpointer.config
    save_steps(checkpointer, 10, 20, 25, 30)
    trainkit.checkpoints.refuse(config, "step_00000030", ValueError())
    lines = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (config.run_path / "metrics.jsonl").write_text(text)
    state, reports = alone(FIRST)
    assert (state["kernel"] == 25).all()
    lines = [{"val_loss": math.inf} | line for line in (lines[1], {"step": 25})]
    assert [metrics for metrics, _ in reports] == lines
    names = [options["checkpoint_dir_name"] for _, options in reports]
    assert names == [SECOND, "step_00000025"]
    assert [Path(o["checkpoint"].path).name for _, o in reports] == names
    assert all(o["checkpoint_upload_mode"].name == "NO_UPLOAD" for _, o in reports)
    assert "Continuing from" in capsys.readouterr().out
    assert checkpointer.recorded == FIRST
    assert len(alone("step_00000025")[1]) == 2  # Ray knows all, and is told nothing


def test_damage_is_noted_once_and_the_next_start_takes_the_one_before(
    checkpointer, alone, monkeypatch
):
    config = checkpointer.config
    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", lambda seconds: None)
    save_steps(checkpointer, 10, 20)
    for file in Path(config.run_path / SECOND).rglob("*"):
        if file.is_file() and file.name != "_CHECKPOINT_METADATA":
            file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(RuntimeError, match=f"(?s){SECOND}, which is damaged.*delete"):
        alone()
    note = (config.run_path / f"{SECOND}.refused").read_text()
    assert note.startswith(f"Cannot restore {config.run_path / SECOND}")
    state, _ = alone()
    assert (state["kernel"] == 10).all()


def test_at_most_three_differences_of_a_model_are_told():
    def tree(*widths):
        return {f"w{i}": np.ones((2, n)) for i, n in enumerate(widths)}

    check = trainkit.checkpoints.check_shapes
    check(tree(1, 2), tree(1, 2), "there")
    check({}, tree(1), "there")  # nothing at all is damage
    with pytest.raises(ValueError) as error:
        check(tree(1, 2, 3, 4), tree(1, 1, 1, 1), "there")
    assert str(error.value) == (
        "there is a checkpoint of another model: w1: found (2, 2), expected (2, 1); "
        "w2: found (2, 3), expected (2, 1); w3: found (2, 4), expected (2, 1). "
        "Choose another run_name."
    )
    with pytest.raises(ValueError, match=r"w2: found \(2, 3\), expected None \.\.\."):
        check(tree(2, 2, 3, 4), tree(1, 1), "there")
    assert trainkit.checkpoints.array_shapes({"a": {"b": np.ones((3, 1))}}) == {
        "a.b": (3, 1)
    }


def test_causes_end():
    """Even if errors name one another as their cause."""
    first, second = ValueError("first"), OSError("second")
    first.__cause__, second.__context__ = second, first
    assert trainkit.checkpoints.causes(first) == [first, second]
    assert trainkit.checkpoints.causes(None) == []
    assert trainkit.checkpoints.is_missing(FileNotFoundError("x"))
    assert not trainkit.checkpoints.is_missing(first)


# A disk that fills up.


def fill(left: int):
    """Harm that leaves so many bytes of the run's disk."""

    def harm(config):
        disk = os.statvfs(config.storage_path)
        with (Path(config.storage_path) / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - left)

    return harm


def times_of(config, name: str) -> list[int]:
    """When the files of a checkpoint were written."""
    files = sorted(Path(config.run_path / name).rglob("*"))
    return [file.stat().st_mtime_ns for file in files]


TURNS = [1, *(pytest.param(n, marks=pytest.mark.extra) for n in range(20) if n != 1)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", TURNS)
def test_disk_that_fills_up_while_saving(
    tutorial, cluster, undisturbed, tmp_path, turn
):
    """At any byte of any save; then there is room again, and the same cell is run again."""
    reference, finished = undisturbed(turn % 2 + 1)
    rng = np.random.default_rng()
    save = 12 * int(rng.integers(1, 7))
    files = Path(finished.checkpoint.path).rglob("*")
    left = int(rng.integers(0, 1.2 * sum(f.stat().st_size for f in files)))
    print(f"turn {turn}: {left} bytes are left when the run comes to step {save}")
    with disk_of(tmp_path / "disk", 24) as disk:
        config = dataclasses.replace(reference, storage_path=str(disk), max_failures=0)
        with in_the_background(tutorial.make_trainer(config).fit) as result:
            wait_for(lambda: at_step(save - 3)(config), what="the step")
            fill(left)(config)
            with contextlib.suppress(Exception):  # what it says is tested elsewhere
                result()
        (disk / "filler").unlink()
        newest = trainkit.checkpoints.list_saved(config)[:1]
        written = [times_of(config, name) for name in newest]
        assert tutorial.make_trainer(config).fit().error is None
        assert_equal_runs(config, reference)
        kept = [name for name in newest if (config.run_path / name).exists()]
        assert [times_of(config, name) for name in kept] == written[: len(kept)]


# Faults that pass.


ERRORS = [
    (OSError(errno.ESTALE, "Stale file handle"), False),
    (OSError(errno.ENOSPC, "No space left on device"), False),
    (ConnectionError("reset"), False),
    (ValueError("UNAVAILABLE: Error reading s3 object"), False),
    (ValueError("Error reading file: [OS error 5: EIO Input/output error]"), False),
    (MemoryError(), False),
    (ValueError("DATA_LOSS: checksum verification failed"), True),
    (ValueError("NOT_FOUND: chunk {0, 0} is missing"), False),
    (FileNotFoundError(errno.ENOENT, "No such file", "_METADATA"), False),
    (json.JSONDecodeError("Expecting value", "", 0), True),
]


@pytest.mark.parametrize("error, damage", ERRORS, ids=lambda x: str(x)[:30])
def test_what_is_damage_and_what_passes(error, damage):
    wrapped = RuntimeError("Encountered an error while reading")
    wrapped.__cause__ = error
    assert trainkit.checkpoints.is_damage(error) == damage
    assert trainkit.checkpoints.is_damage(wrapped) == damage


def test_patience(monkeypatch, capsys):
    """Three pauses; an error that another attempt can't help comes through at once."""
    pauses, calls = [], []
    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", pauses.append)

    def fail(times, error=None):
        calls.append(times)
        if len(calls) <= times:
            raise error or OSError("stale")
        return "done"

    assert trainkit.checkpoints.retry(fail, 3) == "done" and pauses == [1, 2, 4]
    assert "fail failed; again in 4 s (OSError: stale)" in capsys.readouterr().out
    calls.clear()
    with pytest.raises(OSError, match="stale"):
        trainkit.checkpoints.retry(fail, 4)
    calls.clear()
    with pytest.raises(KeyError):
        trainkit.checkpoints.retry(fail, 1, KeyError(), unless=(KeyError,))
    assert len(calls) == 1


def test_patience_for_what_cannot_be_seen(monkeypatch):
    """A minute, as file systems take; and what has come then is good."""
    pauses = []
    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", pauses.append)

    def see():
        if sum(pauses) < 60:
            raise ValueError("NOT_FOUND: chunk")
        return "seen"

    assert trainkit.checkpoints.retry(see) == "seen" and pauses[:3] == [1, 2, 4]


@pytest.mark.parametrize("late", [True, False])
def test_checkpoint_that_cannot_be_seen_is_not_condemned(
    checkpointer, monkeypatch, late
):
    """It is there after 40 s, or, with a sentence, may be deleted by hand."""
    config, state = checkpointer.config, {"kernel": np.ones((64, 64), np.float32)}
    checkpointer.save(state, 10)
    checkpointer.wait()
    folder, pauses = config.run_path / FIRST, []
    hidden = Path(f"{folder}-hidden")
    Path(folder, "d").rename(hidden)

    def sleep(seconds):
        pauses.append(seconds)
        if late and sum(pauses) > 40:
            hidden.rename(Path(folder, "d"))

    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", sleep)
    collective = ray.train.collective
    monkeypatch.setattr(collective, "broadcast_from_rank_zero", lambda value: value)
    monkeypatch.setattr(trainkit.checkpoints, "report_unrecorded", lambda *_: None)
    target = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, state))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), target
    )
    if late:
        restored = checkpointer.restore(None, target)
        np.testing.assert_array_equal(restored["kernel"], state["kernel"])
    else:
        with pytest.raises(
            FileNotFoundError, match=f"{FIRST} lacks files.*delete that"
        ):
            checkpointer.restore(None, target)
    assert sum(pauses) > 40 and not list(Path(config.run_path).glob("*.refused"))


def loop_in_which_reading_fails(tutorial, times: int):
    """The notebook's loop; rank 1 can't read a checkpoint, for so many attempts."""
    train_loop = tutorial.train_loop_per_worker

    def loop(settings):
        read, attempts = trainkit.checkpoints.read, []

        def read_later(*arguments, **options):
            attempts.append(1)
            if len(attempts) <= times:
                raise OSError(errno.ESTALE, "Stale file handle")
            return read(*arguments, **options)

        if ray.train.get_context().get_world_rank() == 1:
            trainkit.checkpoints.read = read_later
        try:
            train_loop(settings)
        finally:
            trainkit.checkpoints.read = read

    return loop


@pytest.fixture
def copy_of(undisturbed):
    """A function that copies the finished run of two workers under another name."""

    def copy(name: str, **changes):
        finished = undisturbed(2)[0]
        config = dataclasses.replace(finished, run_name=name, **changes)
        return copy_run(finished, config)

    return copy


def damage(checkpoint: Path) -> None:
    """Cut the largest of its files in half."""
    data = max(checkpoint.rglob("d/*"), key=lambda file: file.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)


@pytest.mark.slow
def test_damage_condemns_a_checkpoint_and_a_passing_fault_none(
    tutorial, cluster, copy_of
):
    config = copy_of("stale", max_steps=110)
    once = dataclasses.replace(config, max_failures=0)
    loop = loop_in_which_reading_fails(tutorial, 99)
    with pytest.raises(ray.train.TrainingFailedError, match="Stale file handle"):
        tutorial.make_trainer(once, loop).fit()
    assert not list(config.run_path.glob("*.refused"))

    # Read again, the newest turns out to be damaged. The one before it is used, and the run
    # goes far enough beyond it that Ray prunes both that one and the one in its place.
    damage(Path(config.run_path / trainkit.checkpoints.list_saved(config)[0]))
    loop = loop_in_which_reading_fails(tutorial, 2)
    assert tutorial.make_trainer(config, loop).fit().error is None
    assert not list(config.run_path.glob("*.refused"))  # it has been replaced
    assert [line["step"] for line in log_of(config)] == list(range(1, 111))
    saved = trainkit.checkpoints.list_saved(config)
    assert saved[0] == "step_00000110" and len(saved) <= 3
    newest = read_arrays(config.run_path / saved[0])
    assert all(np.isfinite(array).all() for array in newest)


@pytest.mark.extra
def test_best_checkpoint_is_never_a_refused_one(tutorial, cluster, copy_of):
    """It is refused within a run that goes on, and replaced when its step comes again."""
    config = copy_of("damaged")
    damage(Path(config.run_path / f"step_{72:08d}"))
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 72
    assert not list(config.run_path.glob("*.refused"))
    for checkpoint, _ in result.best_checkpoints:
        assert all(np.isfinite(array).all() for array in read_arrays(checkpoint.path))
    assert_equal_runs(config, dataclasses.replace(config, run_name="reference"))


@pytest.mark.extra
@pytest.mark.parametrize("harm", ["emptied", "lost", "too long"])
def test_record_is_made_anew_from_what_is_there(tutorial, cluster, copy_of, harm):
    config = copy_of(f"record-{harm.split()[0]}")
    record = config.run_path / RECORD
    if harm == "emptied":
        record.write_text("")
    elif harm == "lost":
        record.unlink()
    else:
        record.write_text(record.read_text().replace(f"step_{72:08d}", "step_00000084"))
    before = ray.train.Result.from_path(str(undisturbed_path(config)))
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 72
    losses = [
        sorted(metrics["val_loss"] for _, metrics in each.best_checkpoints)
        for each in (result, before)
    ]
    assert losses[0] == losses[1]
    assert_equal_runs(config, dataclasses.replace(config, run_name="reference"))


def undisturbed_path(config):
    return dataclasses.replace(config, run_name="reference").run_path


# Another run under the same name.


def test_another_model_is_told_by_its_shapes(checkpointer, monkeypatch):
    """As after a change of the notebook's model: nothing is refused."""
    config, state = checkpointer.config, {"kernel": np.ones((8, 8), np.float32)}
    checkpointer.save(state, 10)
    checkpointer.wait()
    collective = ray.train.collective
    monkeypatch.setattr(collective, "broadcast_from_rank_zero", lambda data: data)
    for other in ({"kernel": np.ones((8, 9))}, state | {"bias": np.ones(8)}):
        with pytest.raises(ValueError, match="of another model: (kernel|bias): found"):
            checkpointer.restore(None, other)
    assert not list(config.run_path.glob("*.refused"))


# A worker that hangs.

HANG = """
import ctypes, faulthandler, sys, time
sys.path.insert(0, sys.argv[1])
from trainkit.workers import watch

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

for step in range(5):
    watch(1.0)
    time.sleep(0.4)
if sys.argv[2] == "stopped":
    faulthandler.cancel_dump_traceback_later()
    time.sleep(2)
else:
    wait_in_c(30)
"""


def test_watchdog_ends_a_process_that_hangs_in_c():
    hanging, stopped = (
        subprocess.Popen(
            [sys.executable, "-c", HANG, ROOT, how], stderr=subprocess.PIPE, text=True
        )
        for how in ("hanging", "stopped")
    )
    said = hanging.communicate(timeout=60)[1]
    assert hanging.returncode == 1
    assert "Timeout" in said and "in wait_in_c" in said
    assert stopped.wait(60) == 0

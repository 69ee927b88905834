"""Every way to die: real processes, signals, and disks; the run ends as if undisturbed."""

import contextlib
import dataclasses
import errno
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import ray.train
from accidents import (
    Accidents,
    assert_equal_runs,
    at_step,
    disk_of,
    in_the_background,
    interrupt,
    kill,
    kill_controller,
    last_step,
    train_loop_of,
    wait_for,
)
from samples import python

import trainkit.checkpoints


def loop_that_cannot_read(tutorial, name: str):
    """The notebook's loop, in which the second worker can't read one of the checkpoints."""
    train_loop = train_loop_of(tutorial)

    def loop(settings):
        load = trainkit.checkpoints.load

        def load_others(config, found, target):
            if found == name:
                raise OSError(errno.ESTALE, "Stale file handle")
            return load(config, found, target)

        trainkit.checkpoints.PAUSES = (0.1,)
        if ray.train.get_context().get_world_rank() == 1:
            trainkit.checkpoints.load = load_others
        train_loop(settings)

    return loop


@pytest.mark.slow
def test_one_accident_after_the_other(tutorial, cluster, reference):
    """And the newest checkpoint can't be read once, by one of the workers.

    What a controller that is killed leaves is freed at the next launch, and nothing of yours.
    Ray's cleaner would do it, where it finds the cluster's dashboard.
    """
    config = dataclasses.replace(reference, run_name="accidents", max_steps=48)

    def saved(config) -> bool:  # and a few steps after that
        newest = trainkit.checkpoints.list_folders(config)[:1]
        return newest == ["step_00000024"] and last_step(config) >= 26

    def writing(config) -> bool:
        return last_step(config) >= 32 and any(config.run_path.glob("*tmp*"))

    happen = Accidents(config, (saved, kill(0)), (writing, kill_controller))
    loop = loop_that_cannot_read(tutorial, "step_00000024")
    with pytest.raises(ray.exceptions.ActorDiedError):  # `fit` says so
        tutorial.make_trainer(config, loop).fit()
    yours = ray.util.placement_group([{"CPU": 1}])
    result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()  # it goes on
    happen.join()
    all_but_yours = ray.cluster_resources()["CPU"] - 1

    def freed() -> bool:
        return ray.available_resources()["CPU"] == all_but_yours

    wait_for(freed, seconds=60, what="a free cluster")
    ray.util.remove_placement_group(yours)
    assert result.error is None and result.metrics["step"] == config.max_steps
    assert_equal_runs(config, reference)
    assert not any(config.run_path.glob("*tmp*"))
    assert max(happen.seconds) < 150  # measured: 23 to 31 s; machines are noisy


def preempt(rank: int):
    """Harm of a node that is taken away: SIGTERM, and soon after SIGKILL."""

    def harm(config):
        kill(rank, signal.SIGTERM)(config)
        time.sleep(0.3)
        with contextlib.suppress(ProcessLookupError):
            kill(rank)(config)

    return harm


@pytest.mark.slow
@pytest.mark.extra
def test_runs_killed_at_random(tutorial, cluster, reference, request):
    """Rank 0 and rank 1 in turn, at a random moment, in one of three ways, runs in a row.

    At last a worker is stopped, which the watchdog notices.
    """
    rng, kills = np.random.default_rng(), request.config.getoption("--random-kills")
    for run in range(kills + 1):
        config = dataclasses.replace(reference, run_name=f"random-{run}")
        rank, step = run % 2, int(rng.integers(1, 64))
        harm, low, high = (kill, preempt, interrupt)[run % 3](rank), 0, 150
        if run == kills:
            config = dataclasses.replace(config, stall_timeout_s=40.0)
            harm, low, high = kill(rank, signal.SIGSTOP), 40, 190
        print(f"run {run}: rank {rank} at step {step}")
        accident = Accidents(config, (at_step(step), harm))
        result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()
        accident.join()
        assert result.error is None and low <= max(accident.seconds) < high
        assert_equal_runs(config, reference)


HANG = """
import ctypes, faulthandler, sys, time
from trainkit.workers import watch

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

for step in range(5):
    watch(1.0)
    time.sleep(0.4)
if sys.argv[1] == "stopped":
    faulthandler.cancel_dump_traceback_later()
    time.sleep(2)
else:
    wait_in_c(30)
"""


def test_watchdog_ends_a_process_that_hangs_in_c():
    with pytest.raises(AssertionError, match=r"(?s)Timeout.*in wait_in_c"):
        python(HANG, "hanging")
    python(HANG, "stopped")


# Disks that fill up.


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
    """At any byte of any save; then there is room again, and the same cell is run again.

    The first turn is the last save of a short run.
    """
    reference, finished = undisturbed(turn % 2 + 1)
    rng = np.random.default_rng()
    save = 24 if turn == 1 else 12 * int(rng.integers(1, 7))
    files = Path(finished.checkpoint.path).rglob("*")
    left = int(rng.integers(0, 1.2 * sum(f.stat().st_size for f in files)))
    print(f"turn {turn}: {left} bytes are left when the run comes to step {save}")
    with disk_of(tmp_path / "disk", 24) as disk:
        config = dataclasses.replace(
            reference,
            storage_path=str(disk),
            max_failures=0,
            max_steps=24 if turn == 1 else reference.max_steps,
        )
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


def test_full_disk_while_preparing(tutorial, cluster, small, tmp_path):
    with disk_of(tmp_path / "disk", 0.1) as disk:
        config = small(data_dir=str(disk / "data"), val_fraction=0.1)
        with pytest.raises(OSError, match=f"data_dir: the disk of {disk} has no room"):
            tutorial.prepare_dataset(config)
        assert list(disk.iterdir()) == []

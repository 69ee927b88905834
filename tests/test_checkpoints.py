"""Save and restore, in this process, which is a worker of Ray Train's local mode."""

import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import ray.train
from accidents import disk_of, saved
from conftest import read_arrays
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer

from trainkit import checkpoints

FIRST, SECOND = "step_00000010", "step_00000020"


def as_worker(function):
    """What `function` returns, which Ray Train runs as its only worker."""
    scaling = ScalingConfig(num_workers=0)  # in this process, without a cluster
    return JaxTrainer(lambda: function(), scaling_config=scaling).fit().return_value


@pytest.fixture
def run(tutorial, small):
    """A run of one worker: its configuration, and functions to save and to restore.

    Each save stands for another start of the run, and Ray forgets it between them.
    """

    class Run:
        config = small(n_layer=1, vocab_size=64)
        mesh = tutorial.create_mesh(config)
        state = tutorial.create_state(config)

        def save(self, *steps):
            for step in steps:
                state = self.state._replace(step=jax.numpy.int32(step))
                metrics = {"step": step, "val_loss": 1.0}
                as_worker(
                    lambda: tutorial.save(self.config, state, step, metrics).result()  # noqa: B023
                )

        def restore(self, recorded: str = "", **changes):
            """The step of what is restored, and the names of what was reported."""
            config = dataclasses.replace(self.config, **changes)
            abstract = tutorial.abstract_state(config, self.mesh)
            found = recorded and ray.train.Checkpoint(config.run_path / recorded)
            with pytest.MonkeyPatch.context() as patch:
                reports = []
                patch.setattr(ray.train, "get_checkpoint", lambda: found)
                patch.setattr(
                    ray.train, "report", lambda *a, **k: reports.append((a, k))
                )
                state = as_worker(lambda: tutorial.restore(config, abstract))
            return state and int(state.step), reports

    return Run()


def test_what_is_saved_is_what_was_there(tutorial, run):
    """Though training goes on with donated buffers, which NumPy shares on a CPU."""
    expected = [np.array(x) for x in jax.tree.leaves(run.state)]
    windows = np.zeros((4, 17), np.uint16)

    def save_and_train():
        with jax.set_mesh(run.mesh):
            saving = tutorial.save(run.config, run.state, 0, {})
            for _ in range(3):
                run.state, _ = tutorial.train_step(run.state, windows, run.config)
            saving.result()

    as_worker(save_and_train)
    abstract = tutorial.abstract_state(run.config, run.mesh)
    state = as_worker(lambda: tutorial.restore(run.config, abstract))
    assert jax.tree.structure(state) == jax.tree.structure(run.state)
    for found, array in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.sharding.mesh == run.mesh


def test_the_newest_is_restored_and_ray_told_if_it_does_not_know(run):
    assert run.restore() == (None, [])
    run.save(10, 20)
    for name in (f"{SECOND}.orbax-checkpoint-tmp", "step_00000030-mine"):
        (run.config.run_path / name).mkdir()
    assert run.restore(SECOND) == (20, [])
    for recorded in ("", FIRST):
        step, [((metrics,), options)] = run.restore(recorded)
        assert step == metrics["step"] == 20 and metrics["val_loss"] == 1.0
        assert options["checkpoint_dir_name"] == SECOND
        checkpoint = options["checkpoint"]
        assert checkpoint.path == str(run.config.run_path / SECOND)
        assert options["checkpoint_upload_fn"](checkpoint, SECOND) is checkpoint
        assert not options["delete_local_checkpoint_after_upload"]


def test_another_recipe_is_refused(run):
    run.save(10)
    assert run.restore(FIRST, eval_interval=5, max_steps=99)[0] == 10
    with pytest.raises(
        ValueError, match="learning_rate was 0.01, is 0.1; seed was"
    ) as e:
        run.restore(learning_rate=0.1, seed=1)
    assert FIRST in e.value.__notes__[0] and "another run_name" in e.value.__notes__[0]


def cut_off(folder: Path) -> None:
    for data in folder.rglob("d/*"):
        half = data.read_bytes()[: data.stat().st_size // 2]
        data.unlink()  # and not in place: a process that still maps it would die
        data.write_bytes(half)


HARMS = {
    "half": cut_off,
    "no JSON": lambda folder: (folder / "_CHECKPOINT_METADATA").write_text("{"),
    "nothing": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_one_is_named_and_what_to_do(run, harm):
    run.save(10, 20)
    harm(Path(run.config.run_path / SECOND))
    with pytest.raises(Exception) as error:
        run.restore()
    (note,) = error.value.__notes__
    assert f"{run.config.run_path / SECOND}" in note
    assert "delete its folder, and Ray's record" in note
    shutil.rmtree(run.config.run_path / SECOND)
    assert run.restore()[0] == 10


def test_a_save_that_fails_says_so_to_all_who_wait(tutorial, small, run, tmp_path):
    """The loop, before its next save, and Ray's thread; what was saved before stays."""
    found = []

    def wait(saving):
        try:
            saving.result()
        except Exception as error:
            found.append(str(error))

    with disk_of(tmp_path / "disk", 4) as disk:
        run.config = dataclasses.replace(run.config, storage_path=str(disk))
        run.save(10)
        with (disk / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - 30_000)

        def fail():
            saving = tutorial.save(run.config, run.state, 20, {})
            threads = [threading.Thread(target=wait, args=[saving]) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait(saving)

        as_worker(fail)
        assert len(found) == 3 and all("No space left" in each for each in found)
        assert saved(run.config) == [FIRST] and run.restore(FIRST)[0] == 10


def test_a_model_in_a_checkpoint(tutorial, run):
    run.save(10)
    checkpoint = ray.train.Checkpoint(str(run.config.run_path / FIRST))
    model = checkpoints.load_model(tutorial.create_model, checkpoint)
    assert model.config == run.config
    for a, b in zip(
        jax.tree.leaves(model), jax.tree.leaves(run.state.model), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert len(read_arrays(run.config.run_path / FIRST)) > 2 * len(
        jax.tree.leaves(model)
    )


HOLD = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1], fallback_to_soft=False)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_one_launch_at_a_time(small, monkeypatch):
    """Another process holds the run, and is named, until it is killed."""
    monkeypatch.setattr(checkpoints, "_PATIENCE", 1)
    config = small()
    as_worker(lambda: checkpoints.lock_run(config))
    checkpoints._lock.release()
    command = [sys.executable, "-c", HOLD, str(config.run_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        holder.stdout.readline()
        words = f"run_name: .*/run is in use by process {os.getpid()} on .*, delete .*/run/lock"
        with pytest.raises(RuntimeError, match=words):
            as_worker(lambda: checkpoints.lock_run(config))
        holder.kill()
    as_worker(lambda: checkpoints.lock_run(config))
    checkpoints._lock.release()


def test_a_file_system_without_locks(small, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    as_worker(lambda: checkpoints.lock_run(small()))
    assert "has no locks: don't launch this run twice" in capsys.readouterr().out

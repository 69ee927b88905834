"""Save and restore, in this process, which is a worker of Ray Train's local mode."""

import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import ray.train
from accidents import disk_of, saved
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer

from trainkit import checkpoints

FIRST, SECOND = "step_00000010", "step_00000020"


def as_worker(function):
    """What `function` returns, which Ray Train runs as its only worker, in this process."""
    scaling = ScalingConfig(num_workers=0)
    return JaxTrainer(lambda: function(), scaling_config=scaling).fit().return_value


@pytest.fixture
def run(tutorial, small):
    """A run of one worker, and functions to save and to restore."""

    class Run:
        config = small(n_layer=1, vocab_size=64)
        mesh = tutorial.create_mesh(config)
        state = tutorial.create_state(config)

        def save(self, step: int):
            """Start to save; gives Orbax's handle."""
            state = self.state._replace(step=jax.numpy.int32(step))
            metrics = {"step": step, "val_loss": 1.0}
            return as_worker(lambda: tutorial.save(self.config, state, step, metrics))

        def restore(self, recorded: str = "", **changes):
            """The state, and what Ray, which has one checkpoint on record, is told."""
            config, reports = dataclasses.replace(self.config, **changes), []
            abstract = tutorial.abstract_state(config, self.mesh)
            found = recorded and ray.train.Checkpoint(config.run_path / recorded)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ray.train, "get_checkpoint", lambda: found)
                patch.setattr(
                    ray.train, "report", lambda *a, **k: reports.append((a, k))
                )
                return as_worker(lambda: tutorial.restore(config, abstract)), reports

    return Run()


def test_what_is_saved_is_what_was_there(tutorial, run):
    """Though training goes on with donated buffers, which NumPy shares on a CPU."""
    assert run.restore() == (None, [])
    expected = [np.array(x) for x in jax.tree.leaves(run.state)]
    windows, trained = np.zeros((4, 17), np.uint16), run.state
    with jax.set_mesh(run.mesh):
        saving = as_worker(lambda: tutorial.save(run.config, trained, 0, {}))
        for _ in range(3):
            trained, _ = tutorial.train_step(trained, windows, run.config)
        saving.result()
    state, _ = run.restore()
    assert jax.tree.structure(state) == jax.tree.structure(trained)
    for found, array in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.sharding.mesh == run.mesh


def test_the_newest_is_restored_and_ray_told_if_it_does_not_know(run):
    for step in (10, 20):
        run.save(step).result()
    for name in (f"{SECOND}.orbax-checkpoint-tmp", "step_00000030-mine"):
        (run.config.run_path / name).mkdir()
    state, reports = run.restore(SECOND)
    assert state.step == 20 and not reports
    for recorded in ("", FIRST):
        state, [((metrics,), options)] = run.restore(recorded)
        assert state.step == metrics["step"] == 20 and metrics["val_loss"] == 1.0
        checkpoint, name = options["checkpoint"], options["checkpoint_dir_name"]
        assert checkpoint.path == str(run.config.run_path / SECOND) and name == SECOND
        assert options["checkpoint_upload_fn"](checkpoint, SECOND) is checkpoint
        assert not options["delete_local_checkpoint_after_upload"]


def test_another_recipe_and_damage_are_named(run):
    """With what to do."""
    run.save(10).result()
    assert run.restore(FIRST, eval_interval=5, max_steps=99)[0].step == 10
    with pytest.raises(
        ValueError, match="learning_rate was 0.01, is 0.1; seed was"
    ) as e:
        run.restore(learning_rate=0.1, seed=1)
    assert FIRST in e.value.__notes__[0] and "another run_name" in e.value.__notes__[0]
    run.save(20).result()
    newest = Path(run.config.run_path / SECOND)
    for data in newest.rglob("d/*"):
        half = data.read_bytes()[: data.stat().st_size // 2]
        data.unlink()  # and not in place: a process that still maps it would die
        data.write_bytes(half)
    for _ in range(2):
        with pytest.raises(Exception) as e:
            run.restore()
        (note,) = e.value.__notes__
        assert f"{newest}" in note and "delete its folder, and Ray's record" in note
        shutil.rmtree(newest)
        newest.mkdir()  # and nothing in it
    newest.rmdir()
    assert run.restore()[0].step == 10


def test_a_save_that_fails_says_so_to_all_who_wait(run, tmp_path):
    """The loop, before its next save, and Ray's thread; what was saved before stays."""
    run.config = dataclasses.replace(run.config, storage_path=str(tmp_path / "disk"))
    with disk_of(tmp_path / "disk", 4) as leave, ThreadPoolExecutor(2) as threads:
        run.save(10).result()
        leave(30_000)
        saving = run.save(20)
        waiting = [threads.submit(saving.result) for _ in range(2)]
        for result in (*(each.result for each in waiting), saving.result):
            with pytest.raises(Exception, match="No space left"):
                result()
        assert saved(run.config) == [FIRST] and run.restore(FIRST)[0].step == 10


def test_one_launch_at_a_time(small, monkeypatch, capfd):
    """Who has the run is named, until it is killed; or the file system has no locks."""
    monkeypatch.setattr(checkpoints, "_PATIENCE", 1)
    config = small()

    def lock():
        as_worker(lambda: checkpoints.lock_run(config))
        checkpoints._lock.release()

    lock()
    command = ["flock", "-o", config.run_path / "lock", "sh", "-c", "echo; cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        holder.stdout.readline()
        words = f"run_name: .*/run is in use by process {os.getpid()} on .*, delete .*/run/lock"
        with pytest.raises(RuntimeError, match=words):
            lock()
        holder.kill()
    lock()
    full = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(full))
    lock()
    assert "has no locks: don't launch this run twice" in capfd.readouterr().out

"""What a launch continues, and that it has the run to itself."""

import errno
import fcntl
import os
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import ray.train
from accidents import as_worker
from orbax.checkpoint import v1 as orbax

from trainkit import launch, recipe, run_lock
from trainkit.config import TrainingConfig


@pytest.fixture
def config(small):
    return small()


TOKENS = {"train": "2,001 tokens, 0123", "val": "401 tokens, 4567"}


def save(run, **changes) -> str:
    """A checkpoint in the run's folder, of this configuration and these tokens."""
    path = run.run_path / "step_00000008_0123abcd"
    about = {"config": asdict(run), "tokens": TOKENS} | changes
    orbax.save(path, {"x": np.ones(3)}, custom_metadata=about)
    return str(path)


def test_keys_that_versions_add_and_remove(config):
    """Of a key that it lacks, a checkpoint has the default; another value is refused."""
    assert recipe.compare(config, TOKENS) is None and not config.run_path.exists()
    saved = asdict(config) | {"removed": 3}
    del saved["beta2"]
    path = save(config, config=saved)
    shutil.copytree(path, config.run_path / "step_00000016_0123abcd")
    (config.run_path / "step_00000016_0123abcd/commit_success.txt").unlink()
    assert recipe.compare(config, TOKENS) is None
    with pytest.raises(ValueError, match="run_name: .*beta2 was 0.95, is 0.9"):
        recipe.compare(replace(config, beta2=0.9), TOKENS)
    with pytest.raises(ValueError, match="val.bin was '401 tokens.*, is 'other'"):
        recipe.compare(config, TOKENS | {"val": "other"})


def test_what_a_branch_may_change(config):
    """All but shapes, the batch, and tokens. Its own checkpoints say where it began, so that
    it goes on without its parent.
    """
    parent = save(config)
    branch = replace(
        config, run_name="branch", branch_from=parent + "/", learning_rate=0.1
    )
    began = {"from": parent, "differs": ["learning_rate was 0.01, is 0.1"]}
    assert recipe.compare(branch, TOKENS) == began
    for changes, words in (
        ({"n_layer": 3, "n_embd": 64}, "n_layer was 2, is 3; n_embd was 32, is 64"),
        ({"batch_size": 8}, "batch_size was 4, is 8"),
        ({"init_from": "gpt2"}, "init_from was None, is 'gpt2'"),
    ):
        with pytest.raises(ValueError, match=f"branch_from: .*in these: {words}. Undo"):
            recipe.compare(replace(branch, **changes), TOKENS)
    with pytest.raises(ValueError, match="is of step 8: expected less than max_steps"):
        recipe.compare(replace(branch, max_steps=8), TOKENS)
    with pytest.raises(ValueError, match="branch_from: .* val.bin was '401 tokens"):
        recipe.compare(branch, TOKENS | {"val": "other"})
    save(branch, branch=began)
    shutil.rmtree(parent)
    for again in (branch, replace(branch, branch_from=None)):
        assert recipe.compare(again, TOKENS) == began
    with pytest.raises(ValueError, match="run_name: .*seed was 1337, is 2"):
        recipe.compare(replace(branch, seed=2), TOKENS)
    with pytest.raises(ValueError, match="branch_from: .*which began with .*, and not"):
        recipe.compare(replace(branch, branch_from="/elsewhere"), TOKENS)


def test_what_is_no_checkpoint_to_branch_from(config, tmp_path):
    """It is named before anything starts."""
    s3 = "s3://bucket/runs/a/step_00000008_2_0123abcd"
    for place in (tmp_path, tmp_path / "nowhere", s3):
        with pytest.raises(ValueError, match=f"branch_from: .* found none: {place}"):
            recipe.compare(replace(config, branch_from=str(place)), TOKENS)
    orbax.save(tmp_path / "line", {"x": np.ones(3)})  # such as step 2's
    with pytest.raises(ValueError, match="branch_from: .*line has no configuration"):
        recipe.compare(replace(config, branch_from=str(tmp_path / "line")), TOKENS)


@pytest.mark.parametrize(
    "name", ["step_00000008_2_0123abcd", "step_00000008_0123abcd", "step_00000008"]
)
def test_what_was_copied_from_another_storage_is_refused(config, name, monkeypatch):
    """Before anything is written: it would start over, beside checkpoints."""
    (config.run_path / name).mkdir(parents=True)
    if "_2_" not in name:  # a folder's, in a bucket
        monkeypatch.setattr(TrainingConfig, "run_path", config.run_path)
        config = replace(config, storage_path="s3://bucket/runs")
    with pytest.raises(ValueError, match=f"storage_path: .* has {name}, .*the form of"):
        launch._check_folder(config)


def test_a_space_in_gs_is_refused(config):
    """With which Ray would fail at the first save."""
    wrong = replace(config, storage_path="gs://bucket/runs", run_name="a b")
    with pytest.raises(ValueError, match="run_name: gs://bucket/runs/a b has a space"):
        launch._check_folder(wrong)


def test_a_jobs_copy_of_the_folder_keeps_no_runs(config):
    """Ray deletes it."""
    folder = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/storage"
    with pytest.raises(ValueError, match="storage_path: /tmp/ray.*a job's copy"):
        launch._check_folder(replace(config, storage_path=folder))


def test_the_first_worker_of_another_node_takes_no_lock(config, monkeypatch):
    """It would keep its own run waiting."""
    context = SimpleNamespace(get_world_rank=lambda: 2, get_local_rank=lambda: 0)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    run_lock.lock(config)
    assert not config.run_path.exists()


def test_a_run_that_diverged_in_a_bucket_is_refused_too(config, monkeypatch):
    monkeypatch.setattr(run_lock.paths, "is_object_store", lambda place: True)
    config.run_path.mkdir(parents=True)
    run_lock.note_divergence(config, "step 3")
    with pytest.raises(FloatingPointError, match="run diverged at step 3"):
        run_lock.wait_for_workers(config)


def test_one_launch_at_a_time(config, monkeypatch, capfd):
    """Who has the run is named; or that the file system has no locks."""
    monkeypatch.setattr(run_lock, "PATIENCE", 1)

    def lock() -> None:
        as_worker(lambda: run_lock.lock(config))
        run_lock._lock.release()

    run_lock.wait_for_workers(config)
    assert not config.run_path.exists()  # and this leaves nothing
    lock()
    log = config.run_path / "metrics.jsonl"
    log.touch()
    os.utime(log, (0, time.time() - 5_000))
    last = f"process {os.getpid()} on .*, whose last line is 5,00. s old"
    words = f"run_name: .*/run is in use by {last}.* delete .*/run/lock"
    with open(config.run_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for enter in (
            lock,
            partial(run_lock.wait_for_workers, config),
        ):  # worker, driver
            with pytest.raises(RuntimeError, match=words):
                enter()
            assert "is locked: waiting for 1 s" in capfd.readouterr().out
    run_lock.wait_for_workers(config)
    lock()

    def fail(number: int) -> None:
        def flock(*_) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        fail(number)
        lock()
        assert "has no locks: don't launch this run twice" in capfd.readouterr().out
    fail(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        lock()

"""Every way to die: real processes, real signals; the run ends as if nothing had happened."""

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from accidents import (
    Accidents,
    assert_equal_runs,
    at_step,
    copy_run,
    interrupt,
    kill,
    kill_controller,
    last_step,
    train_loop_of,
    wait_for,
    worker_of,
)

import trainkit.checkpoints
import trainkit.run_log

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


def preempt(config) -> None:
    """What a node does that is taken away: SIGTERM, and soon after SIGKILL."""
    pid = worker_of(config, 1)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)


def writing_a_checkpoint(config) -> bool:
    return last_step(config) >= 20 and any(config.run_path.glob("*tmp*"))


FEW = ((writing_a_checkpoint, kill(0)),)
MANY = (
    (at_step(3), kill(0)),  # before the first checkpoint
    *FEW,
    (at_step(34), preempt),
    (at_step(40), interrupt),
    (at_step(46), kill(1, signal.SIGSTOP)),  # which the watchdog notices
)


@pytest.mark.parametrize(
    "accidents", [FEW, pytest.param(MANY, marks=pytest.mark.extra)], ids=["few", "many"]
)
def test_one_accident_after_the_other(tutorial, cluster, reference, accidents):
    """One run that has to start again and again, and ends as if nothing had happened."""
    config = dataclasses.replace(
        reference,
        run_name=f"accidents-{len(accidents)}",
        max_failures=9,
        stall_timeout_s=40.0,
    )
    happen = Accidents(config, *accidents, (at_step(56), kill_controller))
    loop = train_loop_of(tutorial)
    with pytest.raises(ray.exceptions.ActorDiedError):  # `fit` says so
        tutorial.make_trainer(config, loop).fit()
    result = tutorial.make_trainer(config, loop).fit()  # called again, it goes on
    happen.join()
    assert result.error is None and result.metrics["step"] == config.max_steps
    assert_equal_runs(config, reference)
    if accidents is MANY:
        stopped = happen.seconds.pop(4) - config.stall_timeout_s
        assert 0 <= stopped < 150
    assert max(happen.seconds) < 150  # measured: 23 to 31 s; machines are noisy


@pytest.mark.extra
def test_runs_killed_at_random(tutorial, cluster, reference, request):
    """SIGKILL of rank 0 and of rank 1 in turn, at a random moment, runs in a row."""
    rng = np.random.default_rng()
    for run in range(request.config.getoption("--random-kills")):
        config = dataclasses.replace(reference, run_name=f"random-{run}")
        rank, step = run % 2, int(rng.integers(1, 64))
        print(f"run {run}: rank {rank} at step {step}")
        accident = Accidents(config, (at_step(step), kill(rank)))
        result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()
        accident.join()
        assert result.error is None and max(accident.seconds) < 150
        assert_equal_runs(config, reference)


def test_divergence_stops_the_run_and_keeps_the_checkpoint(
    tutorial, cluster, reference
):
    """72 good steps, then a learning rate that throws the parameters out of float32."""
    wild = {"learning_rate": 1e38, "min_learning_rate": 1e38, "grad_clip": 1e30}
    config = dataclasses.replace(
        reference, run_name="diverged", max_steps=300, log_interval=7, **wild
    )
    copy_run(reference, config)
    tutorial.make_trainer(config).fit()
    with pytest.raises(FloatingPointError, match="Diverged at step 7[3-9]"):
        trainkit.run_log.refuse_diverged(config)
    with pytest.raises(FloatingPointError, match="Diverged at step 7[3-9]"):
        tutorial.make_trainer(config).fit()  # a second start doesn't try again
    note = (config.run_path / "diverged.txt").read_text()
    assert re.search(r"Diverged at step 7[3-9]: .*(nan|inf).*step_00000072", note)
    assert trainkit.checkpoints.list_saved(config)[0] == "step_00000072"
    assert last_step(config) <= 73


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run(small, value):
    config = small()
    config.run_path.mkdir(parents=True)
    good = {"loss": 1.0, "grad_norm": 1.0}
    assert not trainkit.run_log.has_diverged(config, {6: good})
    assert trainkit.run_log.has_diverged(config, {7: good, 8: good | {"loss": value}})
    with pytest.raises(FloatingPointError, match="Diverged at step 8"):
        trainkit.run_log.refuse_diverged(config)


DRIVER = """
import sys, time
sys.path[:0] = {root!r}, {root!r} + "/ci"
import ray
from notebook_module import load_notebook
from trainkit.config import TrainingConfig
tutorial = load_notebook()
train_step = tutorial.train_step

def slow_train_step(*arguments):
    time.sleep(0.1)
    return train_step(*arguments)

tutorial.train_step = slow_train_step
config = TrainingConfig(**{settings!r})
ray.init({address!r}, runtime_env={{"py_modules": ["{root}/trainkit"]}})
result = tutorial.make_trainer(config).fit()
assert result.error is None, result.error
"""


def test_sigkill_of_the_driver(tutorial, cluster, reference):
    """Then the same cell is run again, and the run goes on."""
    config = dataclasses.replace(reference, run_name="driver")
    settings = dataclasses.asdict(config)
    address = ray.get_runtime_context().gcs_address  # the cluster stays
    script = DRIVER.format(root=str(ROOT), settings=settings, address=address)
    command = [sys.executable, "-c", script]
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    snapshot = config.run_path / "checkpoint_manager_snapshot.json"
    wait_for(
        lambda: snapshot.exists() and "step_" in snapshot.read_text(),
        what="a checkpoint that Ray has recorded",
    )
    first.send_signal(signal.SIGKILL)
    first.wait()  # its workers go on until Ray notices, for a second or so

    def quiet() -> bool:
        step = last_step(config)
        time.sleep(2)
        return last_step(config) == step

    wait_for(quiet, what="the end of the last worker")
    newest = trainkit.checkpoints.list_saved(config)[0]
    assert 12 <= trainkit.checkpoints.step_of(newest) < config.max_steps
    # The first driver's step was a slow one, and its program the same.
    assert tutorial.make_trainer(config).fit().error is None
    assert_equal_runs(config, reference)

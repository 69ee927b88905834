"""Every way to die: real processes, real signals; the run ends as if nothing had happened."""

import ctypes
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import ray
from accidents import (
    Accidents,
    assert_equal_runs,
    at_step,
    controller_of,
    kill,
    last_step,
    train_loop_of,
    wait_for,
    worker_of,
)
from flax import nnx

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def reference(tutorial, cluster, small_factory, write_bins, tmp_path_factory):
    """An undisturbed run."""
    config = small_factory(
        tmp_path_factory.mktemp("reference"),
        num_workers=2,
        n_layer=1,  # less to compile in each start
        dropout=0.1,
        max_steps=120,
        eval_interval=15,
        decay_steps=120,
        run_name="reference",
        stall_timeout_s=90.0,  # longer than a first step on a busy machine
        max_failures=2,
    )
    write_bins(config)
    assert tutorial.make_trainer(config).fit().error is None
    return config


def preempt(config) -> None:
    """What a node does that is taken away: SIGTERM, and soon after SIGKILL."""
    pid = worker_of(config, 1)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)


def writing_a_checkpoint(config) -> bool:
    return last_step(config) >= 44 and any(config.run_path.glob("*tmp*"))


def test_one_accident_after_the_other(tutorial, reference):
    """One run that has to start five times, and ends as if nothing had happened."""
    config = dataclasses.replace(
        reference, run_name="accidents", max_failures=4, stall_timeout_s=25.0
    )
    accidents = Accidents(
        config,
        (at_step(3), kill(0)),  # before the first checkpoint
        (writing_a_checkpoint, kill(0)),
        (at_step(62), preempt),
        (at_step(90), kill(1, signal.SIGSTOP)),  # which the watchdog notices
    )
    result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()
    accidents.join()
    assert result.error is None and result.metrics["step"] == config.max_steps
    assert_equal_runs(tutorial, config, reference)
    *killed, stopped = accidents.seconds
    assert max(killed) < 60  # measured: 23 to 29 s; machines are noisy
    assert config.stall_timeout_s <= stopped < config.stall_timeout_s + 60


def test_sigkill_of_the_controller(tutorial, reference):
    """`fit` says so; called again, it goes on where the run stopped."""
    config = dataclasses.replace(reference, run_name="controller")
    accident = Accidents(
        config,
        (at_step(50), lambda config: os.kill(controller_of(config), signal.SIGKILL)),
    )
    loop = train_loop_of(tutorial)
    with pytest.raises(ray.exceptions.ActorDiedError):
        tutorial.make_trainer(config, loop).fit()
    assert tutorial.make_trainer(config, loop).fit().error is None
    accident.join()
    assert_equal_runs(tutorial, config, reference)


def test_exception_in_the_training_function(tutorial, reference):
    """An exception that comes up in the middle of the loop, once."""
    config = dataclasses.replace(reference, run_name="exception")
    train_loop = tutorial.train_loop_per_worker

    def accident(thread: int, log: Path) -> None:
        while not log.exists() or log.read_text().count("\n") < 45:
            time.sleep(0.01)
        error = ctypes.py_object(ZeroDivisionError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    def loop(settings: dict) -> None:
        if ray.train.get_checkpoint() is None:
            arguments = (threading.get_ident(), config.run_path / "metrics.jsonl")
            threading.Thread(target=accident, args=arguments, daemon=True).start()
        train_loop(settings)

    result = tutorial.make_trainer(config, loop).fit()
    assert result.error is None
    assert_equal_runs(tutorial, config, reference)


def test_runs_killed_at_random(tutorial, reference, request):
    """SIGKILL of rank 0 and of rank 1 in turn, at a random moment, runs in a row."""
    rng = np.random.default_rng()
    for run in range(request.config.getoption("--random-kills")):
        config = dataclasses.replace(reference, run_name=f"random-{run}")
        rank, step = run % 2, int(rng.integers(1, 110))
        print(f"run {run}: rank {rank} at step {step}")
        accident = Accidents(config, (at_step(step), kill(rank)))
        result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()
        accident.join()
        assert result.error is None and max(accident.seconds) < 60
        assert_equal_runs(tutorial, config, reference)


def test_hang_names_the_step(tutorial, small, tmp_path):
    """The watchdog's message, from a process of its own."""
    script = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "ci")!r})
from notebook_module import load_notebook
dog = load_notebook().Watchdog(1.0)
for step in range(5):
    dog.beat(step)
    time.sleep(0.4)
time.sleep(60)
"""
    command = [sys.executable, "-u", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert "no progress for 1 s after step 4" in result.stdout


def test_divergence_stops_the_run_and_keeps_the_checkpoint(tutorial, reference):
    """20 good steps, then a learning rate that throws the parameters out of float32."""
    config = dataclasses.replace(
        reference, run_name="diverged", max_steps=20, log_interval=7
    )
    tutorial.make_trainer(config).fit()
    wild = {"learning_rate": 1e38, "min_learning_rate": 1e38, "grad_clip": 1e30}
    config = dataclasses.replace(config, max_steps=200, **wild)
    tutorial.make_trainer(config).fit()
    with pytest.raises(FloatingPointError, match="Diverged at step 2[1-9]"):
        tutorial.refuse_diverged(config)
    with pytest.raises(FloatingPointError, match="Diverged at step 2[1-9]"):
        tutorial.make_trainer(config)  # a second start doesn't try again
    note = (config.run_path / "diverged.txt").read_text()
    assert re.search(r"Diverged at step 2[1-9]: .*(nan|inf).*step_00000020", note)
    assert tutorial.saved_checkpoints(config)[0] == "step_00000020"
    assert last_step(config) <= 21


def test_bad_steps_are_skipped_up_to_a_bound(tutorial, small, capsys):
    config = small(max_skipped_steps=2)
    optimizer = tutorial.create_optimizer(config)
    params = nnx.State({"kernel": np.ones((2, 2), np.float32)})
    state = optimizer.init(params)
    bad, good = jax.tree.map(lambda p: np.nan * p, params), params
    for count, grads in [(1, bad), (2, bad), (0, good), (1, bad)]:
        updates, state = optimizer.update(grads, state, params)
        assert int(state.notfinite_count) == count
        assert (np.asarray(updates["kernel"]) == 0).all() == (grads is bad)
    metrics = {"loss": math.nan, "grad_norm": math.nan}
    config.run_path.mkdir(parents=True)
    assert not tutorial.diverged(config, {6: {"loss": 1.0, "grad_norm": 1.0}})
    assert not tutorial.diverged(config, {7: metrics | {"skipped_in_a_row": 2}})
    assert "step 7: skipped" in capsys.readouterr().out
    assert tutorial.diverged(config, {8: metrics | {"skipped_in_a_row": 3}})
    with pytest.raises(FloatingPointError, match="Diverged at step 8"):
        tutorial.refuse_diverged(config)


DRIVER = """
import sys
sys.path.insert(0, {ci!r})
from notebook_module import load_notebook
import ray
tutorial = load_notebook()
config = tutorial.TrainingConfig(**{settings!r})
ray.init("local", num_cpus=4)
result = tutorial.make_trainer(config).fit()
assert result.error is None, result.error
"""


def test_sigkill_of_the_driver(tutorial, reference, tmp_path):
    """Then the same program is run again: it goes on by itself and says from where."""
    config = dataclasses.replace(reference, run_name="driver")
    settings = dataclasses.asdict(config)
    script = DRIVER.format(ci=str(ROOT / "ci"), settings=settings)
    command = [sys.executable, "-c", script]
    first = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: last_step(config) >= 20, what="step 20")
    first.send_signal(signal.SIGKILL)
    first.wait()  # its workers go on until Ray notices, for a second or so
    second = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert second.returncode == 0, second.stderr[-3000:]
    said = second.stdout + second.stderr  # 15 to 105; at 120, it would have ended
    assert re.search(r"Going on from \S+step_00000(0[1-9]5|0[1-9]0|105)", said)
    assert_equal_runs(tutorial, config, reference)

"""The run's log: its lines, where they go, and what ends a run."""

import math
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import ray
from accidents import log_of, wait_for
from samples import python, run_from_guide

from trainkit import checkpoints, run_log, workers
from trainkit.config import TrainingConfig


@pytest.fixture
def log(monkeypatch):
    """A function that starts a log after a step, and what the watchdog was told."""
    logs, watched = [], []
    monkeypatch.setattr(workers, "watch", watched.append)

    def start(config, step: int = 0, send=None):
        config.run_path.mkdir(parents=True, exist_ok=True)
        state = SimpleNamespace(step=jax.numpy.int32(step))
        logs.append(run_log.RunLog(config, state, send))
        logs[-1].watched = watched
        return logs[-1]

    yield start
    for each in logs:
        each.close()


def metrics(loss: float = 1, grad_norm: float = 1, **others) -> dict:
    numbers = {"loss": loss, "grad_norm": grad_norm} | others
    return {name: np.float32(number) for name, number in numbers.items()}


def test_lines_have_the_last_step_the_tokens_and_the_speed(
    log, small, monkeypatch, capsys
):
    """Of lines that are three steps and then two apart, after a restart at step 7."""
    now = [100.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    config, sent = small(max_steps=12, log_interval=5, stall_timeout_s=77.0), []
    started = log(config, 7, sent.append)
    assert started.bar._x == 7
    steps = {8: metrics(5), 9: metrics(4), 10: metrics(3), 11: metrics(11)}
    steps[12] = metrics(12, grad_norm=2, val_loss=4)
    told = []
    for step, numbers in steps.items():
        now[0] += 0.25  # for 4 windows of 16 tokens
        told.append(started.add(step, numbers, step == 12))
    assert started.bar._x == 12 and started.watched == [77.0] * 5
    started.close()
    first = {"step": 10, "tokens": 640, "loss": 3, "grad_norm": 1, "tokens_per_s": 256}
    last = first | {"step": 12, "tokens": 768, "loss": 12, "grad_norm": 2}
    last["val_loss"] = 4
    assert log_of(config) == sent == [first, last]
    assert told == [None, None, first | {"val_loss": math.inf}, None, last]
    line = "step 10 | tokens 640 | grad_norm 1 | loss 3 | tokens_per_s 256"
    assert line in capsys.readouterr().out


def test_the_loop_stays_two_steps_ahead_of_the_device(log, small, monkeypatch):
    started, waited = log(small(log_interval=100)), []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for step in range(1, 6):
        started.add(step, {"loss": step}, False)
    assert waited == [None, None, {"loss": 1}, {"loss": 2}, {"loss": 3}]


def test_other_workers_write_nothing(log, small, monkeypatch, capsys):
    config, sent = small(), []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    line = log(config, 0, sent.append).add(1, metrics(2), True)
    assert (line["step"], line["loss"]) == (1, 2.0)
    assert not list(config.run_path.iterdir()) and not sent
    assert not capsys.readouterr().out


def test_log_forgets_what_comes_after_the_checkpoint(log, small):
    """And lines that can't be read, as of a disk that was full."""
    config = small()
    path = config.run_path / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    lines = [f'{{"step": {n}}}\n' for n in range(1, 6)]
    text = "".join([*lines[:2], "\0\0\0\n[]\n", *lines[2:], '{"step": 6, "lo'])
    path.write_text(text)
    log(config, 3)
    assert path.read_text() == "".join(lines[:3])
    log(config, 0)
    assert path.read_text() == ""


def test_an_object_is_written_whole_before_each_checkpoint_and_at_the_end(
    log, small, monkeypatch
):
    """So a restart from any checkpoint has all lines up to it, and a divergence all before.

    A folder plays the store: what is written is all there is. If it can't be written for a
    minute, the run ends, as if a checkpoint couldn't: nothing is skipped in silence.
    """
    config, pauses = small(), []
    monkeypatch.setattr(TrainingConfig, "remote", True)
    monkeypatch.setattr(checkpoints.time, "sleep", pauses.append)

    started = log(config)
    started.add(1, metrics(2), False)
    assert [*checkpoints.read_log(config)] == []
    started.add(2, metrics(2), True)  # between two evaluations
    assert [*checkpoints.read_log(config)] == [1, 2]
    again = log(config, 2)
    again.add(3, metrics(2), False)
    again.add(4, metrics(math.nan), False)
    assert again.diverged
    again.close()
    assert [*checkpoints.read_log(config)] == [1, 2, 3] and not pauses
    path, again.file.path = again.file.path, config.run_path
    with pytest.raises(IsADirectoryError):
        again.add(5, metrics(2), True)
    assert sum(pauses) > 60
    again.file.path = path


OPEN_BAR = """
import atexit
from ray.experimental import tqdm_ray
from tqdm import tqdm
atexit.register(lambda: print(bar.disable))  # after what is registered later
import trainkit.run_log
tqdm_ray.tqdm(desc="of a worker that is killed", total=10).update(3)
(bar,) = tqdm._instances
"""


def test_a_bar_that_is_open_at_the_end_does_no_harm():
    """It is closed. Python 3.13 would end with a segmentation fault."""
    assert python(OPEN_BAR) == "True\n"


@pytest.mark.parametrize("name", ["loss", "grad_norm", "val_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_ends_the_run(log, small, name, value):
    """The note has the step, the numbers, and where to go on from.

    Or the checkpoint would be the best: NaN sorts before any number.
    """
    config = small(log_interval=3)
    started = log(config, 3)
    (config.run_path / "step_00000004").mkdir()
    for step in range(4, 10):
        wrong = {name: value} if step == 8 else {}
        line = started.add(step, metrics(**wrong), False)
    assert line is None and started.diverged
    match = f"step 8: .*'{name}': {value}.*: step_00000004. To try again, delete"
    with pytest.raises(FloatingPointError, match=match):
        run_log.refuse_diverged(config)
    assert [line["step"] for line in log_of(config)] == [6]


PLACES = [
    ("wandb", "wandb.finish()", "run-*.wandb"),
    ("tensorboardX", "writer.close()", "tensorboard/*"),
    ("mlflow", "mlflow.end_run()", "metrics/val_loss"),
]


@pytest.mark.parametrize("module, close, file", PLACES)
def test_the_guide_sends_lines(small, tmp_path, monkeypatch, module, close, file):
    """Of each, there is a file: W&B is offline here, and MLflow's server is a folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    names = {"config": small(), "__name__": "__main__"}
    run_from_guide(module, names)["SERVER"] = f"{tmp_path}/mlflow"
    send = ray.cloudpickle.loads(ray.cloudpickle.dumps(names["send"]))  # to a worker
    send({"step": 1, "tokens": 64, "loss": 1.0, "val_loss": 2.0})
    eval(close, send.__globals__)
    (found,) = tmp_path.rglob(file)
    written = b" 2.0 1" if module == "mlflow" else b"loss"
    wait_for(lambda: written in found.read_bytes(), what="what a process writes")


def test_an_observer_cannot_end_what_it_observes(capsys):
    """By an error, or because it hangs."""
    seen = []

    def send(line):
        seen.append(step := line.pop("step"))
        if step == 2:
            raise ConnectionError("gone")
        if step == 4:
            time.sleep(600)

    observer = run_log.Observer(send)
    for step in (1, 2, 3, 4, 5):
        observer.lines.put({"step": step})
    wait_for(lambda: len(seen) == 4, seconds=60, what="the lines")
    observer.close(seconds=0.5)
    assert observer.thread.is_alive() and observer.thread.daemon
    assert seen == [1, 2, 3, 4]
    assert "send failed at step 2; the run continues" in capsys.readouterr().out

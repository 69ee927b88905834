"""The run's log: its lines, where they go, and what ends a run."""

import json
import math
import os
import re
import signal
import struct
from types import SimpleNamespace

import jax
import pytest
from accidents import in_the_background, last_step, log_of, wait_for
from samples import python, run_from_guide
from tensorboardX.proto import event_pb2

from trainkit import run_log


@pytest.fixture
def log():
    """A function that starts a log after a step."""
    logs = []

    def start(config, step: int = 0, send=None):
        config.run_path.mkdir(parents=True, exist_ok=True)
        logs.append(run_log.RunLog(config, step, send).__enter__())
        return logs[-1]

    yield start
    for each in logs:
        each.__exit__()


def metrics(loss: float = 1, grad_norm: float = 1, **others) -> dict:
    numbers = {"loss": loss, "grad_norm": grad_norm} | others
    return {name: jax.numpy.float32(number) for name, number in numbers.items()}


def test_lines_have_the_last_step_the_tokens_and_the_speed(
    log, small, monkeypatch, capfd
):
    """Of lines that are three steps and then two apart, after a restart at step 7."""
    now = [100.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    config, sent = small(max_steps=12, log_interval=5), []
    started = log(config, 7, sent.append)
    line = (
        "run continues at step 7 | devices 1 | mesh 1 x 1 x 1 | batch 4 | per device 4"
    )
    assert line in capfd.readouterr().out
    steps = {8: metrics(5), 9: metrics(4), 10: metrics(3), 11: metrics(11)}
    steps[12] = metrics(12, grad_norm=2, val_loss=4)
    told = []
    for step, numbers in steps.items():
        now[0] += 0.25  # for 4 windows of 16 tokens
        told.append(started.add(step, numbers, step == 12))
    first = {"step": 10, "tokens": 640, "loss": 3, "grad_norm": 1, "tokens_per_s": 256}
    last = first | {"step": 12, "tokens": 768, "loss": 12, "grad_norm": 2}
    last["val_loss"] = 4
    assert log_of(config) == sent == [first, last]
    assert told == [None, None, first | {"val_loss": math.inf}, None, last]
    line = "step 10 | tokens 640 | grad_norm 1 | loss 3 | tokens_per_s 256"
    assert line in capfd.readouterr().out
    log(small(run_name="another"))
    assert "another is new | " in capfd.readouterr().out


def test_the_loop_stays_two_steps_ahead_of_the_device(log, small, monkeypatch):
    started, waited = log(small(log_interval=100)), []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for step in range(1, 6):
        started.add(step, {"loss": step}, False)
    assert waited == [None, None, {"loss": 1}, {"loss": 2}, {"loss": 3}]


def test_other_workers_write_nothing(log, small, monkeypatch, capfd):
    config, sent = small(), []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    line = log(config, 0, sent.append).add(1, metrics(2), True)
    assert (line["step"], line["loss"]) == (1, 2.0)
    assert not list(config.run_path.iterdir()) and not sent
    assert not capfd.readouterr().out


def test_each_step_is_in_the_log_once(log, small):
    """What comes after the checkpoint goes, and what a full disk has cut off."""
    config = small()
    config.run_path.mkdir(parents=True)
    lines = [json.dumps({"step": n}) for n in range(1, 6)]
    text = "\n".join([*lines[:2], "\0\0\0", *lines[2:], '{"step": 6, "lo'])
    (config.run_path / "metrics.jsonl").write_text(text)
    log(config, 3).add(4, metrics(2), False)
    assert [line["step"] for line in log_of(config)] == [1, 2, 3, 4]
    assert "loss" in log_of(config)[-1]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "val_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_ends_the_run(log, small, name, value):
    """Or the checkpoint would be the best: NaN sorts before any number."""
    config = small(log_interval=3)
    started = log(config, 3)
    for step in range(4, 9):
        wrong = {name: value} if step == 8 else {}
        started.add(step, metrics(**wrong), False)
    with pytest.raises(FloatingPointError, match=f"at step 8: .*{name} {value}.*Lower"):
        started.add(9, metrics(), True)
    assert [line["step"] for line in log_of(config)] == [6]


def test_send_cannot_end_what_it_observes(log, small, capfd):
    def send(line):
        line.clear()
        raise ConnectionError("gone")

    line = log(small(), 0, send).add(1, metrics(2), True)
    said = "send failed at step 1; the run continues: ConnectionError('gone')"
    assert said in capfd.readouterr().out and line["loss"] == 2


OPEN_BAR = """
import atexit
from ray.experimental import tqdm_ray
from tqdm import tqdm
atexit.register(lambda: print([x for x in bars if not x.disable]))  # after the others
import gc, trainkit.run_log
tqdm_ray.tqdm(desc="of a worker that is killed", total=10).update(3)
bars = [x for x in gc.get_objects() if issubclass(type(x), tqdm)]
print(len(bars))
"""


def test_a_bar_that_is_open_at_the_end_does_no_harm():
    """It is closed. Python 3.13 would end with a segmentation fault."""
    assert python(OPEN_BAR) == "1\n[]\n"


HANG = """
import ctypes, sys, time
sys.path.insert(0, "tests")
from pathlib import Path
from conftest import small_config
from trainkit.run_log import RunLog

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

config = small_config(Path(sys.argv[1]), stall_timeout_s=3.0)
config.run_path.mkdir(parents=True)
with RunLog(config, 0) as log:
    for step in range(1, 5):
        time.sleep(1)
        log.add(step, {"loss": 1.0}, False)
time.sleep(4)
print("outside, nothing is watched", flush=True)
with RunLog(config, 4) as log:
    wait_in_c(60)
"""


def test_watchdog_ends_a_process_that_hangs_in_c(tmp_path):
    words = r"(?s)outside, nothing is watched.*Timeout.*in wait_in_c"
    with pytest.raises(AssertionError, match=words):
        python(HANG, tmp_path)


def steps_of_wandb(written: bytes) -> list[int]:
    """In its log of protocol buffers: the value of `step`, after its length."""
    found = re.findall(rb"\x04step\x82\x01(.)(\d+)", written, re.DOTALL)
    return [int(digits[: length[0]]) for length, digits in found]


def steps_of_tensorboard(written: bytes) -> list[int]:
    """In its records: length, checksum, event, checksum."""
    steps = []
    while written:
        (length,) = struct.unpack("<Q", written[:8])
        steps.append(event_pb2.Event.FromString(written[12 : 12 + length]).step)
        written = written[16 + length :]
    return steps


def steps_of_mlflow(written: bytes) -> list[int]:
    """In a line each: time, value, step."""
    return [int(line.split()[2]) for line in written.splitlines()]


TRACKERS = {
    "wandb": ("run-*.wandb", steps_of_wandb),
    "tensorboardX": ("tensorboard/*", steps_of_tensorboard),
    "mlflow": ("metrics/loss", steps_of_mlflow),
}


@pytest.mark.extra
@pytest.mark.parametrize("module", TRACKERS)
def test_trackers_get_the_lines(tutorial, cluster, small, write_bins, tmp_path, module):
    """By the guide's functions, though a worker is killed between, and up to the last step.

    W&B is offline here, and MLflow's server is a folder.
    """
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    places |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow"}
    places |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
    config = write_bins(small(n_layer=1, max_steps=30, run_name=module))

    def launch(config, loop):
        trainer = tutorial.make_trainer(config, loop)
        trainer.run_config.worker_runtime_env["env_vars"] |= places
        return SimpleNamespace(fit=lambda: trainers.append(trainer))

    trainers, names = [], vars(tutorial) | {"config": config, "make_trainer": launch}
    run_from_guide(f"import {module}", names)
    with in_the_background(trainers[0].fit) as result:
        wait_for(lambda: last_step(config) >= 13, pause=0.005, what="step 13")
        pid = (config.run_path / "locked-by.txt").read_text().split()[1]
        os.kill(int(pid), signal.SIGKILL)
        assert result().error is None
    assert [line["step"] for line in log_of(config)] == list(range(1, 31))
    pattern, steps_of = TRACKERS[module]
    steps = [
        step for path in tmp_path.rglob(pattern) for step in steps_of(path.read_bytes())
    ]
    print(sorted(steps))
    assert {*steps} >= set(range(21, 31))

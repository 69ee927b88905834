"""The run's log: its lines, where they go, and what ends a run."""

import json
import math
import os
import re
import signal
from contextlib import ExitStack
from types import SimpleNamespace

import jax
import pytest
from accidents import in_the_background, last_step, log_of, wait_for
from samples import python, run_from_guide

from trainkit import run_log


@pytest.fixture
def log():
    """A function that starts a log after a step."""
    with ExitStack() as stack:

        def start(config, step: int = 0, send=None):
            config.run_path.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(run_log.RunLog(config, step, send))

        yield start


def metrics(loss: float = 1, grad_norm: float = 1, **others) -> dict:
    numbers = {"loss": loss, "grad_norm": grad_norm} | others
    return {name: jax.numpy.float32(number) for name, number in numbers.items()}


def test_lines_after_a_restart(log, small, monkeypatch, capfd):
    """Every third step and at a save: the last step's numbers, tokens, and the speed.

    Later lines than the checkpoint's go, and what a full disk has cut off.
    """
    now, told, sent = [100.0], [], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    config = small(max_steps=12, log_interval=5)
    old = [json.dumps({"step": step}) for step in (5, 7, 10)]
    config.run_path.mkdir(parents=True)
    text = "\n".join([old[0], "\0\0", *old[1:], '{"step": 11, "lo'])
    (config.run_path / "metrics.jsonl").write_text(text)
    started = log(config, 7, sent.append)
    steps = {8: metrics(5), 9: metrics(4), 10: metrics(3), 11: metrics(11)}
    steps[12] = metrics(12, grad_norm=2, val_loss=4)
    for step, numbers in steps.items():
        now[0] += 0.25  # for 4 windows of 16 tokens
        told.append(started.add(step, numbers, step == 12))
    first = {"step": 10, "tokens": 640, "loss": 3, "grad_norm": 1, "tokens_per_s": 256}
    last = first | {"step": 12, "tokens": 768, "loss": 12, "grad_norm": 2}
    last["val_loss"] = 4
    assert sent == [first, last]
    assert log_of(config) == [{"step": 5}, {"step": 7}, first, last]
    assert told == [None, None, first | {"val_loss": math.inf}, None, last]
    log(small(run_name="another"))
    said = capfd.readouterr().out
    for line in (
        "run continues at step 7 | devices 1 | mesh 1 x 1 x 1 | batch 4 | per device 4",
        "step 10 | tokens 640 | grad_norm 1 | loss 3 | tokens_per_s 256",
        "another is new | devices 1",
    ):
        assert line in said


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


def test_a_bar_that_is_open_at_the_end_does_no_harm():
    """As that of a worker that was killed: Python 3.13 would end with a crash."""
    bar = "from tqdm import tqdm; import trainkit.run_log; bar = tqdm(total=10)"
    late = (
        "import atexit; atexit.register(lambda: print(bar.disable))"  # after the others
    )
    assert python(f"{late}; {bar}") == "True\n"


HANG = """
import ctypes, sys, time
from trainkit.config import TrainingConfig
from trainkit.run_log import RunLog

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

places = {"storage_path": sys.argv[1], "run_name": "run"}
config = TrainingConfig(**places, stall_timeout_s=3.0)
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


TRACKERS = {  # what each writes, and where a step of two digits is in it
    "wandb": ("run-*.wandb", rb"\x04step\x82\x01\x02(\d\d)", int),
    "tensorboardX": ("tensorboard/*", rb"\x09.{8}\x10(.)\x2a", ord),
}


@pytest.mark.extra
@pytest.mark.parametrize("module", TRACKERS)
def test_trackers_get_the_lines(tutorial, cluster, small, write_bins, tmp_path, module):
    """By the guide's functions, though a worker is killed between, and up to the last step."""
    config = write_bins(small(n_layer=1, max_steps=30, run_name=module))

    def launch(config, loop):
        trainers.append(tutorial.make_trainer(config, loop))
        places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
        trainers[0].run_config.worker_runtime_env["env_vars"] |= places
        return SimpleNamespace(fit=lambda: None)

    trainers, names = [], vars(tutorial) | {"config": config, "make_trainer": launch}
    run_from_guide(f" {module}", names)
    with in_the_background(trainers[0].fit) as result:
        wait_for(lambda: last_step(config) >= 13, pause=0.005, what="step 13")
        pid = (config.run_path / "locked-by.txt").read_text().split()[1]
        os.kill(int(pid), signal.SIGKILL)
        assert result().error is None
    assert [line["step"] for line in log_of(config)] == list(range(1, 31))
    files, pattern, number = TRACKERS[module]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob(files))
    found = {number(digits) for digits in re.findall(pattern, written, re.DOTALL)}
    assert found >= set(range(21, 31)), found

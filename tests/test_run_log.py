"""The run's log: its lines, where they go, and what ends a run."""

import json
import os
import re
import signal

import numpy as np
import pytest
from accidents import as_worker, in_the_background, last_step, log_of, wait_for
from samples import python, run_from_guide

from trainkit import run_log


def test_lines_after_a_restart(small, monkeypatch, capfd):
    """Every fifth step and at a save: the last step's numbers, tokens, and the speed.

    Later lines than the checkpoint's go, and what was cut off. What `send` does with a line
    changes nothing, and its error doesn't end the run.
    """
    now, told, sent = [100.0], [], []
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])

    def send(line: dict) -> None:
        sent.append(dict(line))
        line.clear()
        raise ConnectionError("gone")

    config = small(max_steps=12, log_interval=5)
    old = [json.dumps({"step": step}) for step in (5, 7, 10)] + ["\0\0", '{"step": 1']
    config.run_path.mkdir(parents=True)
    (config.run_path / "metrics.jsonl").write_text("\n".join(old))

    def loop() -> None:
        with run_log.RunLog(config, 7, send) as log:
            for step in range(8, 13):
                now[0] += 0.25  # for 4 windows of 16 tokens
                evaluated = {"val_loss": 4.0} if step == 12 else {}
                told.append(log.add(step, {"loss": 2.0 * step} | evaluated, step == 12))

    as_worker(loop)
    first = {"step": 10, "tokens": 640, "loss": 20, "tokens_per_s": 256}
    last = {"step": 12, "tokens": 768, "loss": 24, "val_loss": 4, "tokens_per_s": 256}
    assert sent == [first, last]
    assert log_of(config) == [{"step": 5}, {"step": 7}, first, last]
    assert told == [None, None, first, None, last]
    said = capfd.readouterr().out
    for line in (
        "run continues at step 7, with the same settings and tokens; code isn't compared"
        " | devices 1 | mesh 1 x 1 x 1 | batch 4 | per device 4",
        "step 10 | tokens 640 | loss 20 | tokens_per_s 256",
        "send failed at step 12; the run continues: ConnectionError('gone')",
    ):
        assert line in said


def test_a_line_is_appended_and_metrics_are_scalars(small):
    """A day of lines isn't written anew at each step."""
    config = small(log_interval=1)
    config.run_path.mkdir(parents=True)
    files = []

    def loop() -> None:
        with run_log.RunLog(config, 0) as log:
            for step in (1, 2):
                log.add(step, {"loss": 1.0}, False)
                files.append(os.stat(config.run_path / "metrics.jsonl").st_ino)
            with pytest.raises(ValueError, match=r"found norms of shape \(3,\)"):
                log.add(3, {"loss": 1.0, "norms": np.ones(3)}, False)

    as_worker(loop)
    assert [line["step"] for line in log_of(config)] == [1, 2]
    assert files[0] == files[1] == os.stat(config.run_path / "metrics.jsonl").st_ino


HANG = """
import ctypes, sys, time
sys.path.append("tests")
from accidents import as_worker
from trainkit.config import TrainingConfig
from trainkit.run_log import RunLog

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

config = TrainingConfig(storage_path=sys.argv[1], run_name="run", stall_timeout_s=3.0)
config.run_path.mkdir(parents=True)

def loop():
    with RunLog(config, 0) as log:
        for step in range(1, 5):
            time.sleep(1)
            log.add(step, {"loss": 1.0}, False)
    time.sleep(4)
    print("outside, nothing is watched", flush=True)
    with RunLog(config, 4) as log:
        wait_in_c(60)

as_worker(loop)
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

    def make_trainer(config, loop):
        trainer = tutorial.make_trainer(config, loop)
        places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
        trainer.run_config.worker_runtime_env["env_vars"] |= places
        return trainer

    names = vars(tutorial) | {"run": config, "make_trainer": make_trainer}
    with in_the_background(lambda: run_from_guide(f" {module}", names)) as finish:
        wait_for(lambda: last_step(config) >= 13, pause=0.005, what="step 13")
        pid = (config.run_path / "locked-by.txt").read_text().split()[1]
        os.kill(int(pid), signal.SIGKILL)
        finish()
    assert [line["step"] for line in log_of(config)] == list(range(1, 31))
    files, pattern, number = TRACKERS[module]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob(files))
    found = {number(digits) for digits in re.findall(pattern, written, re.DOTALL)}
    assert found >= set(range(21, 31)), found

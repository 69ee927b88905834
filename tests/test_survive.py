"""examples/survive.py, the page's steps 1 and 2 as one file, in an empty folder."""

import contextlib
import os
import signal
import subprocess
import sys

import pandas as pd
import psutil
import pytest
from accidents import wait_for
from conftest import ROOT

ENVIRONMENT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_ADDRESS": "local"}


def workers_of(driver: int) -> list[psutil.Process]:
    """The workers of a run, which are processes of Ray, as its driver's descendants."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RayTrainWorker" in process.name() + " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
def test_a_worker_and_then_the_driver_are_killed(tmp_path):
    """Each time, the run continues from its newest checkpoint, with the same losses."""
    program = (ROOT / "examples/survive.py").read_text()
    assert program.count("steps=24") == 1
    program = program.replace("steps=24", "steps=120")
    pause = (
        "        if step % 8 == 0 or"  # or the run would be over before it is killed
    )
    assert program.count(pause) == 1
    program = program.replace(pause, f"        __import__('time').sleep(0.05)\n{pause}")
    (tmp_path / "mine.py").write_text(program)
    folder = tmp_path / "storage/my-run"

    def saved() -> int:
        return max((int(p.name[5:]) for p in folder.glob("step_????????")), default=0)

    def goes_on() -> bool:
        ended = driver.poll() is not None
        found = "continues at step" in said.read_text()
        assert found or not ended, said.read_text()
        return found

    command = [sys.executable, "mine.py"]
    options = {"cwd": tmp_path, "env": os.environ | ENVIRONMENT, "text": True}
    said = tmp_path / "said"
    with (
        said.open("w") as out,
        subprocess.Popen(command, stdout=out, **options) as driver,
    ):
        try:
            wait_for(lambda: saved() >= 16, what="two checkpoints")
            workers_of(driver.pid)[-1].send_signal(signal.SIGKILL)
            wait_for(goes_on, what="a second try")
            left = psutil.Process(driver.pid).children(recursive=True)
        finally:
            driver.kill()
        for process in left:  # a driver that is killed leaves them
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0 and "continues at step" in done.stdout, done.stdout
    # Of fifteen, two are kept, and what no driver had time to record.
    assert 2 <= len([*folder.glob("step_????????")]) <= 5
    losses = pd.read_csv(folder / "losses.csv", names=["step", "loss"])
    begun = losses.step[losses.step.diff() != 1].tolist()
    assert all(step % 8 == 1 for step in begun)
    assert losses.step.iloc[-1] == 120 == losses.step.nunique()
    assert losses.groupby("step").loss.nunique().max() == 1

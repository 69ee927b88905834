"""examples/survive.py, the page's steps 1 and 2 as one file, in an empty folder."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import numpy as np
import pandas as pd
import places
import psutil
import pytest
from accidents import wait_for
from conftest import ROOT
from etils import epath
from orbax.checkpoint import v1 as orbax

from trainkit import s3

ENVIRONMENT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_ADDRESS": "local"}
STEPS = 72


def program(folder: Path, *edits: tuple[str, str]) -> str:
    """The file, with more and slower steps, whose losses go to a file; and with edits."""
    text = (ROOT / "examples/survive.py").read_text()
    said, pause = '        print(f"step {step} |', "        if step % 8 == 0 or"
    keep = f"        with open('{folder}/losses.csv', 'a') as file:\n"
    keep += "            print(step, loss, sep=',', file=file)\n"
    for old, new in (
        ("steps=24", f"steps={STEPS}"),
        (pause, f"        __import__('time').sleep(0.05)\n{pause}"),
        (said, keep + said),
        ("ray.init()", "ray.init(include_dashboard=False)"),  # it takes long
        *edits,
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def workers_of(driver: int) -> list[psutil.Process]:
    """The workers of a run, which are processes of Ray, as its driver's descendants."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RayTrainWorker" in process.name() + " ".join(process.cmdline()):
                found.append(process)
    return found


def whole(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("step_*/commit_success.txt"))


def last_step(folder: Path) -> int:
    return max((int(path.name[5:13]) for path in whole(folder)), default=0)


@contextlib.contextmanager
def launched(folder: Path):
    """A launch of mine.py there; gives the process, and the file of what it says. In the end,
    it is killed, with the processes of Ray that a killed driver leaves.
    """
    said = folder / f"said-{len([*folder.glob('said-*')])}"
    options = {"cwd": folder, "env": os.environ | ENVIRONMENT}
    with (
        said.open("w") as out,
        subprocess.Popen(
            [sys.executable, "mine.py"], stdout=out, stderr=out, **options
        ) as driver,
    ):
        left = []
        try:
            yield driver, said
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                left = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def finish(folder: Path) -> str:
    """Launch mine.py, which ends by itself; what it says."""
    with launched(folder) as (driver, said):
        driver.wait(600)
        assert driver.returncode == 0, said.read_text()
    return said.read_text()


def losses_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "losses.csv", names=["step", "loss"])


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A function: `storage` of a program, and where its files are."""
    with contextlib.ExitStack() as stack:

        def place(kind: str) -> tuple[str, Path]:
            if kind == "a folder":
                return "Path('storage').resolve()", tmp_path / "storage"
            if kind == "a mounted bucket":
                mount, files = stack.enter_context(places.mounted_bucket(tmp_path))
                return f"Path('{mount}')", files
            server = places.GoogleStorage(tmp_path, "memory")
            for name, value in server.variables.items():
                monkeypatch.setenv(name, value)
            server.start()
            stack.callback(server.stop)
            return "Path('gs://models/runs')", epath.Path("gs://models/runs")

        yield place


@pytest.mark.slow
def test_the_file_runs_as_it_is(tmp_path):
    shutil.copy(ROOT / "examples/survive.py", tmp_path / "mine.py")
    assert "step 24 | loss 0.000408" in finish(tmp_path)
    assert last_step(tmp_path / "storage/my-run") == 24


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["a folder", "a mounted bucket", "gs://"])
def test_a_worker_and_then_the_driver_are_killed(tmp_path, place, kind):
    """Each time, the run continues from its newest checkpoint, with the same losses."""
    storage, files = place(kind)
    line = ("\nstorage = anyscale", f"\nstorage = {storage} # anyscale")
    (tmp_path / "mine.py").write_text(program(tmp_path, line))
    run = files / "my-run"

    def come(condition) -> None:
        def came() -> bool:
            assert driver.poll() is None, said.read_text()
            return condition()

        wait_for(came)

    with launched(tmp_path) as (driver, said):
        come(lambda: last_step(run) >= 16)
        workers_of(driver.pid)[-1].send_signal(signal.SIGKILL)
        come(lambda: "continues at step" in said.read_text())
    assert "continues at step" in finish(tmp_path)
    # Of nine, two are kept, and what no driver had time to record.
    assert 2 <= len(whole(run)) <= 5
    losses = losses_of(tmp_path)
    begun = losses.step[losses.step.diff() != 1].tolist()
    assert all(step % 8 == 1 for step in begun)
    assert losses.step.iloc[-1] == STEPS == losses.step.nunique()
    assert losses.groupby("step").loss.nunique().max() == 1


@pytest.mark.extra
def test_two_launches_at_once_where_nothing_locks(tmp_path):
    """Killed after some steps, they leave checkpoints that all load. A third one continues
    from the newest, and its losses are those of a run that nothing has happened to.
    """
    edits = ('if "://" in path', "if True"), ("sleep(0.05)", "sleep(0.2)")
    (tmp_path / "mine.py").write_text(program(tmp_path, *edits))
    run = tmp_path / "storage/my-run"
    with launched(tmp_path) as (_, first), launched(tmp_path) as (_, second):
        for said in (first, second):
            wait_for(lambda s=said: "| loss" in s.read_text(), 120, what="both")
        time.sleep(5)
    assert len({path.name[:13] for path in whole(run)}) < len(whole(run))
    like = {name: np.zeros(2, np.float32) for name in ("line", "momentum.0.trace")}
    for path in whole(run):
        assert np.isfinite(orbax.load(path, like)["line"]).all(), path
    assert f"continues at step {last_step(run)}" in finish(tmp_path)
    losses = losses_of(tmp_path)
    assert losses.step.iloc[-1] == STEPS == losses.step.nunique()
    assert losses.groupby("step").loss.nunique().max() == 1


class Trainer:
    """What `fit` uses of one."""

    def __init__(self, storage):
        self.run_config = self
        self.storage_path, self.name, self.fitted = str(storage), "run", 0

    def fit(self) -> None:
        self.fitted += 1


def test_a_second_launch_is_refused(tutorial, tmp_path, monkeypatch):
    """Before Ray's controller reads what the first one will change."""
    wait = 150

    def file_lock(place, timeout, **options):
        assert timeout == 150  # for how long NFS may keep a dead node's lock
        return filelock.FileLock(place, wait, **options)

    monkeypatch.setattr(tutorial, "FileLock", file_lock)
    trainer, place = Trainer(tmp_path), str(tmp_path / "run/launch.lock")
    with filelock.FileLock(place):
        wait = 0.1
        with pytest.raises(filelock.Timeout, match=place):
            tutorial.fit(trainer)
    assert not trainer.fitted
    tutorial.fit(trainer)
    tutorial.fit(trainer)  # the lock ends with a launch
    assert trainer.fitted == 2

    def flock(*_):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)  # no file that would outlive its node
    with pytest.raises(OSError, match="no locks"):
        tutorial.fit(trainer)
    assert trainer.fitted == 2


def test_a_run_that_diverged_is_an_error(tutorial, tmp_path):
    """With what the loop has written."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/diverged.txt").write_text("diverged at step 2")
    with pytest.raises(FloatingPointError, match="diverged at step 2"):
        tutorial.fit(Trainer(tmp_path))


def test_what_saves_elsewhere_is_refused_before_workers_start(
    tutorial, tmp_path, monkeypatch
):
    """Orbax can't write to `s3://`, and what can is for nothing else."""
    monkeypatch.setattr(tutorial, "Path", lambda place: tmp_path / "file")  # no network
    monkeypatch.chdir(tmp_path)
    for place in ("gs://bucket", tmp_path):
        tutorial.fit(Trainer(place))
    wrong = Trainer("s3://bucket")
    with pytest.raises(AssertionError, match="wrong save: s3://bucket/run/"):
        tutorial.fit(wrong)
    monkeypatch.setattr(tutorial, "save", s3.save)
    tutorial.fit(Trainer("s3://bucket"))
    for place in ("gs://bucket", tmp_path):
        wrong.storage_path = str(place)
        with pytest.raises(AssertionError, match="wrong save"):
            tutorial.fit(wrong)
    assert not wrong.fitted and not [*tmp_path.glob("*:")]  # no lock of a bucket

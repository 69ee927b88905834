"""Harm to running trainings, with real processes and signals, and what to compare after."""

import concurrent.futures
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import pytest
import ray
import ray.train
from ray.data import DataContext
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer

from trainkit import run_log


def as_worker(function):
    """What `function` returns, which Ray Train runs as its only worker, in this process."""
    alone = ScalingConfig(num_workers=0)
    with DataContext.current(DataContext.get_current().copy()):  # it sets limits
        try:
            trainer = JaxTrainer(lambda: function(), scaling_config=alone)
            return trainer.fit().return_value
        finally:
            faulthandler.cancel_dump_traceback_later()  # an error leaves the guard


def log_of(config) -> list[dict]:
    path = config.run_path / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(config) -> int:
    return max((line["step"] for line in log_of(config)), default=0)


def whole(config) -> list[Path]:
    """The folders of the run's whole checkpoints."""
    return sorted(path.parent for path in config.run_path.glob("step_*/commit_*"))


def saved(config) -> list[str]:
    """Their names, without what tells one save of a step from another."""
    return [path.name[:13] for path in whole(config)]


RUNNING = []  # what `in_the_background` has started


def wait_for(condition, seconds: float = 600, pause=0.02, what: str = "condition"):
    deadline = time.monotonic() + seconds
    while not condition():
        for future in RUNNING:
            if future.done():
                future.result()  # an error is why it will never come
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(pause)


@contextlib.contextmanager
def in_the_background(function):
    """Run `function` in a thread; gives a function that waits for its result.

    Ray's test cluster adds nodes in the main thread only, so `fit` must leave it.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        future = pool.submit(function)
        RUNNING.append(future)
        try:
            yield lambda: future.result(timeout=900)
        finally:
            RUNNING.remove(future)
            if not future.done():
                ray.shutdown()  # so that the thread ends


@contextlib.contextmanager
def after_each_line(act):
    """In its block, the first worker's loop calls `act(line)` after a line, and waits."""
    add = run_log.RunLog.add

    def add_and_act(log, *arguments, **named):
        line = add(log, *arguments, **named)
        if line and ray.train.get_context().get_world_rank() == 0:
            act(line)
        return line

    run_log.RunLog.add = add_and_act
    try:
        yield
    finally:
        run_log.RunLog.add = add


def train_loop_of(tutorial, pause: float = 0):
    """The notebook's loop; workers note their process at each start.

    Args:
        pause: seconds by which each logged step takes longer, for a run soon over.
    """
    train_loop = tutorial.train_loop_per_worker

    def loop(settings: dict) -> None:
        place = "{data_dir}-{run_name}-".format(**settings["config"])
        with open(f"{place}{ray.train.get_context().get_world_rank()}", "a") as file:
            print(os.getpid(), file=file)
        with after_each_line(lambda _: time.sleep(pause)):
            train_loop(settings)

    return loop


def starts_of(config, rank: int = 0) -> list[int]:
    """At each start of a worker, its process id."""
    text = Path(f"{config.data_dir}-{config.run_name}-{rank}").read_text()
    return [int(line) for line in text.splitlines()]


def kill(config, rank: int, number: int = signal.SIGKILL) -> None:
    """Send one of the run's workers a signal."""
    os.kill(starts_of(config, rank)[-1], number)


def lose(cluster, node) -> None:
    """The node goes without a word: its processes get SIGKILL."""
    cluster.worker_nodes.remove(node)
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)


def assert_equal_runs(config, reference) -> None:
    """Bit for bit, each step once, and at the end also what an evaluation finds."""
    logs = log_of(config), log_of(reference)[: config.max_steps]
    for name in ("step", "loss", "grad_norm", "val_loss"):
        assert [x.get(name) for x in logs[0]] == [x.get(name) for x in logs[1]], name


def evaluate(tutorial, config, model) -> float:
    """As the loop does it, in this process."""
    batches = tutorial.read_validation(config, jax.sharding.get_mesh())
    return float(tutorial.evaluate(model, batches, config))


def assert_one_worker_continues(tutorial, config) -> None:
    """One worker restores what two saved at the end."""
    abstract = tutorial.abstract_state(config, jax.sharding.get_mesh())
    path = as_worker(partial(tutorial.newest, config.run_path))
    state = tutorial.unnamed(tutorial.restore(path, tutorial.named(abstract)), abstract)
    last = log_of(config)[-1]
    assert state.step == last["step"]
    loss = evaluate(tutorial, config, state.model)
    assert loss == pytest.approx(last["val_loss"], abs=1e-5)


def missing(what: str) -> None:
    """Skip a test on a machine that lacks what it needs; fail where the tests must run."""
    message = f"not possible here: {what}"
    pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@contextlib.contextmanager
def disk_of(folder: Path, megabytes: int):
    """A file system of its own, in memory; gives a function that leaves so many bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
    result = subprocess.run(mount, capture_output=True, text=True)
    if result.returncode:
        missing(f"a small disk: {result.stderr.strip()}")

    def leave(free: int) -> None:
        found = os.statvfs(folder)
        with (folder / "filler").open("wb") as file:
            taken = found.f_bavail * found.f_frsize - free
            os.posix_fallocate(file.fileno(), 0, max(taken, 1))

    try:
        yield leave
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


ray.cloudpickle.register_pickle_by_value(
    sys.modules[__name__]
)  # workers lack this file

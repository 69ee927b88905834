"""Harm to running trainings, with real processes and signals, and what to compare after."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
import ray
import ray.train
from conftest import read_arrays
from notebook_module import initial_state

import trainkit.checkpoints
import trainkit.config
import trainkit.sharding
import trainkit.workers


def log_of(config) -> list[dict]:
    path = config.run_path / "metrics.jsonl"
    try:
        lines = path.read_text().splitlines(keepends=True)
    except OSError:  # not there yet, or, on an object store, replaced meanwhile
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(config) -> int:
    log = log_of(config)
    return log[-1]["step"] if log else 0


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


RUNNING = []  # what `in_the_background` has started


def wait_for(condition, seconds: float = 600, pause=0.02, what: str = "condition"):
    deadline = time.monotonic() + seconds
    while not condition():
        for future in RUNNING:
            if future.done():
                future.result()  # an error is why it will never come
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(pause)


def train_loop_of(tutorial):
    """The notebook's loop, on workers that leave their process ids, and how many they are."""
    train_loop = tutorial.train_loop_per_worker

    def loop(settings: dict) -> None:
        config = trainkit.config.TrainingConfig(**settings)
        context = ray.train.get_context()
        rank = context.get_world_rank()
        (config.run_path / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == 0 and not config.remote:
            with (config.run_path / "world-sizes").open("a") as file:
                print(context.get_world_size(), file=file)
        watch, asked = trainkit.workers.watch, config.run_path / f"raise-{rank}"

        def watch_or_raise(seconds):  # it is called at each step
            watch(seconds)
            if not config.remote and asked.exists():
                asked.unlink()
                raise ZeroDivisionError

        trainkit.workers.watch = watch_or_raise
        train_loop(settings)

    return loop


def interrupt(rank: int):
    """Harm: an exception comes up at the worker's next step."""
    return lambda config: (config.run_path / f"raise-{rank}").touch()


def worker_of(config, rank: int) -> int:
    while True:
        try:
            if number := (config.run_path / f"pid-{rank}").read_text():
                return int(number)
        except FileNotFoundError:
            raise
        except OSError:  # on an object store, replaced while it was read
            pass
        time.sleep(0.01)  # another is just writing its own there


def kill_controller(config) -> None:
    """That of the cluster that this process has started; other tests have their own."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "ray::TrainController" in " ".join(process.cmdline()):
                return process.kill()
    raise AssertionError("no TrainController")


class Accidents(threading.Thread):
    """Waits for moments in a run, does harm, and measures how long each recovery takes."""

    def __init__(self, config, *accidents):
        super().__init__()
        self.config, self.accidents, self.seconds = config, accidents, []
        self.start()

    def run(self):
        for moment, harm in self.accidents:
            self.seconds.append(self.recovery(moment, harm))

    def recovery(self, moment, harm) -> float:
        """The seconds from the harm to the first step that is new after it."""
        config, pause = self.config, 0.5 if self.config.remote else 0.02
        wait_for(lambda: moment(config), pause=pause, what="the moment")
        worker, start = worker_of(config, 0), time.monotonic()
        harm(config)
        wait_for(lambda: worker_of(config, 0) != worker, pause=pause, what="a worker")
        step = last_step(config)
        wait_for(lambda: last_step(config) > step, pause=pause, what="a new step")
        seconds = time.monotonic() - start
        print(f"accident after step {step}; next new step {seconds:.1f} s later")
        return seconds


def state_of(config) -> list[np.ndarray]:
    """Every array of the last checkpoint: parameters, optimizer state, and step."""
    newest = trainkit.checkpoints.list_saved(config)[0]
    assert newest == f"step_{config.max_steps:08d}"
    return read_arrays(config.run_path / newest)


def assert_equal_runs(config, reference) -> None:
    """Bit for bit, every logged loss, each step once, up to the end of the first.

    And if both end there: parameters, optimizer state, and step.
    """
    logs = log_of(config), log_of(reference)[: config.max_steps]
    for name in ("step", "loss", "grad_norm", "val_loss"):
        assert [x.get(name) for x in logs[0]] == [x.get(name) for x in logs[1]], name
    if config.max_steps == reference.max_steps:
        for a, b in zip(state_of(config), state_of(reference)):
            np.testing.assert_array_equal(a, b)


def kill(rank: int, number: int = signal.SIGKILL):
    return lambda config: os.kill(worker_of(config, rank), number)


def at_step(step: int):
    return lambda config: last_step(config) >= step


def losses_of_one_process(tutorial, config) -> list[float]:
    """The losses of the same run in this process, without Ray Train."""
    config = dataclasses.replace(config, num_workers=1)
    mesh = trainkit.sharding.make_mesh(config)
    state, losses = initial_state(tutorial, config, mesh), []
    steps = range(config.max_steps)
    with jax.set_mesh(mesh):
        for windows in tutorial.read_batches(config, mesh, "train", steps):
            state, metrics = tutorial.train_step(state, windows, config)
            losses.append(float(metrics["loss"]))
    return losses


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


def world_sizes(config) -> list[int]:
    path = config.run_path / "world-sizes"
    return [int(x) for x in path.read_text().split()] if path.exists() else []


@contextlib.contextmanager
def disk_of(folder: Path, megabytes: float):
    """A file system of its own, in memory; the test is skipped where it can't be made."""
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={int(megabytes * 1024)}k"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)]
    result = subprocess.run(mount, capture_output=True, text=True)
    if result.returncode:
        message = f"a small disk can't be mounted here: {result.stderr.strip()}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def lose(cluster, node) -> None:
    """The node goes without a word: its processes get SIGKILL."""
    cluster.worker_nodes.remove(node)
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)

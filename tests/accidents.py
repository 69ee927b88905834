"""Harm to running trainings, with real processes and signals, and what to compare after."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import ray
import ray.train
from conftest import read_arrays
from samples import run


def log_of(config) -> list[dict]:
    path = config.run_path / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(config) -> int:
    return max((line["step"] for line in log_of(config)), default=0)


def saved(config) -> list[str]:
    """The names of the run's whole checkpoints."""
    return sorted(path.name for path in config.run_path.glob("step_????????"))


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


RUNNING = []  # what `in_the_background` has started


def wait_for(condition, seconds: float = 600, pause=0.02, what: str = "condition"):
    deadline = time.monotonic() + seconds
    while not condition():
        for future in RUNNING:
            if future.done():
                future.result()  # an error is why it will never come
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(pause)


def train_loop_of(tutorial, pause: float = 0):
    """The notebook's loop; at each start, workers note their process and how many they are.

    Args:
        pause: seconds by which each logged step takes longer, for a run soon over.
    """
    train_loop = tutorial.train_loop_per_worker

    def loop(settings: dict) -> None:
        context = ray.train.get_context()
        places = settings["config"]["data_dir"], settings["config"]["run_name"]
        with open(
            "{}-{}".format(*places) + f"-{context.get_world_rank()}", "a"
        ) as file:
            print(os.getpid(), context.get_world_size(), file=file)
        train_loop(settings, send=lambda _: time.sleep(pause))

    return loop


def starts_of(config, rank: int = 0) -> list[list[int]]:
    """At each start of a worker, its process id, and how many workers there were."""
    path = Path(f"{config.data_dir}-{config.run_name}-{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(number) for number in line.split()] for line in lines]


def world_sizes(config) -> list[int]:
    return [size for _, size in starts_of(config)]


def kill(config, rank: int, number: int = signal.SIGKILL) -> None:
    """Send one of the run's workers a signal."""
    os.kill(starts_of(config, rank)[-1][0], number)


def assert_equal_losses(config, reference) -> None:
    """Bit for bit, every logged loss, each step once, up to the end of the first."""
    logs = log_of(config), log_of(reference)[: config.max_steps]
    for name in ("step", "loss", "grad_norm", "val_loss"):
        assert [x.get(name) for x in logs[0]] == [x.get(name) for x in logs[1]], name


def assert_equal_runs(config, reference) -> None:
    """Bit for bit, every logged loss, and at the end parameters, optimizer, and step."""
    assert_equal_losses(config, reference)
    assert saved(config)[-1] == f"step_{config.max_steps:08d}"
    states = (read_arrays(x.run_path / saved(x)[-1]) for x in (config, reference))
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


def losses_of_one_process(tutorial, config) -> list[float]:
    """The losses of the same run on a CPU in this process, without Ray Train."""
    config = dataclasses.replace(config, fsdp=1, tensor_parallel=1)
    mesh, steps = tutorial.create_mesh(config), range(config.max_steps)
    with jax.set_mesh(mesh):
        batches = tutorial.read_batches(config, mesh, "train", steps)
        return run(tutorial, config, batches)[1]


def assert_losses_of_one_process(tutorial, config, atol: float = 1e-4) -> None:
    """Each step is in the log once, with about the loss that one process has."""
    log, losses = log_of(config), losses_of_one_process(tutorial, config)
    assert [line["step"] for line in log] == list(range(1, config.max_steps + 1))
    np.testing.assert_allclose([line["loss"] for line in log], losses, atol=atol)


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


def missing(what: str) -> None:
    """Skip a test on a machine that lacks what it needs; fail where the tests must run."""
    message = f"not possible here: {what}"
    pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@contextlib.contextmanager
def disk_of(folder: Path, megabytes: int):
    """A file system of its own, in memory; gives a function that leaves so many bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
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


def lose(cluster, node) -> None:
    """The node goes without a word: its processes get SIGKILL."""
    cluster.worker_nodes.remove(node)
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)

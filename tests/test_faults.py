"""Every way to die: real processes, nodes, signals, and disks; the run ends undisturbed.

Nodes are played by a local Ray cluster.
"""

import contextlib
import dataclasses
import errno
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import ray
import ray.train
from accidents import (
    assert_equal_runs,
    disk_of,
    in_the_background,
    kill,
    kill_controller,
    last_step,
    lose,
    train_loop_of,
    wait_for,
    world_sizes,
)
from ray.core.generated import autoscaler_pb2
from ray.train.v2.jax import JaxConfig
from ray.train.v2.jax.config import _JaxBackend
from samples import python, without_a_cluster

import trainkit.checkpoints

# Processes and nodes that die.


@pytest.fixture
def two_nodes(monkeypatch, request):
    """A cluster of two nodes, with room for one worker and its data tasks on each."""
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")  # as by default
    cluster = request.getfixturevalue("head")
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    return cluster


def loop_that_cannot_read(tutorial):
    """The notebook's loop, in which the second worker can't read the newest checkpoint."""
    train_loop = train_loop_of(tutorial)

    def loop(settings):
        load, asked = trainkit.checkpoints.load, []

        def load_older(config, name, target):
            asked.append(name)
            if name == asked[0]:
                (config.run_path / "not-read").touch()
                raise OSError(errno.ESTALE, "Stale file handle")
            return load(config, name, target)

        trainkit.checkpoints.PAUSES = (0.1,)
        if ray.train.get_context().get_world_rank() == 1:
            trainkit.checkpoints.load = load_older
        train_loop(settings)

    return loop


def backend_whose_first_start_fails(config) -> JaxConfig:
    """JAX's, for CPUs; a worker dies while the first group connects."""

    class Backend(_JaxBackend):
        def on_start(self, workers, backend_config):
            failed = config.run_path / "failed-start"
            if not failed.exists():
                failed.touch()
                workers.execute_single(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
            super().on_start(workers, backend_config)

    class Config(JaxConfig):
        backend_cls = Backend

    return Config(use_gpu=True)


@pytest.mark.slow
def test_one_accident_after_the_other(tutorial, reference, two_nodes):
    """A worker dies before the loop begins, and Ray leaves the others' resources taken.

    A node goes away while a checkpoint is written, and another one comes in its place. Then
    a worker can't read the newest checkpoint, and at last the controller dies. What it leaves
    is freed at the next launch, and nothing of yours; Ray's cleaner would do it, where it
    finds the cluster's dashboard.
    """
    config = dataclasses.replace(reference, run_name="accidents", cpus_per_worker=2.0)

    def saved() -> list[str]:
        return trainkit.checkpoints.list_saved(config)

    def writing() -> bool:  # and there are two to go on from
        is_writing = any(config.run_path.glob("*tmp*"))
        return is_writing and len(saved()) >= 2 and last_step(config) < 70

    trainer = tutorial.make_trainer(config, loop_that_cannot_read(tutorial))
    trainer.backend_config = backend_whose_first_start_fails(config)
    with in_the_background(trainer.fit) as result:
        wait_for(writing, pause=0.002, what="a checkpoint that is being written")
        lose(two_nodes, *two_nodes.worker_nodes)
        two_nodes.add_node(num_cpus=3)
        newest = saved()[0]
        wait_for(lambda: saved()[0] > newest, what="the next checkpoint")
        kill_controller()
        with pytest.raises(ray.exceptions.ActorDiedError):  # `fit` says so
            result()
    assert world_sizes(config) == [2, 2]
    assert all((config.run_path / x).exists() for x in ("failed-start", "not-read"))
    yours = ray.util.placement_group([{"CPU": 1}])
    result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()  # it goes on
    all_but_yours = ray.cluster_resources()["CPU"] - 1

    def freed() -> bool:
        return ray.available_resources()["CPU"] == all_but_yours

    wait_for(freed, seconds=60, what="a free cluster")
    ray.util.remove_placement_group(yours)
    assert result.error is None and result.metrics["step"] == config.max_steps
    assert_equal_runs(config, reference)
    assert not any(config.run_path.glob("*tmp*"))


@pytest.mark.extra
def test_runs_killed_at_random(tutorial, cluster, reference):
    """Rank 0 and rank 1 in turn, at a random moment: by SIGKILL, and after a SIGTERM.

    At last a worker is stopped, which the watchdog notices.
    """
    rng, kills = np.random.default_rng(), 10
    for run in range(kills + 1):
        config = dataclasses.replace(
            reference, run_name=f"random-{run}", stall_timeout_s=40.0
        )
        rank, step = run % 2, int(rng.integers(1, 64))
        print(f"run {run}: rank {rank} at step {step}")
        fit = tutorial.make_trainer(config, train_loop_of(tutorial)).fit
        with in_the_background(fit) as result:
            wait_for(lambda: last_step(config) >= step, what="the step")  # noqa: B023
            if run == kills:
                kill(config, rank, signal.SIGSTOP)
            elif run % 4 > 1:  # as a node that is taken away does
                kill(config, rank, signal.SIGTERM)
                time.sleep(0.3)
            if run < kills:
                with contextlib.suppress(ProcessLookupError):
                    kill(config, rank)
            assert result().error is None
        assert world_sizes(config) == [2, 2]
        assert_equal_runs(config, reference)


def give_notice(node, seconds: float) -> None:
    """Tell Ray that a node will be taken away, as the providers of spot machines do."""
    client = ray._raylet.GcsClient(ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    deadline = int(1000 * (time.time() + seconds))
    assert client.drain_node(node.node_id, reason, "spot", deadline)[0]


@pytest.mark.extra
def test_notice_that_a_machine_will_be_taken_away(tutorial, reference, two_nodes):
    """The run saves before its time, and goes on elsewhere; no failure is counted."""
    config = dataclasses.replace(
        reference, run_name="spot", cpus_per_worker=2.0, max_failures=0
    )
    loop = train_loop_of(tutorial, pause=0.6)

    def saved_between() -> bool:  # where no evaluation is
        names = trainkit.checkpoints.list_saved(config)
        steps = map(trainkit.checkpoints.step_of, names)
        return any(step % config.eval_interval for step in steps)

    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(lambda: last_step(config) >= 14, what="step 14")
        (node,) = two_nodes.worker_nodes
        give_notice(node, seconds=20)
        wait_for(saved_between, what="a checkpoint before its time")
        two_nodes.add_node(num_cpus=3)
        time.sleep(20)
        lose(two_nodes, node)
        assert result().error is None
    assert world_sizes(config) == [2, 2]
    assert_equal_runs(config, reference)


HANG = """
import ctypes, faulthandler, sys, time
from trainkit.workers import watch

def wait_in_c(seconds):
    ctypes.PyDLL(None).sleep(seconds)  # which keeps the interpreter's lock

for step in range(5):
    watch(2.0)
    time.sleep(0.5)
wait_in_c(60)
"""


def test_watchdog_ends_a_process_that_hangs_in_c():
    with pytest.raises(AssertionError, match=r"(?s)Timeout.*in wait_in_c"):
        python(HANG)


# Disks that fill up.


def times_of(config, name: str) -> list[int]:
    """When the files of a checkpoint were written."""
    files = sorted(Path(config.run_path / name).rglob("*"))
    return [file.stat().st_mtime_ns for file in files]


@pytest.mark.extra
@pytest.mark.parametrize("turn", range(20))
def test_disk_that_fills_up_while_saving(tutorial, cluster, reference, tmp_path, turn):
    """At any byte of any save; then there is room again, and the same cell is run again."""
    rng, save = np.random.default_rng(), 12 * (turn % 6 + 1)
    files = Path(reference.run_path / "step_00000072").rglob("*")
    left = int(rng.integers(0, 1.2 * sum(f.stat().st_size for f in files)))
    print(f"{left} bytes are left when the run comes to step {save}")
    with disk_of(tmp_path / "disk", 24) as disk:
        config = dataclasses.replace(reference, storage_path=str(disk), max_failures=0)
        with in_the_background(tutorial.make_trainer(config).fit) as result:
            wait_for(lambda: last_step(config) >= save - 3, what="the step")
            with (disk / "filler").open("wb") as file:
                found = os.statvfs(disk)
                free = found.f_bavail * found.f_frsize
                os.posix_fallocate(file.fileno(), 0, free - left)
            with contextlib.suppress(Exception):  # what it says is tested elsewhere
                result()
        (disk / "filler").unlink()
        newest = trainkit.checkpoints.list_saved(config)[:1]
        written = [times_of(config, name) for name in newest]
        assert tutorial.make_trainer(config).fit().error is None
        assert_equal_runs(config, reference)
        kept = [name for name in newest if (config.run_path / name).exists()]
        assert [times_of(config, name) for name in kept] == written[: len(kept)]


def test_full_disk_while_preparing(tutorial, small, tmp_path, monkeypatch):
    without_a_cluster(monkeypatch)
    with disk_of(tmp_path / "disk", 0.1) as disk:
        config = small(data_dir=str(disk / "data"), val_fraction=0.1)
        with pytest.raises(OSError, match=f"data_dir: the disk of {disk} has no room"):
            tutorial.prepare_dataset(config)
        assert list(disk.iterdir()) == []

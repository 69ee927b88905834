"""Every way to die: real processes, nodes, signals, and disks; the run ends undisturbed.

Nodes are played by a local Ray cluster.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
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
    last_step,
    lose,
    saved,
    train_loop_of,
    wait_for,
    world_sizes,
)
from conftest import ROOT
from ray.core.generated import autoscaler_pb2

import trainkit.checkpoints

RECORD = "checkpoint_manager_snapshot.json"


@pytest.fixture
def two_nodes(monkeypatch, request):
    """A cluster of two nodes, with room for one worker and its data tasks on each."""
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")  # as by default
    cluster = request.getfixturevalue("head")
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    return cluster


def on_two_nodes(tutorial, config, pause: float = 0):
    """A trainer whose workers have a node each."""
    trainer = tutorial.make_trainer(config, train_loop_of(tutorial, pause))
    trainer.scaling_config = dataclasses.replace(
        trainer.scaling_config, resources_per_worker={"CPU": 2}
    )
    return trainer


DRIVER = """
import json, sys
sys.path[:0] = ["tests", "ci"]
from conftest import TrainingConfig, load_notebook, start_ray
from test_faults import on_two_nodes
start_ray(sys.argv[1])
config = TrainingConfig(**json.loads(sys.argv[2]))
on_two_nodes(load_notebook(), config, 0.1).fit()
"""


@pytest.mark.slow
def test_one_accident_after_the_other(tutorial, reference, two_nodes):
    """A node goes away while a checkpoint is written, and another one comes in its place.

    Then the driver dies, while a checkpoint is written. The next launch goes on.
    """
    config = dataclasses.replace(reference, run_name="accidents")
    values = json.dumps(dataclasses.asdict(config))
    command = [sys.executable, "-c", DRIVER, two_nodes.address, values]

    def writing(count: int) -> bool:
        return any(config.run_path.glob("*tmp*")) and len(saved(config)) >= count

    with subprocess.Popen(command, cwd=ROOT) as driver:
        wait_for(lambda: writing(1), pause=0.002, what="a checkpoint being written")
        lose(two_nodes, *two_nodes.worker_nodes)
        two_nodes.add_node(num_cpus=3)
        wait_for(lambda: writing(2), pause=0.002, what="another one")
        driver.kill()
    # On a busy machine, a start may fail, and count, too.
    assert world_sizes(config)[:2] == [2, 2] and last_step(config) < config.max_steps
    assert on_two_nodes(tutorial, config).fit().metrics["step"] == config.max_steps
    assert_equal_runs(config, reference)


@pytest.mark.slow
def test_what_a_person_or_a_full_disk_did_to_checkpoints(tutorial, cluster, reference):
    """A crash before Ray's record; a deleted checkpoint; an emptied record."""
    config = dataclasses.replace(reference, run_name="harmed", max_failures=0)
    shutil.copytree(reference.run_path, config.run_path)
    newest, record = config.run_path / saved(config)[-1], config.run_path / RECORD
    refused = [None, "does not exist anymore", "Expecting value"]
    harms = [record.unlink, newest.rmtree, lambda: record.write_text("")]
    for harm, words in zip(harms, refused):
        harm()
        if words:
            with pytest.raises(Exception, match=words):
                tutorial.make_trainer(config).fit()
            record.unlink()
        result = tutorial.make_trainer(config).fit()
        assert result.checkpoint.path == str(newest)
        assert math.isfinite(result.metrics["val_loss"])
        assert_equal_runs(config, reference)


@pytest.mark.slow
def test_two_launches_at_once(tutorial, cluster, reference):
    """One goes on; the other waits, and says who has the run."""
    config = dataclasses.replace(reference, run_name="twice", max_failures=0)
    fit = tutorial.make_trainer(config, train_loop_of(tutorial, 0.3)).fit

    def impatient(settings):
        trainkit.checkpoints._PATIENCE = 1
        tutorial.train_loop_per_worker(settings)

    with in_the_background(fit) as result:
        wait_for(lambda: last_step(config) > 0, what="the first launch")
        with pytest.raises(ray.train.WorkerGroupError, match="is in use by process"):
            tutorial.make_trainer(config, impatient).fit()
        assert last_step(config) < config.max_steps and result().error is None
    assert_equal_runs(config, reference)


@pytest.mark.extra
def test_runs_killed_at_random(tutorial, cluster, reference):
    """Rank 0 and rank 1 in turn, at a random moment: by SIGKILL, and after a SIGTERM.

    At last a worker is stopped, which the watchdog notices.
    """
    rng, kills = np.random.default_rng(), 10
    for run in range(kills + 1):
        name = {"run_name": f"random-{run}", "stall_timeout_s": 40.0}
        config = dataclasses.replace(reference, **name)
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
    config = dataclasses.replace(reference, run_name="spot", max_failures=0)

    def saved_between() -> list[str]:  # where no evaluation is
        return [x for x in saved(config) if int(x[5:]) % config.eval_interval]

    with in_the_background(on_two_nodes(tutorial, config, 0.6).fit) as result:
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


@pytest.mark.extra
@pytest.mark.parametrize("turn", range(20))
def test_disk_that_fills_up_while_saving(tutorial, cluster, reference, tmp_path, turn):
    """At any byte of any save; then there is room again, and the same cell is run again.

    Where the disk has cut off Ray's record, Ray refuses it, and it is deleted.
    """
    rng, save = np.random.default_rng(), 12 * (turn % 6 + 1)
    files = Path(reference.run_path / "step_00000072").rglob("*")
    free = int(rng.integers(0, 1.2 * sum(f.stat().st_size for f in files)))
    print(f"{free} bytes are left when the run comes to step {save}")
    place = {"storage_path": str(tmp_path / "disk"), "max_failures": 0}
    config = dataclasses.replace(reference, **place)
    trainer = tutorial.make_trainer(config)
    with disk_of(tmp_path / "disk", 24) as leave:
        with in_the_background(trainer.fit) as result:
            wait_for(lambda: last_step(config) >= save - 3, what="the step")
            leave(free)
            with contextlib.suppress(Exception):  # what it says is tested elsewhere
                result()
        (tmp_path / "disk/filler").unlink()
        newest = saved(config)[-1:]
        try:
            tutorial.make_trainer(config).fit()
        except Exception as error:
            print(f"Ray refuses its record: {error!s:.300}")
            (config.run_path / RECORD).unlink()
            tutorial.make_trainer(config).fit()
        assert_equal_runs(config, reference)
        assert saved(config)[-1:] >= newest

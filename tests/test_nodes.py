"""Several nodes, played by a local Ray cluster: one goes away, comes back, or doesn't."""

import dataclasses
import os
import threading
import time

import numpy as np
import pytest
import ray
from accidents import at_step, last_step, log_of, wait_for
from conftest import read_arrays
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes():
    """A cluster of two nodes, with room for one worker and its data tasks on each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    ray.init(cluster.address, log_to_driver=False)  # on the head, which stays
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def lose(cluster) -> None:
    """The second node goes without a word: its processes get SIGKILL."""
    node = next(node for node in cluster.list_all_nodes() if not node.head)
    cluster.remove_node(node, allow_graceful=False)


def test_node_goes_away_and_comes_back(tutorial, two_nodes, small, write_bins):
    reference = write_bins(
        small(
            num_workers=2,
            cpus_per_worker=2.0,
            dropout=0.1,
            max_steps=120,
            eval_interval=15,
            decay_steps=120,
            run_name="reference",
        )
    )
    assert tutorial.make_trainer(reference).fit().error is None
    config = dataclasses.replace(reference, run_name="node")

    def accident():
        wait_for(lambda: at_step(50)(config), what="step 50")
        lose(two_nodes)
        time.sleep(5)
        two_nodes.add_node(num_cpus=3)
        start, step = time.monotonic(), last_step(config)
        wait_for(lambda: last_step(config) > step, what="a new step")
        print(f"first new step {time.monotonic() - start:.1f} s after the node is back")

    thread = threading.Thread(target=accident)
    thread.start()
    assert tutorial.make_trainer(config).fit().error is None
    thread.join()
    states = [
        read_arrays(c.run_path / tutorial.saved_checkpoints(c)[0])
        for c in (config, reference)
    ]
    for a, b in zip(*states):
        np.testing.assert_array_equal(a, b)
    logs = log_of(config), log_of(reference)
    assert [x["step"] for x in logs[0]] == list(range(1, 121))
    assert [x["loss"] for x in logs[0]] == [x["loss"] for x in logs[1]]


def world_sizes(config) -> list[int]:
    path = config.run_path / "world-sizes"
    return [int(x) for x in path.read_text().split()] if path.exists() else []


def loop_that_notes_the_world(tutorial, config):
    train_loop, path = tutorial.train_loop_per_worker, config.run_path / "world-sizes"

    def loop(settings):
        context = ray.train.get_context()
        if context.get_world_rank() == 0:
            with path.open("a") as file:
                file.write(f"{context.get_world_size()}\n")
        train_loop(settings)

    return loop


def test_elastic_run_shrinks_and_grows(
    tutorial, two_nodes, small, write_bins, monkeypatch
):
    """Two workers, then one for want of a node, then two again; the same losses."""
    reference = write_bins(
        small(
            num_workers=2,
            cpus_per_worker=2.0,
            max_steps=3_000,
            decay_steps=3_000,
            learning_rate=1e-3,
            eval_interval=100,
            run_name="reference",
        )
    )
    make = tutorial.make_scaling_config

    def impatient(config):
        return dataclasses.replace(make(config), elastic_resize_monitor_interval_s=2.0)

    monkeypatch.setattr(tutorial, "make_scaling_config", impatient)
    config = dataclasses.replace(reference, run_name="elastic", num_workers=(1, 2))
    loop = loop_that_notes_the_world(tutorial, config)

    def accident():
        wait_for(lambda: at_step(250)(config), what="step 250")
        lose(two_nodes)
        wait_for(lambda: world_sizes(config) == [2, 1], what="one worker alone")
        step = last_step(config)
        wait_for(lambda: last_step(config) > step + 150, what="its progress")
        two_nodes.add_node(num_cpus=3)

    thread = threading.Thread(target=accident)
    config.run_path.mkdir(parents=True)
    thread.start()
    assert tutorial.make_trainer(config, loop).fit().error is None
    thread.join()
    assert world_sizes(config)[:3] == [2, 1, 2]
    assert tutorial.make_trainer(reference).fit().error is None
    logs = log_of(config), log_of(reference)
    assert [x["step"] for x in logs[0]] == list(range(1, 3_001))
    losses = [[x["loss"] for x in log] for log in logs]
    np.testing.assert_allclose(*losses, atol=1e-4)


def test_storage_that_nodes_do_not_share(tutorial, small, tmp_path, monkeypatch):
    """Two nodes with different folders under one path: the start says so."""
    cluster = Cluster()
    for name in ("head", "other"):  # the path below is under each process's own folder
        (tmp_path / name / "runs").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        cluster.add_node(num_cpus=3)
        if name == "head":
            ray.init(cluster.address, log_to_driver=False)
    monkeypatch.chdir(tmp_path / "head")
    cluster.wait_for_nodes()
    config = small(num_workers=2, cpus_per_worker=2.0, max_failures=0)
    config = dataclasses.replace(config, storage_path="/proc/self/cwd/runs")
    try:
        start = time.monotonic()
        with pytest.raises(Exception, match="(?i)storage_path.*shared|accessible"):
            tutorial.make_trainer(config).fit()
        print(f"noticed after {time.monotonic() - start:.1f} s")
        assert not list(tmp_path.glob("*/runs/run/step_*"))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert os.getcwd() == str(tmp_path / "head")

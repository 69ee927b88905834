"""Several nodes, played by a local Ray cluster: one goes away, comes back, or doesn't."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
import ray
from conftest import read_arrays
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes():
    """A cluster of two nodes, with room for one worker and its data tasks on each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    cluster.add_node(num_cpus=3)
    ray.init(cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def log_of(config) -> list[dict]:
    path = config.run_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(condition, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def at_least(config, step: int):
    return lambda: (log := log_of(config)) and log[-1]["step"] >= step


def second_node(cluster):
    return next(node for node in cluster.list_all_nodes() if not node.head)


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
        wait_for(at_least(config, 50))
        two_nodes.remove_node(second_node(two_nodes), allow_graceful=False)
        time.sleep(5)
        two_nodes.add_node(num_cpus=3)

    thread = threading.Thread(target=accident)
    thread.start()
    assert tutorial.make_trainer(config).fit().error is None
    thread.join()
    states = [
        read_arrays(tutorial.saved_checkpoints(c)[0]) for c in (config, reference)
    ]
    for a, b in zip(*states):
        np.testing.assert_array_equal(a, b)
    logs = log_of(config), log_of(reference)
    assert [x["step"] for x in logs[0]] == list(range(1, 121))
    assert [x["loss"] for x in logs[0]] == [x["loss"] for x in logs[1]]


def test_elastic_run_shrinks_and_grows(
    tutorial, two_nodes, small, write_bins, monkeypatch
):
    """Two workers, then one for want of a node, then two again; the same losses."""
    reference = write_bins(
        small(
            num_workers=2,
            cpus_per_worker=2.0,
            max_steps=2_000,
            decay_steps=2_000,
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
        wait_for(at_least(config, 250))
        two_nodes.remove_node(second_node(two_nodes), allow_graceful=False)
        wait_for(lambda: world_sizes(config) == [2, 1])
        wait_for(at_least(config, 450))
        two_nodes.add_node(num_cpus=3)

    thread = threading.Thread(target=accident)
    config.run_path.mkdir(parents=True)
    thread.start()
    assert tutorial.make_trainer(config, loop).fit().error is None
    thread.join()
    assert world_sizes(config)[:3] == [2, 1, 2]
    assert tutorial.make_trainer(reference).fit().error is None
    logs = log_of(config), log_of(reference)
    assert [x["step"] for x in logs[0]] == list(range(1, 2_001))
    losses = [[x["loss"] for x in log] for log in logs]
    np.testing.assert_allclose(*losses, atol=1e-4)

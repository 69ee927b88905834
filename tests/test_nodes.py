"""Several nodes, played by a local Ray cluster: one goes away, comes back, or doesn't."""

import dataclasses
import time

import numpy as np
import pytest
import ray
from accidents import (
    assert_equal_runs,
    at_step,
    in_the_background,
    last_step,
    log_of,
    lose,
    losses_of_one_process,
    train_loop_of,
    wait_for,
    world_sizes,
)
from conftest import ROOT
from ray.core.generated import autoscaler_pb2

import trainkit.checkpoints
import trainkit.config
import trainkit.sharding
import trainkit.workers

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes(monkeypatch, request):
    """A cluster of two nodes, with room for one worker and its data tasks on each."""
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")  # as by default
    cluster = request.getfixturevalue("head")
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    return cluster


def slowed(tutorial, seconds: float, world_size: int):
    """The loop, whose steps take longer with so many workers, or it would be over soon."""
    train_loop, loop = tutorial.train_loop_per_worker, train_loop_of(tutorial)

    def slow_loop(settings):
        names = train_loop.__globals__  # the worker's: the driver's would be a copy
        train_step = names["train_step"]

        def slow_train_step(*arguments):
            time.sleep(seconds)
            return train_step(*arguments)

        if ray.train.get_context().get_world_size() == world_size:
            names["train_step"] = slow_train_step
        loop(settings)

    return slow_loop


def test_node_goes_away_while_a_checkpoint_is_written(tutorial, reference, two_nodes):
    """Another one comes in its place."""
    config = dataclasses.replace(reference, run_name="node", cpus_per_worker=2.0)

    def writing() -> bool:
        return last_step(config) in range(24, 60) and any(config.run_path.glob("*tmp*"))

    loop = train_loop_of(tutorial)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(writing, pause=0.002, what="a checkpoint that is being written")
        lose(two_nodes, *two_nodes.worker_nodes)
        two_nodes.add_node(num_cpus=3)
        assert result().error is None
    assert world_sizes(config) == [2, 2]
    assert_equal_runs(config, reference)


@pytest.mark.extra
def test_four_nodes_of_eight_gpus(tutorial, head, simulated, write_bins, tmp_path):
    """gpt2-7b-gpu.yaml, made small; here, the eight GPUs of a node share its parameters."""

    def loop(settings):
        make_mesh = trainkit.sharding.make_mesh

        def note(config):
            mesh = make_mesh(config)
            rows = [[d.process_index for d in row] for row in mesh.devices[:, :, 0]]
            notes.write_text(f"{dict(mesh.shape)} {rows}")
            return mesh

        trainkit.sharding.make_mesh = note  # in the worker
        train_loop(settings)

    train_loop, notes = tutorial.train_loop_per_worker, tmp_path / "mesh.txt"
    config = trainkit.config.load_config(
        ROOT / "configs/gpt2-7b-gpu.yaml",
        **{"num_workers": None, "fsdp": 8, "attention": "xla", "scan_layers": False},
        **{"n_layer": 2, "n_head": 5, "n_embd": 80, "block_size": 16},
        **{"vocab_size": 521, "batch_size": 64, "device_batch_size": 1},
        **{"max_steps": 4, "eval_interval": 2, "log_interval": 1, "eval_steps": 1},
        **{"data_dir": str(tmp_path / "data"), "storage_path": str(tmp_path / "runs")},
    )
    write_bins(config, val_tokens=2_001)
    for _ in range(4):
        head.add_node(num_cpus=1, num_gpus=8)
    head.wait_for_nodes()
    config = trainkit.workers.with_num_workers(config)
    assert config.num_workers == 4 and config.micro_batches == 2
    assert tutorial.make_trainer(config, loop).fit().error is None
    rows = [[process] * 8 for process in range(4)]
    assert notes.read_text() == f"{{'data': 4, 'fsdp': 8, 'tensor': 1}} {rows}"
    alone = {"platform": "cpu", "num_workers": 1, "devices_per_worker": 1, "fsdp": 1}
    losses = losses_of_one_process(tutorial, dataclasses.replace(config, **alone))
    found = [line["loss"] for line in log_of(config)]
    np.testing.assert_allclose(found, losses, atol=2e-3)


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
    between = []  # checkpoints that no evaluation made

    def saved_between() -> bool:
        steps = map(
            trainkit.checkpoints.step_of, trainkit.checkpoints.list_saved(config)
        )
        between.extend(step for step in steps if step % config.eval_interval)
        return bool(between)

    loop = slowed(tutorial, 0.6, world_size=2)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(lambda: at_step(14)(config), what="step 14")
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
def test_elastic_run_shrinks_and_grows(
    tutorial, two_nodes, small, write_bins, monkeypatch
):
    """Two workers, then one for want of a node, then two again; the same losses."""
    steps = {"max_steps": 250, "decay_steps": 250, "eval_interval": 50}
    changes = steps | {"n_layer": 1, "learning_rate": 1e-3, "cpus_per_worker": 2.0}
    config = write_bins(small(num_workers=(1, 2), **changes))
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")  # a node is gone
    loop = slowed(tutorial, 0.4, world_size=1)
    trainer = tutorial.make_trainer(config, loop)
    trainer.scaling_config = dataclasses.replace(
        trainer.scaling_config, elastic_resize_monitor_interval_s=2.0
    )
    with in_the_background(trainer.fit) as result:
        wait_for(lambda: at_step(50)(config), what="step 50")
        lose(two_nodes, *two_nodes.worker_nodes)
        wait_for(lambda: world_sizes(config) == [2, 1], what="one worker alone")
        step = last_step(config)
        wait_for(lambda: last_step(config) > step + 20, what="its progress")
        two_nodes.add_node(num_cpus=3)
        assert result().error is None
    assert world_sizes(config)[:3] == [2, 1, 2]
    assert [x["step"] for x in log_of(config)] == list(range(1, 251))
    losses = [x["loss"] for x in log_of(config)]
    expected = losses_of_one_process(tutorial, config)
    np.testing.assert_allclose(losses, expected, atol=1e-4)

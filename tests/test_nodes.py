"""Nodes that leave with notice, and machines that come and go."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
import ray
import ray.train
from accidents import (
    after_each_line,
    in_the_background,
    last_step,
    log_of,
    lose,
    saved,
    wait_for,
)
from samples import losses_alone


@contextlib.contextmanager
def pod(cluster, seconds: int):
    """A node as KubeRay starts it in a pod, which gets a SIGTERM when it is to end."""
    command = (
        f"ulimit -n 1024; ray start --block --num-cpus=3 --address={cluster.address}"
    )
    drain = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(seconds)}
    nodes = len(ray.nodes())
    with subprocess.Popen(
        ["bash", "-c", "--", command], env=os.environ | drain
    ) as node:
        try:
            wait_for(lambda: len(ray.nodes()) > nodes, what="the node")
            yield node
        finally:
            node.terminate()


@pytest.mark.slow
def test_a_node_that_is_taken_away_with_notice(
    tutorial, reference, head, tmp_path, monkeypatch
):
    """The workers save at once, and at the deadline continue on the other node.

    One failure may be counted, because the node and Ray's controller act in the same second.
    That checkpoint wasn't evaluated, so it is the worst, also for the next driver, which reads
    its metrics in Ray's record.
    """
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    changes = {"eval_interval": 100, "notice_interval": 4, "log_interval": 2}
    scaling = {"num_workers": 2, "resources_per_worker": {"CPU": 1}}
    changes["scaling"] = scaling | {"placement_strategy": "SPREAD"}
    config = replace(reference, run_name="notice", **changes, max_failures=1)

    def loop(settings: dict) -> None:
        rank = ray.train.get_context().get_world_rank()
        with (tmp_path / f"nodes-{rank}").open("a") as file:
            print(ray.get_runtime_context().get_node_id(), file=file)
        first, look = not saved(config), ray.train.get_preemption_info

        def look_until_noticed():  # before the line of step 4
            while not (found := look()) and first:
                time.sleep(0.2)
            return found

        def hold(line: dict) -> None:  # until the deadline
            if first and line["step"] == 6:
                time.sleep(3_600)

        ray.train.get_preemption_info = look_until_noticed
        with after_each_line(hold):
            tutorial.train_loop_per_worker(settings)

    with pod(head, 15) as leaving:  # with room for a worker
        with in_the_background(tutorial.make_trainer(config, loop).fit) as finish:
            wait_for(lambda: last_step(config) == 2, what="the first line")
            leaving.send_signal(signal.SIGTERM)
            finish()
    starts = [(tmp_path / f"nodes-{rank}").read_text().split() for rank in range(2)]
    assert [len(found) for found in starts] == [2, 2]
    assert starts[0][0] != starts[1][0] and starts[0][1] == starts[1][1]
    expected = {line["step"]: line for line in log_of(reference)}
    for line in log_of(config):
        for key in ("loss", "grad_norm"):
            assert line[key] == expected[line["step"]][key]
    assert [x["step"] for x in log_of(config) if "val_loss" in x] == [config.max_steps]
    recorded = ray.train.Result.from_path(config.run_path).best_checkpoints
    ranked = {metrics["step"]: metrics["val_loss"] for _, metrics in recorded}
    assert ranked == {4: 1e9, 40: log_of(config)[-1]["val_loss"]}


@pytest.mark.extra
def test_an_elastic_run_grows_and_shrinks(tutorial, head, reference, monkeypatch):
    """From two workers to four, when a node comes, and back to two, when it is lost."""
    # Each of these nodes has room for two workers and their data tasks.
    room = {"num_cpus": 6, "resources": {"host": 2}}
    head.add_node(**room)
    head.wait_for_nodes()
    scaling = {
        "num_workers": [2, 4],
        "resources_per_worker": {"CPU": 2, "host": 1},
        "elastic_resize_monitor_interval_s": 2.0,
    }
    changes = {"run_name": "elastic", "stall_timeout_s": 900.0}
    changes |= {"batch_size": 12, "eval_windows": 12}
    config = replace(reference, scaling=scaling, **changes)

    def loop(settings: dict) -> None:
        workers = ray.train.get_context().get_world_size()

        def hold(line: dict) -> None:  # until Ray starts another number of workers
            if line["step"] == {2: 12, 4: 20}[workers]:
                time.sleep(3_600)

        with after_each_line(hold):
            tutorial.train_loop_per_worker(settings)

    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(lambda: last_step(config) == 12, what="what two workers do")
        node = head.add_node(**room)
        wait_for(lambda: last_step(config) == 20, what="what four workers do")
        wait_for(lambda: "step_00000016" in saved(config), what="their checkpoint")
        lose(head, node)
        assert result().metrics["step"] == config.max_steps
    losses, expected = log_of(config), losses_alone(tutorial, config)
    np.testing.assert_allclose([x["loss"] for x in losses], expected, atol=1e-4)

"""A TPU v6e 4x4 slice, played by four Ray nodes whose workers simulate four chips each."""

import pytest
from accidents import (
    assert_losses_of_one_process,
    in_the_background,
    last_step,
    lose,
    train_loop_of,
    wait_for,
    world_sizes,
)
from ray.train import ScalingConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simulated")]


def add_host(cluster, name: str, host: int, pod_type: str, topology: str):
    """A node with the resources, labels, and environment of a host of a v6e slice."""
    resources = {"TPU": 4, "accelerator_type:TPU-V6E": 1}
    resources |= {f"TPU-{pod_type}-head": 1} if host == 0 else {}
    environment = {"TPU_NAME": name, "TPU_WORKER_ID": str(host)}
    environment |= {"TPU_ACCELERATOR_TYPE": pod_type, "TPU_TOPOLOGY": topology}
    labels = {"slice-name": name, "worker-id": str(host), "pod-type": pod_type}
    return cluster.add_node(
        num_cpus=1,
        resources=resources,
        env_vars=environment,
        labels={f"ray.io/tpu-{label}": value for label, value in labels.items()},
    )


# Attention is XLA's: splash is a kernel for TPUs, which benchmarks/compile.py compiles.
MODEL = {"batch_size": 32, "fsdp": 4, "n_layer": 1, "eval_steps": 1}


def test_slice_trains_and_saves(tutorial, head, small, write_bins):
    """The notebook's loop and its TPU machines, with a small model, which four chips share."""
    for host in range(4):
        add_host(head, "slice-0", host, "v6e-16", "4x4")
    head.wait_for_nodes()
    config = small(machines="v6e_4x4", max_steps=3, eval_interval=3, **MODEL)
    write_bins(config, val_tokens=1_001)
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 3
    assert_losses_of_one_process(tutorial, config)


@pytest.mark.extra
def test_an_elastic_run_on_two_slices_shrinks_and_grows(
    tutorial, head, small, write_bins, monkeypatch
):
    """Two v6e 2x2 slices of one host each; one of them; two again, with the same losses."""
    slices = [add_host(head, f"slice-{i}", 0, "v6e-4", "2x2") for i in range(2)]
    head.wait_for_nodes()
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
    scaling = ScalingConfig(
        num_workers=(1, 2),
        use_tpu=True,
        topology="2x2",
        accelerator_type="TPU-V6E",
        resources_per_worker={"TPU": 4},
        elastic_resize_monitor_interval_s=2.0,
    )
    monkeypatch.setitem(tutorial.SCALING, "slices", scaling)
    config = small(machines="slices", max_steps=100, learning_rate=1e-3, **MODEL)
    write_bins(config, val_tokens=1_001)
    trainer = tutorial.make_trainer(config, train_loop_of(tutorial, pause=0.4))
    with in_the_background(trainer.fit) as result:
        wait_for(lambda: last_step(config) >= 12, what="step 12")
        lose(head, slices[1])
        wait_for(lambda: world_sizes(config) == [2, 1], what="one worker alone")
        step = last_step(config)
        wait_for(lambda: last_step(config) > step + 10, what="its progress")
        add_host(head, "slice-2", 0, "v6e-4", "2x2")
        assert result().error is None
    assert world_sizes(config)[:3] == [2, 1, 2]
    assert_losses_of_one_process(tutorial, config)

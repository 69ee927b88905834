"""A TPU v6e 4x4 slice, played by four Ray nodes whose workers simulate four chips each."""

import dataclasses

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
from conftest import SLICE

import trainkit.checkpoints

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


# Attention is XLA's: splash is a kernel for TPUs, which test_tpu_compile compiles.
HOSTS = SLICE | {"num_workers": None, "batch_size": 32, "fsdp": 4, "n_layer": 1}
HOSTS |= {"eval_steps": 1, "cpus_per_worker": 1}
ALONE = {"topology": None, "accelerator_type": None, "devices_per_worker": 8}


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(ALONE, marks=pytest.mark.extra)], ids=["4x4", "alone"]
)
def test_slice_trains_and_saves(tutorial, head, small, write_bins, changes):
    """The notebook's loop and TPU configuration, with a small model, which four chips share.

    Or a host by itself, as on Colab and Kaggle: no slice, no topology, a v5e-8.
    """
    if changes:
        head.add_node(num_cpus=1, resources={"TPU": 8})
    else:
        for host in range(4):
            add_host(head, "slice-0", host, "v6e-16", "4x4")
    head.wait_for_nodes()
    config = small(**HOSTS | {"max_steps": 3, "eval_interval": 3} | changes)
    write_bins(config, val_tokens=1_001)
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 3
    assert_losses_of_one_process(tutorial, config)
    settings = trainkit.checkpoints.newest_settings(config)
    found = settings["num_workers"], settings["devices_per_worker"]
    assert found == ((1, 8) if changes else (4, 4))


@pytest.mark.extra
def test_an_elastic_run_on_two_slices_shrinks_and_grows(
    tutorial, head, small, write_bins, monkeypatch
):
    """Two v6e 2x2 slices of one host each; one of them; two again, with the same losses."""
    slices = [add_host(head, f"slice-{i}", 0, "v6e-4", "2x2") for i in range(2)]
    head.wait_for_nodes()
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
    changes = {"num_workers": [1, 2], "max_steps": 100, "topology": "2x2"}
    config = small(**HOSTS | changes | {"learning_rate": 1e-3})
    write_bins(config, val_tokens=1_001)
    trainer = tutorial.make_trainer(config, train_loop_of(tutorial, pause=0.4))
    trainer.scaling_config = dataclasses.replace(
        trainer.scaling_config, elastic_resize_monitor_interval_s=2.0
    )
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

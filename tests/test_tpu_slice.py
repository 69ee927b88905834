"""Slices of TPU v6e, played by Ray nodes whose workers simulate four chips each."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
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

SLICE = {
    "num_workers": 2,
    "use_tpu": True,
    "topology": "2x4",
    "accelerator_type": "TPU-V6E",
    "resources_per_worker": {"TPU": 4},
}


def add_slice(cluster, name: str, topology: str) -> list:
    """Nodes with the resources, labels, and environment of the hosts of a v6e slice."""
    chips = math.prod(map(int, topology.split("x")))
    kind, nodes = f"v6e-{chips}", []
    for host in map(str, range(chips // 4)):
        resources = {"TPU": 4, "accelerator_type:TPU-V6E": 1}
        resources |= {f"TPU-{kind}-head": 1} if host == "0" else {}
        environment = {"TPU_NAME": name, "TPU_WORKER_ID": host}
        environment |= {"TPU_ACCELERATOR_TYPE": kind, "TPU_TOPOLOGY": topology}
        labels = {"slice-name": name, "worker-id": host, "pod-type": kind}
        labels = {f"ray.io/tpu-{label}": value for label, value in labels.items()}
        given = {"resources": resources, "env_vars": environment, "labels": labels}
        nodes.append(cluster.add_node(num_cpus=1, **given))
    cluster.wait_for_nodes()
    return nodes


def trainer_of(tutorial, config, loop):
    """Whose workers have four simulated devices each."""
    trainer = tutorial.make_trainer(config, loop)
    variables = trainer.run_config.worker_runtime_env["env_vars"]
    variables["JAX_PLATFORMS"] = "cpu"
    variables["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
    return trainer


@pytest.mark.slow
def test_slice_trains_and_saves(tutorial, head, small, write_bins):
    """The notebook's loop and its TPU machines, with a small model, which four chips share.

    Attention is XLA's: splash is a kernel for TPUs, which benchmarks/compile.py compiles.
    """
    add_slice(head, "slice-0", "2x4")
    model = {"batch_size": 32, "fsdp": 4, "n_layer": 1, "eval_windows": 32}
    config = small(scaling=SLICE, max_steps=2, **model)
    write_bins(config, val_tokens=1_001)
    trainer_of(tutorial, config, tutorial.train_loop_per_worker).fit()
    assert saved(config) == ["step_00000002"]

    # With about the losses of one process
    expected = losses_alone(tutorial, replace(config, fsdp=1))
    found = [line["loss"] for line in log_of(config)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.extra
def test_slices_are_lost_and_come_back(tutorial, head, small, write_bins):
    """Two, one, and two: each time, the run continues from its checkpoint."""
    add_slice(head, "slice-0", "2x4")
    second = add_slice(head, "slice-1", "2x4")
    scaling = SLICE | {"num_workers": [2, 4]}
    scaling["elastic_resize_monitor_interval_s"] = 2.0
    model = {"batch_size": 32, "fsdp": 4, "n_layer": 1, "eval_windows": 32}
    steps = {"max_steps": 28, "eval_interval": 4, "stall_timeout_s": 900.0}
    config = small(scaling=scaling, **steps, **model)
    write_bins(config, val_tokens=1_001)
    holds = {12: 4, 20: 2}  # at these steps, workers of that number wait for others

    def loop(settings: dict) -> None:
        count = ray.train.get_context().get_world_size()
        # A CPU device knows of no slice; two workers are the hosts of one.
        tutorial.ops.slice_of = lambda device: device.process_index // 2
        create_mesh = tutorial.create_mesh

        def note(config):
            mesh = create_mesh(config)
            print(f"{count} workers, mesh {mesh.shape}")
            for replica in mesh.devices:  # fsdp and tensor stay in a slice
                assert len({x.process_index // 2 for x in replica.ravel()}) == 1
            return mesh

        def hold(line: dict) -> None:
            if holds.get(line["step"]) == count:
                time.sleep(3_600)

        tutorial.create_mesh = note
        with after_each_line(hold):
            tutorial.train_loop_per_worker(settings)

    fit = trainer_of(tutorial, config, loop).fit
    with in_the_background(fit) as finish:
        wait_for(lambda: last_step(config) == 12, what="what two slices do")
        for node in second:
            lose(head, node)
        wait_for(lambda: last_step(config) == 20, what="what one does")
        add_slice(head, "slice-2", "2x4")
        assert finish().metrics["step"] == config.max_steps
    found = [line["loss"] for line in log_of(config)]
    expected = losses_alone(tutorial, replace(config, fsdp=1))
    np.testing.assert_allclose(found, expected, atol=1e-4)

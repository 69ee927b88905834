"""A TPU v6e 4x4 slice, played by four Ray nodes whose workers simulate four chips each."""

from dataclasses import replace

import numpy as np
import pytest
from accidents import log_of, saved
from samples import losses_alone


def add_host(cluster, host: int) -> None:
    """A node with the resources, labels, and environment of a host of a v6e slice."""
    resources = {"TPU": 4, "accelerator_type:TPU-V6E": 1}
    resources |= {"TPU-v6e-16-head": 1} if host == 0 else {}
    environment = {"TPU_NAME": "slice-0", "TPU_WORKER_ID": str(host)}
    environment |= {"TPU_ACCELERATOR_TYPE": "v6e-16", "TPU_TOPOLOGY": "4x4"}
    labels = {"slice-name": "slice-0", "worker-id": str(host), "pod-type": "v6e-16"}
    labels = {f"ray.io/tpu-{label}": value for label, value in labels.items()}
    given = {"resources": resources, "env_vars": environment, "labels": labels}
    cluster.add_node(num_cpus=1, **given)


@pytest.mark.slow
def test_slice_trains_and_saves(tutorial, head, small, write_bins):
    """The notebook's loop and its TPU machines, with a small model, which four chips share.

    Attention is XLA's: splash is a kernel for TPUs, which benchmarks/compile.py compiles.
    """
    for host in range(4):
        add_host(head, host)
    head.wait_for_nodes()
    model = {"batch_size": 32, "fsdp": 4, "n_layer": 1, "eval_steps": 1}
    config = small(machines="v6e_4x4", max_steps=2, **model)
    write_bins(config, val_tokens=1_001)
    trainer = tutorial.make_trainer(config, tutorial.train_loop_per_worker)
    variables = trainer.run_config.worker_runtime_env["env_vars"]
    variables["JAX_PLATFORMS"] = "cpu"
    variables["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
    trainer.fit()
    assert saved(config) == ["step_00000002"]

    # With about the losses of one process
    expected = losses_alone(tutorial, replace(config, fsdp=1))
    found = [line["loss"] for line in log_of(config)]
    np.testing.assert_allclose(found, expected, atol=1e-4)

"""A TPU v6e 4x4 slice, played by four Ray nodes whose workers simulate four chips each."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from accidents import (
    at_step,
    in_the_background,
    log_of,
    lose,
    losses_of_one_process,
    train_loop_of,
    wait_for,
    world_sizes,
)
from conftest import ROOT

import trainkit.config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simulated")]
CONFIG = ROOT / "configs/gpt2-124m-tpu-v6e.yaml"


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


def small_model(folder: Path, **changes):
    """The TPU configuration with a small model, and its storage in `folder`."""
    values = {
        **{
            "vocab_size": 521,
            "block_size": 16,
            "n_layer": 1,
            "n_head": 2,
            "n_embd": 32,
        },
        # Splash is a kernel for TPUs; test_tpu_compile compiles it.
        **{"compute_dtype": "float32", "attention": "xla", "batch_size": 32},
        **{"learning_rate": 1e-2, "warmup_steps": 4, "log_interval": 1},
        **{"eval_interval": 3, "eval_steps": 1, "data_dir": str(folder / "data")},
        "storage_path": str(folder / "runs"),
    }
    return trainkit.config.load_config(CONFIG, **(values | changes))


def check_losses(tutorial, config) -> None:
    """They are those of one process, step for step."""
    alone = {"platform": "cpu", "topology": None, "accelerator_type": None}
    one = dataclasses.replace(config, num_workers=1, devices_per_worker=1, **alone)
    log = log_of(config)
    assert [line["step"] for line in log] == list(range(1, config.max_steps + 1))
    losses = losses_of_one_process(tutorial, one)
    np.testing.assert_allclose([line["loss"] for line in log], losses, atol=1e-4)


ALONE = {"topology": None, "accelerator_type": None, "devices_per_worker": 8}


@pytest.mark.parametrize(
    "changes, workers, devices",
    [({}, 4, 4), pytest.param(ALONE, 1, 8, marks=pytest.mark.extra)],
    ids=["a slice", "a host by itself"],
)
def test_slice_trains_and_saves(
    tutorial, head, write_bins, tmp_path, changes, workers, devices
):
    """The notebook's loop and TPU configuration, with a small model.

    Or a host by itself, as on Colab and Kaggle: no slice, no topology, a v5e-8.
    """
    if changes:
        head.add_node(num_cpus=1, resources={"TPU": 8})
    else:
        for host in range(4):
            add_host(head, "slice-0", host, "v6e-16", "4x4")
    head.wait_for_nodes()
    config = small_model(tmp_path, max_steps=4, **changes)
    write_bins(config, val_tokens=1_001)
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 4
    check_losses(tutorial, config)
    metadata = ocp.PyTreeCheckpointer().metadata(result.checkpoint.path)
    assert metadata.custom_metadata["num_workers"] == workers
    assert metadata.custom_metadata["devices_per_worker"] == devices
    assert jax.process_count() == 1 and os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.extra
def test_a_run_on_two_slices_goes_on_when_it_loses_one(
    tutorial, head, write_bins, tmp_path, monkeypatch
):
    """Two v6e 2x2 slices of one host each; then one of them, with the same losses."""
    slices = [add_host(head, f"slice-{i}", 0, "v6e-4", "2x2") for i in range(2)]
    head.wait_for_nodes()
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
    changes = {"num_workers": [1, 2], "max_steps": 30, "eval_interval": 5}
    config = small_model(tmp_path, topology="2x2", learning_rate=1e-3, **changes)
    write_bins(config, val_tokens=1_001)
    loop = train_loop_of(tutorial)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(lambda: at_step(12)(config), what="step 12")
        lose(head, slices[1])
        assert result().error is None
    assert world_sizes(config) == [2, 1]
    check_losses(tutorial, config)

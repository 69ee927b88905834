"""Which devices a worker gets: GPUs that Ray assigned, simulated here, and several each."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import ray.train
from accidents import log_of, losses_of_one_process
from conftest import start_ray, stop_ray

import trainkit.config
import trainkit.workers

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def gpu_node():
    """A node that says it has two GPUs."""
    stop_ray()
    start_ray(num_cpus=4, num_gpus=2)
    yield
    stop_ray()


@pytest.mark.extra
def test_two_workers_with_four_devices_each(tutorial, gpu_node, small, write_bins):
    """Data, FSDP, and tensor parallelism at once; then on another mesh."""
    config = write_bins(
        small(num_workers=2, devices_per_worker=4, batch_size=8, max_steps=10)
    )
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 10
    alone = dataclasses.replace(config, devices_per_worker=1)
    losses = losses_of_one_process(tutorial, dataclasses.replace(alone, max_steps=15))
    np.testing.assert_allclose(
        [x["loss"] for x in log_of(config)], losses[:10], atol=1e-4
    )

    # Written by 8 devices in parallel on the data, restored by 4 that divide the model.
    other = dataclasses.replace(config, num_workers=1, fsdp=4, max_steps=15)
    assert other.mesh_shape(1) == (1, 4, 1)
    assert tutorial.make_trainer(other).fit().error is None
    np.testing.assert_allclose([x["loss"] for x in log_of(config)], losses, atol=1e-4)


@pytest.fixture
def two_gpus(tutorial, gpu_node, monkeypatch):
    """GPUs that Ray believes in, and workers that compute on the CPU."""
    monkeypatch.setitem(trainkit.workers.PLATFORMS, "gpu", "cpu")


def loop_after_rays_backend(tutorial, config):
    """The notebook's loop after what Ray's backend does to each worker with one GPU."""
    train_loop = tutorial.train_loop_per_worker

    def loop(settings):
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        train_loop(settings)
        rank = ray.train.get_context().get_world_rank()
        seen = os.environ["CUDA_VISIBLE_DEVICES"]
        (config.run_path / f"gpus-{rank}").write_text(seen)

    return loop


def test_two_workers_of_a_node_take_two_gpus(tutorial, two_gpus, small, write_bins):
    config = write_bins(small(num_workers=2, platform="gpu", max_steps=3))
    tutorial.make_trainer(config, loop_after_rays_backend(tutorial, config)).fit()
    seen = {(config.run_path / f"gpus-{rank}").read_text() for rank in range(2)}
    assert seen == {"0", "1"}


def test_two_workers_on_one_gpu_are_refused(
    tutorial, two_gpus, small, write_bins, monkeypatch
):
    config = write_bins(small(num_workers=2, platform="gpu", max_failures=0))
    monkeypatch.setattr(tutorial, "own_gpus", lambda: None)
    loop = loop_after_rays_backend(tutorial, config)
    with pytest.raises(ray.train.TrainingFailedError, match="GPU .*'0'.* as well"):
        tutorial.make_trainer(config, loop).fit()
    assert not log_of(config)


PLUGIN = """
import pathlib
from jax._src import xla_bridge

def claim():
    pathlib.Path("claimed").touch()
    raise RuntimeError("this accelerator is only played")

def initialize():
    xla_bridge.register_backend_factory("played", claim, priority=500)
"""
DRIVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from notebook_module import code_cells, load_notebook
if sys.argv[2] == "as the notebook does":
    exec(code_cells()[0].source)
import jax
if sys.argv[2] == "as the notebook does":
    tutorial = load_notebook()
    demo = trainkit.config.TrainingConfig(n_layer=1, n_embd=12, vocab_size=99, block_size=8)
    tutorial.create_state(demo)
print(jax.devices())
"""


@pytest.mark.parametrize("claimed", [False, True])
def test_driver_leaves_accelerators_to_the_workers(tmp_path, claimed):
    """On a machine with a JAX plugin for an accelerator, which notes who claims it."""
    plugin = tmp_path / "jax_plugins/played"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    how = "plain JAX" if claimed else "as the notebook does"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    subprocess.run(
        [sys.executable, "-c", DRIVER, ROOT / "ci", how],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=120,
    )
    assert (tmp_path / "claimed").exists() == claimed

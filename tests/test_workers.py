"""Which devices a worker gets, with which libraries, and what is refused or said at once."""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import ray.train
from ray.train import ScalingConfig
from samples import python

import trainkit.workers


@pytest.mark.slow
def test_two_workers_of_a_node_take_two_gpus(tutorial, cluster, small, write_bins):
    """Before the first of them asks JAX for a device, which is when CUDA decides.

    The GPUs are CPUs that JAX takes for CUDA's; each worker notes which ones it would see,
    and where its libraries are: its node's own plugins for the network among them.
    """

    def loop(settings):
        from jax._src import hardware_utils, xla_bridge

        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # by Ray's backend, on all
        note = config.run_path / f"gpus-{ray.train.get_context().get_world_rank()}"

        def start_cuda():
            names = "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"
            note.write_text(" ".join(os.environ[name] for name in names))
            return xla_bridge.make_cpu_client()

        hardware_utils.has_visible_nvidia_gpu = lambda: True
        xla_bridge.register_backend_factory("cuda", start_cuda, priority=500)
        trainkit.workers.start(settings)

    config = write_bins(small(machines="gpu"))
    tutorial.SCALING["gpu"] = ScalingConfig(num_workers=2, use_gpu=True)
    tutorial.make_trainer(config, loop).fit()
    seen = {(config.run_path / f"gpus-{rank}").read_text() for rank in range(2)}
    libraries = f"{os.environ.get('LD_LIBRARY_PATH', '')}:/usr/local/nvidia/lib64"
    assert seen == {f"{gpu} {libraries}" for gpu in range(2)}


def test_pips_cuda_comes_before_the_nodes(tmp_path, monkeypatch):
    """What a library needs is then there already; as a stand-in, one of numpy's."""
    loaded = "cublas/lib/libcublasLt.so.12", "cudnn/lib/libcudnn_graph.so.9"
    loaded += "cu13/lib/libnvJitLink.so.13", "cu13/lib/libcublasLt.so.13"
    for name in (*loaded, "cu13/lib/libcudart.so.13"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(np.random.bit_generator.__file__, path)
    (tmp_path / "nvidia/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    trainkit.workers._load_cuda_libraries()
    mapped = re.findall(rf"{tmp_path}/nvidia/(.*)", Path("/proc/self/maps").read_text())
    assert {*mapped} == {*loaded}


DRIVER = """
import sys
sys.path.append("ci")
from notebook_module import code_cells
for cell in code_cells()[:2]:
    exec(cell.source)
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device has been asked for"
print(jax.config.jax_platforms)
"""


def test_driver_leaves_accelerators_to_the_workers():
    """Its first cells limit JAX to CPUs, before anything asks JAX for a device."""
    assert python(DRIVER, JAX_PLATFORMS=None).split()[-1] == "cpu"
    late = "import jax, trainkit\ntry: trainkit.set_up_driver()\nexcept RuntimeError: print(1)"
    assert python(late, JAX_PLATFORMS=None).split()[-1] == "1"


SCALINGS = {
    "cpu": ScalingConfig(num_workers=2),
    "cuda": ScalingConfig(num_workers=2, use_gpu=True),
    "tpu": ScalingConfig(
        num_workers=4, use_tpu=True, topology="4x4", accelerator_type="TPU-V6E"
    ),
}


@pytest.mark.parametrize("platform", SCALINGS)
def test_environment_of_a_worker(small, tmp_path, monkeypatch, platform):
    """JAX reads it when it is imported, so it must be there before. Your flags stay."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    found = trainkit.workers.environment(small(), SCALINGS[platform])
    assert found["JAX_PLATFORMS"] == platform
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "data-jax-cache")
    assert found["JAX_ENABLE_COMPILATION_CACHE"] == str(platform != "cpu")
    assert found["grpc_proxy"] == ""
    ours = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0 "
    assert found["XLA_FLAGS"] == ours * (platform == "cuda") + "--mine"  # the last wins
    assert ("LD_LIBRARY_PATH" in found) == (platform == "cuda")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    found = trainkit.workers.environment(small(), SCALINGS[platform])
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"


def test_a_batch_that_workers_cant_share_is_refused_in_the_driver(cluster, small):
    """Of an elastic run, for each number; a slice counts its chips."""
    refused = [
        (ScalingConfig(num_workers=3), {}, "3 devices"),
        (ScalingConfig(num_workers=(2, 4)), {}, "3 devices"),
        (ScalingConfig(num_workers=2, use_gpu=True), {"fsdp": 4}, "2 devices"),
        (SCALINGS["tpu"], {}, "16 devices"),
    ]
    for scaling, changes, words in refused:
        with pytest.raises(ValueError, match=words):
            trainkit.workers.settings(small(**changes), scaling, None)


def test_what_the_cluster_lacks_is_said(tutorial, cluster, small, write_bins, capsys):
    config, create = write_bins(small(batch_size=840)), tutorial.create_state
    scaling = ScalingConfig(num_workers=(4, 8))  # 4 are there
    trainkit.workers.settings(config, scaling, create)
    assert not capsys.readouterr().out
    trainkit.workers.settings(config, ScalingConfig(num_workers=8), create)
    assert re.search("ask for .*8.*cluster has .*4", capsys.readouterr().out)


@pytest.mark.slow
def test_a_worker_notices_what_would_pass_in_silence(
    tutorial, cluster, small, write_bins
):
    """Other tokens on its node, and workers that don't see one another."""
    config = write_bins(small(max_failures=0))
    trainer = tutorial.make_trainer(config)
    write_bins(config, seed=1)
    with pytest.raises(ray.train.TrainingFailedError, match="holds other tokens"):
        trainer.fit()
    trainer = tutorial.make_trainer(config)
    trainer.backend_config = None
    alone = ray.train.v2.jax.JaxTrainer(
        trainer.train_loop_per_worker,
        train_loop_config=trainer.train_loop_config,
        scaling_config=trainer.scaling_config,
        run_config=trainer.run_config,
    )
    with pytest.raises(ray.train.TrainingFailedError, match="JAX sees 1 of 2 workers"):
        alone.fit()


@pytest.mark.slow
def test_a_start_that_fails_again_and_again_ends(
    tutorial, cluster, small, write_bins, monkeypatch
):
    """Ray alone would wait for machines without end, and so would a resource that leaked."""
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "2")
    lacking = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5, "none": 1})
    monkeypatch.setitem(tutorial.SCALING, "lacking", lacking)
    trainer = tutorial.make_trainer(write_bins(small(machines="lacking")))
    failures = trainer.run_config.failure_config
    assert 30 <= failures.controller_failure_limit <= 120  # of a minute each
    failures.controller_failure_limit = 1
    with pytest.raises(ray.train.ControllerError, match="(?i)timeout|timed out"):
        trainer.fit()


def test_the_configuration_that_fits(cluster, monkeypatch):
    monkeypatch.delenv("GPT2_CONFIG", raising=False)
    resources = {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    for kind, name in (
        ("CPU", "smoke"),
        ("GPU", "stories"),
        ("TPU", "stories-tpu-v6e"),
    ):
        resources[kind] = 1.0
        assert trainkit.workers.default_config() == f"configs/{name}.yaml"
    monkeypatch.setenv("GPT2_CONFIG", "mine.yaml")
    assert trainkit.workers.default_config() == "mine.yaml"

"""The real train step, compiled for GPUs and TPUs on a machine that has none."""

import json
from importlib.util import find_spec

import pytest
from conftest import ROOT
from samples import python

for_gpus = pytest.mark.skipif(
    not any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
    reason="needs JAX's CUDA plugin, which requirements-gpu.txt brings",
)


@pytest.fixture
def report_on(tmp_path):
    """A function: what `benchmarks/compile.py` says, in a process of its own."""

    def report_on(config: str, *options: str) -> dict:
        script = ROOT / "benchmarks/compile.py"
        # In /tmp/tpu_logs, any Ray cluster would show libtpu's as its workers'.
        environment = {"TPU_LOG_DIR": str(tmp_path), "XLA_FLAGS": None}
        said = python(script, f"configs/{config}.yaml", *options, **environment)
        return json.loads(said.splitlines()[-1])

    return report_on


@pytest.mark.slow
def test_one_layer_compiles_for_a_v6e_slice(report_on):
    """With 1 of its 12 layers, for the time it takes; benchmarks/README.md has them all."""
    report = report_on("gpt2-124m-tpu-v6e", "v6e:4x4", "n_layer=1")
    assert report["devices"] == 16 and report["micro-batches"] == "2 x 16"
    assert report["temporary_gib"] < 1.4  # 1.48 with heads of 64 as the last axis
    assert report["attention_kernels"] == 2  # splash attention, forward and backward
    found = report["collectives"]
    assert not found["in_loops"] and {*found["outside"]} == {"all-reduce f32"}


@for_gpus
@pytest.mark.extra
def test_gpt2_124m_for_an_h200(report_on):
    """32 windows at once."""
    report = report_on("gpt2-124m", "1xh200", "batch_size=32")
    assert report["attention_kernels"] == 24  # cuDNN's, forward and backward
    assert report["temporary_gib"] < 13
    assert not any(report["collectives"].values())


@for_gpus
@pytest.mark.extra
def test_gradients_meet_once_a_step_on_eight_gpus(report_on):
    report = report_on("gpt2-124m", "8xh200")
    assert report["micro-batches"] == "2 x 30"
    found = report["collectives"]
    assert not found["in_loops"] and {*found["outside"]} == {"all-reduce f32"}


@for_gpus
@pytest.mark.extra
@pytest.mark.parametrize(
    "name, devices, room",
    [
        ("stories", "4xa10g", 16.5),
        ("stories", "4xl4", 16.5),
        ("gpt2-finetune", "1xa10g", 16.5),
        ("gpt2-7b-gpu", "32xh100", 25),
    ],
)
def test_each_configuration_fits_its_gpu(report_on, name, devices, room):
    """In the three quarters of a GPU's GiB that JAX takes at once."""
    options = ["init_from=null"] if name == "gpt2-finetune" else []
    report = report_on(name, devices, *options)
    assert report["attention_kernels"]
    assert report["state_gib"] + report["temporary_gib"] < room


SLICES = """
import sys
sys.path.append("tests")
from jax.experimental import mesh_utils, topologies
from samples import run_from_guide
options = {"topology_name": "v6e:4x4", "num_slices": 2}
devices = topologies.get_topology_desc(platform="tpu", **options).devices
names = {"mesh_utils": mesh_utils, "devices": devices}
names |= {"shape": (8, 4, 1), "fsdp": 4, "tensor": 1}
grid = run_from_guide("create_hybrid_device_mesh", names)["grid"]
print([[device.slice_index for device in row] for row in grid[:, :, 0]])
"""


@pytest.mark.slow
def test_only_data_crosses_the_network_between_slices(tmp_path):
    said = python(SLICES, TPU_LOG_DIR=str(tmp_path), TPU_SKIP_MDS_QUERY="1")
    assert json.loads(said.splitlines()[-1]) == [[0] * 4] * 4 + [[1] * 4] * 4

"""The real train step, compiled for TPUs by libtpu, on a machine that has none."""

import json
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT
from samples import python


def run(script: str | Path, *arguments: str) -> str:
    """What a process of its own prints."""
    # In /tmp/tpu_logs, any Ray cluster of the machine would show libtpu's as its workers'.
    with tempfile.TemporaryDirectory() as folder:
        return python(script, *arguments, TPU_LOG_DIR=folder)


def compile_for_tpu(config: str, *options: str) -> dict:
    """What `benchmarks/tpu_compile.py` says."""
    script = ROOT / "benchmarks/tpu_compile.py"
    said = run(script, f"configs/{config}", *options, "--json")
    return json.loads(said.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, room",
    [("gpt2-124m", 1.4), pytest.param("stories", 0.8, marks=pytest.mark.extra)],
)
def test_one_layer_compiles_for_a_v6e_slice(name, room):
    """With 1 of its 12 layers, for the time it takes; benchmarks/README.md has them all."""
    report = compile_for_tpu(f"{name}-tpu-v6e.yaml", "n_layer=1")
    assert report["devices"] == 16
    assert (
        report["temporary_gib"] < room
    )  # of gpt2-124m, 1.48 with heads of 64 as the last axis
    assert report["kernels"] == 2  # splash attention, forward and backward
    # Data-parallel: gradients are summed over all chips, and nothing else is moved.
    assert set(report["collectives"]) == {"all-reduce"}


@pytest.mark.extra
def test_gpt2_xl_compiles_for_a_v6e_slice():
    """All of its 48 layers, which takes four minutes."""
    report = compile_for_tpu("gpt2-xl.yaml")
    assert report["parameters"] == 1_557_611_200
    assert (
        report["total_gib"] < 11
    )  # 9.5 when written, with a layer's parameters at a time
    # In one loop: forward, and forward again and backward.
    assert report["kernels"] == 3
    # Parameters come from the chips that keep them; only scalars and sums are reduced.
    assert {"all-gather", "all-reduce"} <= report["collectives"].keys()


MESHES = """
import json, os, sys
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
from jax.experimental import topologies
import trainkit.config, trainkit.sharding
for slices, fsdp, tensor in json.loads(sys.argv[1]):
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:4x4", num_slices=slices)
    config = trainkit.config.load_config(
        "configs/gpt2-124m-tpu-v6e.yaml", num_workers=4 * slices, fsdp=fsdp,
        tensor_parallel=tensor)
    mesh = trainkit.sharding.make_mesh(config, topology.devices)
    assert mesh.devices.shape == (16 * slices // fsdp // tensor, fsdp, tensor)
    slice_of = lambda device: getattr(device, "slice_index", 0)
    for group in mesh.devices.reshape(-1, fsdp * tensor):
        assert len({slice_of(device) for device in group}) == 1, "crosses slices"
"""


@pytest.mark.extra
def test_any_mesh_fits_a_slice_and_none_crosses_two():
    shapes = [(1, 1, 1), (1, 16, 1), (1, 8, 1), (1, 1, 2), (1, 2, 2), (2, 8, 2)]
    run(MESHES, json.dumps(shapes))

"""One mesh for everything, on eight simulated devices of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trainkit.devices

ROOT = Path(__file__).resolve().parent.parent


MESHES = {  # data, fsdp, tensor
    "data": (8, 1, 1),
    "fsdp": (1, 8, 1),
    "tensor": (1, 1, 8),
    "data and fsdp": (2, 4, 1),
    "all three": (2, 2, 2),
}


PROGRAM = """
import json, sys
sys.path.insert(0, "ci"), sys.path.insert(0, "benchmarks")
import jax, numpy as np, trainkit.config, trainkit.devices
from jax.sharding import NamedSharding, PartitionSpec
from common import compile_step, load_notebook
from notebook_module import initial_state
from program import count_collectives, parse

tutorial = load_notebook()
SHAPE = dict(vocab_size=1000, block_size=32, n_head=8, n_embd=64,
             compute_dtype="float32", batch_size=16, warmup_steps=3, decay_steps=20,
             learning_rate=1e-3)
windows = np.random.default_rng(0).integers(0, 1000, (10, 16, 33), np.uint16)

def prepare(devices, shape, n_layer=1):
    config = trainkit.config.TrainingConfig(
        **SHAPE, n_layer=n_layer, fsdp=shape[1], tensor_parallel=shape[2],
        devices_per_worker=len(devices))
    assert config.mesh_shape(1) == shape
    mesh = trainkit.devices.make_mesh(config, devices)
    return config, mesh, compile_step(tutorial, config, mesh)[0]

def run(devices, shape):
    config, mesh, step = prepare(devices, shape)
    state, losses = initial_state(tutorial, config, mesh), []
    shapes = {
        ".".join(map(str, path)): (p.shape, p[...].addressable_shards[0].data.shape)
        for path, p in tutorial.nnx.to_flat_state(state.params)
    }
    get = tutorial.optax.tree_utils.tree_get
    mu, nu = get(state.opt_state, "mu"), get(state.opt_state, "nu")
    moments = [p.sharding == m.sharding == n.sharding for p, m, n
               in zip(*map(jax.tree.leaves, (state.params, mu, nu)))]
    sharding = NamedSharding(mesh, PartitionSpec(trainkit.devices.BATCH_AXES))
    for batch in windows:
        state, metrics = step(state, jax.device_put(batch, sharding))
        losses.append(float(metrics["loss"]))
    return dict(losses=losses, shapes=shapes, moments=all(moments),
                collectives=count_collectives(parse(step.as_text())))

meshes = json.loads(sys.argv[1])
report = {name: run(jax.devices(), tuple(shape)) for name, shape in meshes.items()}
report["one device"] = run(jax.devices()[:1], (1, 1, 1))
two = prepare(jax.devices(), (1, 1, 8), n_layer=2)[2]
report["tensor, two layers"] = count_collectives(parse(two.as_text()))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    """Losses, shardings, and collectives on each mesh, from a process with 8 devices."""
    flags = "--xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(MESHES)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_device(report, mesh):
    np.testing.assert_allclose(
        report[mesh]["losses"], report["one device"]["losses"], atol=1e-5, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_are_divided_as_the_table_says(tutorial, report, mesh):
    sizes = dict(zip(("data", "fsdp", "tensor"), MESHES[mesh]))
    rules = dict(tutorial.SHARDING_RULES)
    assert report[mesh]["moments"], "the optimizer's moments are divided otherwise"
    for name, (shape, shard) in report[mesh]["shapes"].items():
        axes = logical_axes(name)
        expected = [n // sizes.get(rules.get(a), 1) for n, a in zip(shape, axes)]
        assert shard == expected, name


def logical_axes(name: str) -> tuple:
    """What the axes of a parameter mean, written down apart from the model."""
    module, leaf = name.split(".")[-2:]
    if module in ("ln_1", "ln_2", "ln_f"):
        return (None,)
    axes = {
        "wte": ("vocab", "embed"),
        "wpe": (None, "embed"),
        "c_attn": ("embed", None, "heads"),
        "c_fc": ("embed", "mlp"),
        "c_proj": ("mlp" if ".mlp." in name else "heads", "embed"),
    }[module]
    return axes[1:] if leaf == "bias" else axes


@pytest.mark.slow
def test_collectives_are_the_expected_ones(report):
    counts = {mesh: report[mesh]["collectives"] for mesh in MESHES}
    print(counts)
    assert report["one device"]["collectives"] == {}
    # Data parallelism only sums gradients and the loss.
    assert set(counts["data"]) == {"all-reduce"}
    # FSDP gathers parameters, and sums gradients.
    assert counts["fsdp"]["all-gather"] > 0
    # A tensor-parallel layer sums activations twice forward and twice backward
    # (Megatron-LM, Shoeybi et al. 2019, section 3), and gathers no parameter.
    assert set(counts["tensor"]) == {"all-reduce"}
    two_layers = report["tensor, two layers"]
    assert set(two_layers) == {"all-reduce"}
    assert two_layers["all-reduce"] - counts["tensor"]["all-reduce"] == 4


def batches_for(config, numbers):
    """One worker's rows, whose windows have these numbers."""
    for sequence in np.reshape(numbers, (-1, config.batch_size)):
        tokens = np.repeat(sequence[:, None], config.block_size + 1, axis=1)
        yield {"sequence": sequence, "tokens": tokens.astype(np.uint16)}


def test_batches_begin_at_the_step_of_the_checkpoint(small):
    config, numbers = small(), range(8, 20)
    mesh = trainkit.devices.make_mesh(config)
    batches = batches_for(config, numbers)
    found = list(trainkit.devices.global_batches(batches, config, mesh, first_step=2))
    assert [batch.shape for batch in found] == [(4, 17)] * 3
    assert np.concatenate(found)[:, 0].tolist() == list(numbers)
    assert found[0].sharding == trainkit.devices.batch_sharding(mesh)


@pytest.mark.parametrize(
    "numbers, step",
    [
        ([0, 1, 2, 3, 4, 6, 7, 8], 1),  # 5 is missing
        ([0, 1, 2, 3, 3, 4, 5, 6], 1),  # 3 comes twice
        ([0, 2, 1, 3, 4, 5, 6, 7], 0),
        ([4, 5, 6, 7, 8, 9, 10, 11], 0),
    ],
)
def test_windows_that_are_not_those_of_the_step_are_noticed(small, numbers, step):
    config = small()
    batches = batches_for(config, numbers)
    mesh = trainkit.devices.make_mesh(config)
    with pytest.raises(RuntimeError, match=f"step {step}: expected the windows"):
        list(trainkit.devices.global_batches(batches, config, mesh))


NODES = """
import jax, trainkit.config, trainkit.devices
for workers, each in ((32, 1), (4, 8)):
    config = trainkit.config.load_config(
        "configs/gpt2-xl-gpu.yaml", num_workers=workers, devices_per_worker=each
    )
    mesh = trainkit.devices.make_mesh(config)
    print([[device.id for device in row] for row in mesh.devices[:, :, 0]])
"""


def test_the_gpus_of_a_node_are_neighbors_on_fsdp():
    """Eight in each of four nodes, however many workers a node has."""
    flags = "--xla_force_host_platform_device_count=32"
    result = subprocess.run(
        [sys.executable, "-c", NODES],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    nodes = [list(range(8 * node, 8 * node + 8)) for node in range(4)]
    assert result.stdout == f"{nodes}\n" * 2

"""Gradients and losses over devices and micro-batches: their mean, once a step, in float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import trainkit.sharding

ROOT = Path(__file__).resolve().parent.parent
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def test_only_kernels_are_cast(tutorial, small):
    """Embeddings, biases, and norms stay as exact as they are."""
    params = tutorial.create_state(small()).params
    half = small(compute_dtype="bfloat16")
    whole = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params)
    cast = nnx.to_flat_state(trainkit.sharding.fetch(params, whole, half))
    dtypes = {(path[-1], str(param[...].dtype)) for path, param in cast}
    others = {(name, "float32") for name in ("bias", "scale", "embedding")}
    assert dtypes == {("kernel", "bfloat16"), *others}
    assert len(cast) == len(nnx.to_flat_state(params))


@pytest.mark.parametrize("size", [6, 2, 1])
def test_a_micro_batch_has_every_kth_window_and_a_key_of_its_own(small, size):
    """The key is folded with the device and with the micro-batch, in this order."""
    config = small(batch_size=6, device_batch_size=size)
    params = nnx.State({"kernel": nnx.Param(jnp.float32(2))})
    windows, key, k = jnp.arange(6.0)[:, None], jax.random.key(7), 6 // size

    def loss(params, windows, key, config):
        return (params["kernel"][...] * windows).mean() * jax.random.uniform(key)

    keys = [jax.random.fold_in(jax.random.fold_in(key, 0), i) for i in range(k)]
    parts = [windows[i::k].mean() * jax.random.uniform(keys[i]) for i in range(k)]
    given = params, windows, key, config, ()
    assert trainkit.sharding.mean(loss, *given) == pytest.approx(2 * np.mean(parts))
    both = trainkit.sharding.mean(jax.value_and_grad(loss), *given)
    assert both[0] == pytest.approx(2 * np.mean(parts))
    assert both[1]["kernel"][...] == pytest.approx(np.mean(parts))


TOY = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from types import SimpleNamespace
from trainkit import sharding

RULES = (("kernel", ("fsdp", "tensor")),)
rng = np.random.default_rng(0)
kernel, bias, windows = (rng.normal(size=s).astype("float32") for s in ((8, 4), 4, (16, 8)))
seen = []

def loss(params, windows, key, config):
    seen.append([list(params["kernel"].shape), list(windows.shape)])
    return jnp.mean(jnp.tanh(windows @ params["kernel"][...] + params["bias"][...]) ** 2)

def run(data, fsdp, tensor):
    config = SimpleNamespace(
        mesh_shape=lambda workers: (data, fsdp, tensor), worker_range=(1, 1), batch_size=16,
        micro_batches=1, compute_dtype="float32", scan_layers=False,
    )
    mesh = sharding.make_mesh(config, jax.devices()[: data * fsdp * tensor])
    with jax.set_mesh(mesh):
        params = nnx.State({"kernel": nnx.Param(kernel), "bias": nnx.Param(bias)})
        specs = sharding.parameter_specs(params, RULES, mesh)
        place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        params = jax.tree.map(place, params, specs)
        batch = jax.device_put(windows, sharding.batch_sharding(mesh))
        mean = lambda f: jax.jit(lambda p, w: sharding.mean(f, p, w, None, config, RULES))
        alone = mean(loss)(params, batch)
        both, found = mean(jax.value_and_grad(loss))(params, batch)
    return {
        "losses": [float(alone), float(both)],
        "kernel": np.asarray(found["kernel"][...]).tolist(),
        "bias": np.asarray(found["bias"][...]).tolist(),
        "part": list(found["kernel"][...].addressable_shards[0].data.shape),
        "seen": seen[-1],
        "rows": sharding.local_rows(config, mesh).tolist(),
        "grid": [d.id for d in mesh.devices.ravel()],
        "axes": list(mesh.axis_names),
    }

print(json.dumps([run(*shape) for shape in json.loads(sys.argv[1])]))
"""
SHAPES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 1, 4)]


def on_eight_devices(program: str, *arguments: str):
    """What a process with eight devices prints last."""
    command = [sys.executable, "-c", program, *arguments]
    options = {"cwd": ROOT, "env": os.environ | EIGHT, "text": True}
    result = subprocess.run(command, capture_output=True, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def toys():
    """A model of one layer on several meshes."""
    return dict(zip(SHAPES, on_eight_devices(TOY, json.dumps(SHAPES))))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_a_layer_are_numpys_on_each_mesh(toys, shape):
    """And each device gets its own windows, all of fsdp's parameters, and its part back."""
    found, (data, fsdp, tensor) = toys[shape], shape
    rng = np.random.default_rng(0)
    kernel, bias, windows = (rng.normal(size=s) for s in ((8, 4), 4, (16, 8)))
    y = np.tanh(windows @ kernel + bias)
    slope = 2 * y * (1 - y**2) / y.size
    assert found["losses"] == pytest.approx([(y**2).mean()] * 2, rel=1e-5)
    np.testing.assert_allclose(found["kernel"], windows.T @ slope, atol=1e-6)
    np.testing.assert_allclose(found["bias"], slope.sum(axis=0), atol=1e-6)
    assert found["seen"] == [[8, 4], [16 // (data * fsdp), 8]]
    assert found["part"] == [8 // fsdp, 4 // tensor]
    assert found["rows"] == list(range(16))
    assert sorted(found["grid"]) == list(range(data * fsdp * tensor))
    assert found["axes"] == ["data", "fsdp", "tensor"]


PROGRAM = """
import json, sys
sys.path[:0] = ["benchmarks"]
import jax, numpy as np, program, trainkit.config, trainkit.sharding
from common import compile_step, load_notebook
from notebook_module import initial_state

tutorial = load_notebook()
windows = np.random.default_rng(0).integers(0, 1000, (4, 16, 33), np.uint16)
shape = dict(vocab_size=1000, block_size=32, n_head=8, n_embd=64, batch_size=16,
             loss_chunks=2, warmup_steps=3, decay_steps=20, learning_rate=1e-3)

def run(data, fsdp, tensor, **changes):
    devices = jax.devices()[: data * fsdp * tensor]
    config = trainkit.config.TrainingConfig(
        device_batch_size=8 // (data * fsdp), fsdp=fsdp, tensor_parallel=tensor,
        devices_per_worker=len(devices),
        **shape | {"n_layer": 1, "compute_dtype": "float32"} | changes)
    mesh = trainkit.sharding.make_mesh(config, devices)
    step = compile_step(tutorial, config, mesh)[0]
    state, losses = initial_state(tutorial, config, mesh), []
    for batch in windows:
        batch = jax.device_put(batch, trainkit.sharding.batch_sharding(mesh))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, program.collectives(program.parse(step.as_text()))

def drawn(data, fsdp, **changes):
    # The first losses, with the key of each device and micro-batch.
    config = trainkit.config.TrainingConfig(
        **shape, n_layer=1, platform="cpu", compute_dtype="float32", **changes)
    params, losses = tutorial.create_state(config).params, []
    step_key = jax.random.fold_in(jax.random.key(config.seed), 0)
    for device, rows in enumerate(np.split(windows[0], data * fsdp)):
        for index in range(2):
            key = jax.random.fold_in(jax.random.fold_in(step_key, device), index)
            losses.append(float(tutorial.loss_fn(params, rows[index::2], key, config)))
    return losses

half = {"compute_dtype": "bfloat16"}
print(json.dumps({
    "one device": run(1, 1, 1),
    "fsdp": run(1, 8, 1),
    "tensor": run(1, 1, 8),
    "tensor, two layers": run(1, 1, 8, n_layer=2),
    "all three": run(2, 2, 2),
    "all three, by layer": run(2, 2, 2, scan_layers=True),
    "by layer, bfloat16": run(2, 4, 1, scan_layers=True, **half),
    "dropout, bfloat16": run(8, 1, 1, dropout=0.3, **half),
    "dropout": run(2, 4, 1, dropout=0.3),
    "dropout by hand": drawn(2, 4, dropout=0.3),
}))
"""


@pytest.fixture(scope="module")
def runs():
    """Losses and collectives on each mesh."""
    return on_eight_devices(PROGRAM)


@pytest.mark.slow
def test_losses_of_two_micro_batches_are_those_of_one_device(runs):
    for mesh in ("fsdp", "tensor", "all three", "all three, by layer"):
        np.testing.assert_allclose(runs[mesh][0], runs["one device"][0], atol=1e-5)


@pytest.mark.slow
def test_each_device_and_micro_batch_draws_anew(runs):
    losses = runs["dropout by hand"]
    assert len(set(losses)) == len(losses) == 16
    assert runs["dropout"][0][0] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "dropout", "dropout, bfloat16"])
def test_gradients_meet_once_a_step_in_float32(runs, mesh):
    collectives = runs[mesh][1]
    sums = [c for c in collectives if c["kind"] in ("all-reduce", "reduce-scatter")]
    assert sums and not any(c["in_loop"] for c in collectives)
    assert all("bf16" not in c["arrays"] for c in sums)
    assert runs["one device"][1] == []
    if mesh == "fsdp":  # of what is summed whole, all is smaller than a matrix
        largest = {
            c["kind"]: c["bytes"] for c in sorted(sums, key=lambda c: c["bytes"])
        }
        assert largest["reduce-scatter"] > 4 * 1000 * 8  # the token embedding's part
        assert largest["all-reduce"] < 4 * 64 * 64  # biases' and norms' gradients


@pytest.mark.slow
def test_by_layer_parts_are_summed_over_data_once_a_step(runs):
    """In the loop, a layer is fetched, and its gradients are summed in float32 over fsdp."""
    collectives = runs["by layer, bfloat16"][1]
    inside = [c for c in collectives if c["in_loop"]]
    assert {c["kind"] for c in inside} == {"all-gather", "reduce-scatter"}
    sums = [c for c in collectives if c["kind"] != "all-gather"]
    assert all("bf16" not in c["arrays"] for c in sums)
    assert any(c["kind"] == "all-reduce" for c in sums)


@pytest.mark.slow
def test_a_tensor_parallel_layer_sums_activations_four_times(runs):
    """Twice forward and twice backward (Shoeybi et al. 2019, section 3); nothing else."""
    one, two = runs["tensor"][1], runs["tensor, two layers"][1]
    assert {c["kind"] for c in [*one, *two]} == {"all-reduce"}
    assert len(two) - len(one) == 4

"""One mesh for everything, on eight simulated devices of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

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
    assert report[mesh]["moments"], "the optimizer's moments are divided otherwise"
    for name, (shape, shard) in report[mesh]["shapes"].items():
        axes = logical_axes(name)
        expected = [n // sizes.get(AXES.get(a), 1) for n, a in zip(shape, axes)]
        assert shard == expected, name


AXES = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def logical_axes(name: str) -> tuple:
    """What the axes of a parameter mean, written down apart from the model."""
    module, leaf = name.split(".")[-2:]
    if module in ("ln_1", "ln_2", "ln_f"):
        return (None,)
    axes = {
        "wte": ("vocab", "embed"),
        "wpe": (None, "embed"),
        "c_fc": ("embed", "mlp"),
        "c_proj": ("mlp" if ".mlp." in name else "heads", "embed"),
    }.get(module, ("embed", "heads"))  # query, key, value
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
    """One worker's rows, step by step, of windows with these numbers."""
    for step in np.reshape(numbers, (-1, 1, config.batch_size)):
        tokens = np.repeat(step[..., None], config.block_size + 1, axis=-1)
        yield {"numbers": step, "tokens": tokens.astype(np.uint16)}


def test_batches_are_those_of_the_numbers(small):
    config, numbers = small(), np.arange(8, 20).reshape(3, 4)
    mesh = trainkit.devices.make_mesh(config)
    batches = batches_for(config, numbers)
    found = list(trainkit.devices.global_batches(batches, numbers, config, mesh))
    assert [batch.shape for batch in found] == [(4, 17)] * 3
    assert np.concatenate(found)[:, 0].tolist() == list(range(8, 20))
    assert found[0].sharding == trainkit.devices.batch_sharding(mesh)


def test_one_batch_is_fetched_ahead(small):
    """No step waits for its batch, and no more than two are on a device."""

    def fetched(batches):
        for batch in batches:
            order.append("fetched")
            yield batch

    config, order, numbers = small(), [], np.arange(16).reshape(4, 4)
    mesh, batches = trainkit.devices.make_mesh(config), batches_for(config, numbers)
    for _ in trainkit.devices.global_batches(fetched(batches), numbers, config, mesh):
        order.append("used")
    assert order == ["fetched", *["fetched", "used"] * 3, "used"]


@pytest.mark.parametrize(
    "numbers, message",
    [
        ([0, 1, 2, 3, 4, 6, 7, 8], r"the windows \[4 5 6 7\], found \[4 6 7 8\]"),
        ([0, 1, 2, 3, 3, 4, 5, 6], r"the windows \[4 5 6 7\], found \[3 4 5 6\]"),
        ([0, 2, 1, 3, 4, 5, 6, 7], r"the windows \[0 1 2 3\], found \[0 2 1 3\]"),
        ([4, 5, 6, 7, 8, 9, 10, 11], r"the windows \[0 1 2 3\], found \[4 5 6 7\]"),
        ([0, 1, 2, 3], "the windows of 2 steps, found 1"),
    ],
)
def test_windows_that_are_not_those_of_the_step_are_noticed(small, numbers, message):
    config, expected = small(), np.arange(8).reshape(2, 4)
    batches = batches_for(config, numbers)
    mesh = trainkit.devices.make_mesh(config)
    with pytest.raises(RuntimeError, match=f"expected {message}"):
        list(trainkit.devices.global_batches(batches, expected, config, mesh))


def specs_of(rules, fsdp=2, tensor=2, **shapes) -> dict[str, tuple]:
    """How arrays of these names and shapes are divided; "__" stands for a slash."""
    arrays = {}
    for name, shape in shapes.items():
        *modules, leaf = name.split("__")
        inner = arrays
        for module in modules:
            inner = inner.setdefault(module, {})
        inner[leaf] = nnx.Param(jax.ShapeDtypeStruct(shape, np.float32))
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": fsdp, "tensor": tensor})
    specs = trainkit.devices.parameter_specs(nnx.State(arrays), rules, mesh)
    leaves = jax.tree.leaves_with_path(specs)
    return {trainkit.devices.name_of(path): tuple(spec) for path, spec in leaves}


def test_what_no_row_names_is_divided_along_its_largest_axis_that_divides():
    found = specs_of(
        (),
        fsdp=4,
        a__kernel=(6, 8),
        a__bias=(8,),
        b__kernel=(16, 8),
        b__bias=(8,),
        c__kernel=(6, 9),
        d__w=(3, 4, 12),
        e__scale=(8,),
        f__alpha=(),
    )
    assert found == {
        "a/kernel": (None, "fsdp"),
        "a/bias": ("fsdp",),
        "b/kernel": ("fsdp", None),
        "b/bias": (None,),
        "c/kernel": (None, None),
        "d/w": (None, None, "fsdp"),
        "e/scale": (None,),
        "f/alpha": (),
    }


def test_the_first_row_that_fits_counts():
    rules = (("up/first", ("tensor", None)), ("first", ("fsdp", "tensor")))
    found = specs_of(
        rules, up__first__kernel=(2, 4), first__kernel=(2, 4), first__bias=(4,)
    )
    assert found == {
        "up/first/kernel": ("tensor", None),
        "first/kernel": ("fsdp", "tensor"),
        "first/bias": ("tensor",),
    }


@pytest.mark.parametrize(
    "rule, message",
    [
        (("nothing", ("fsdp", None)), "nothing fits no parameter"),
        (("lay", ("fsdp", None)), "lay fits no parameter"),  # a part of a word
        (("layer", ("fsdp",)), "layer fits no parameter with as many axes"),
        (("layer", (None, "fsdp")), r"layer/kernel, \[4, 3\], over fsdp, and 3 is no"),
        (("layer/kernel", ("tensor", "tensor")), "over tensor, and 3 is no multiple"),
    ],
)
def test_rows_that_cannot_be_followed_are_refused(rule, message):
    with pytest.raises(ValueError, match=f"SHARDING_RULES: .*{message}"):
        specs_of((rule,), layer__kernel=(4, 3))


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


TOY = """
import json, math, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from types import SimpleNamespace
import trainkit.devices as devices, trainkit.gradients as gradients

RULES = (("kernel", ("fsdp", "tensor")),)
rng = np.random.default_rng(0)
kernel = rng.normal(size=(8, 4)).astype(np.float32)
bias = rng.normal(size=4).astype(np.float32)
windows = rng.normal(size=(16, 8)).astype(np.float32)
seen = []

class Toy(nnx.Module):
    def __init__(self):
        self.kernel, self.bias = nnx.Param(jnp.asarray(kernel)), nnx.Param(jnp.asarray(bias))

def loss_and_gradients(params, windows, key):
    seen.append([list(params["kernel"].shape), list(windows.shape)])
    loss = lambda p: jnp.mean(jnp.tanh(windows @ p["kernel"][...] + p["bias"][...]) ** 2)
    return jax.value_and_grad(loss)(params)

def run(data, fsdp, tensor):
    config = SimpleNamespace(
        mesh_shape=lambda workers: (data, fsdp, tensor), worker_range=(1, 1), batch_size=16,
        micro_batches=1, compute_dtype="float32", scan_layers=False,
    )
    mesh = devices.make_mesh(config, jax.devices()[: data * fsdp * tensor])
    seen.clear()
    with jax.set_mesh(mesh):
        params = nnx.state(Toy())
        specs = devices.parameter_specs(params, RULES, mesh)
        place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        params = jax.tree.map(place, params, specs)
        batch = jax.device_put(windows, devices.batch_sharding(mesh))
        mean = lambda p, w: gradients.mean(loss_and_gradients, p, w, config, RULES)
        loss, found = jax.jit(mean)(params, batch)
    return {
        "loss": float(loss),
        "kernel": np.asarray(found["kernel"][...]).tolist(),
        "bias": np.asarray(found["bias"][...]).tolist(),
        "part": list(found["kernel"][...].addressable_shards[0].data.shape),
        "seen": seen[0],
        "rows": devices.local_rows(config, mesh).tolist(),
        "grid": [d.id for d in mesh.devices.ravel()],
        "axes": list(mesh.axis_names),
    }

with open(sys.argv[2], "w") as file:
    json.dump([run(*shape) for shape in json.loads(sys.argv[1])], file)
"""
SHAPES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 1, 4)]


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """A model of one layer on several meshes, in a process with eight devices."""
    path = tmp_path_factory.mktemp("toys") / "found.json"
    flags = "--xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-c", TOY, json.dumps(SHAPES), str(path)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
    )
    return dict(zip(SHAPES, json.loads(path.read_text())))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_a_layer_are_numpys_on_each_mesh(toys, shape):
    """And each device gets its own windows, all of fsdp's parameters, and its part back."""
    found, (data, fsdp, tensor) = toys[shape], shape
    rng = np.random.default_rng(0)
    kernel, bias, windows = (rng.normal(size=s) for s in ((8, 4), 4, (16, 8)))
    y = np.tanh(windows @ kernel + bias)
    slope = 2 * y * (1 - y**2) / y.size
    assert found["loss"] == pytest.approx((y**2).mean(), rel=1e-5)
    np.testing.assert_allclose(found["kernel"], windows.T @ slope, atol=1e-6)
    np.testing.assert_allclose(found["bias"], slope.sum(axis=0), atol=1e-6)
    assert found["seen"] == [[8, 4], [16 // (data * fsdp), 8]]
    assert found["part"] == [8 // fsdp, 4 // tensor]
    assert found["rows"] == list(range(16))
    assert sorted(found["grid"]) == list(range(data * fsdp * tensor))
    assert found["axes"] == ["data", "fsdp", "tensor"]


def test_rows_of_a_worker_are_those_of_its_devices(small, monkeypatch):
    """Of two workers with two devices each, the second holds the other half."""
    config, mesh = small(batch_size=8), trainkit.devices.make_mesh(small())

    class Held:
        def addressable_devices_indices_map(self, shape):
            assert shape == (8,)
            return {
                "third": (slice(4, 6),),
                "fourth": (slice(6, 8),),
                "copy": (slice(4, 6),),
            }

    monkeypatch.setattr(trainkit.devices, "batch_sharding", lambda mesh: Held())
    assert trainkit.devices.local_rows(config, mesh).tolist() == [4, 5, 6, 7]


def test_only_the_data_axis_crosses_slices(small, monkeypatch):
    """Two slices of four chips: JAX is asked for a mesh in each, and for two of them."""
    chips = [SimpleNamespace(platform="tpu", slice_index=i // 4) for i in range(8)]
    asked = []

    def hybrid(within, across, **options):
        asked.append((within, across, len(options["devices"])))
        return np.array(trainkit.devices.jax.devices() * 8).reshape(4, 2, 1)

    create = "create_hybrid_device_mesh"
    monkeypatch.setattr(trainkit.devices.mesh_utils, create, hybrid)
    monkeypatch.setattr(trainkit.devices.jax.sharding, "Mesh", lambda *a: a)
    config = SimpleNamespace(mesh_shape=lambda n: (4, 2, 1), worker_range=(2, 2))
    grid, axes = trainkit.devices.make_mesh(config, chips)
    assert asked == [((2, 2, 1), (2, 1, 1), 8)] and axes == ("data", "fsdp", "tensor")

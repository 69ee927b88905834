"""The mesh, what of each array a device holds, and the mean over micro-batches and devices."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from samples import python

import trainkit.config

TABLE = {  # parts of names, of which the first counts, and what divides their axes
    **{"embedding": (("tensor", "fsdp"), None), "c_proj/kernel": ("tensor", "fsdp")},
    **{"kernel": ("fsdp", "tensor"), "c_proj/bias": (None,), "ln_": (None,)},
    **{"bias": ("tensor",), "count": (), "step": ()},
}


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_the_state_is_divided_as_the_table_says(tutorial, small, shape):
    """Parameters, and the optimizer's moments as they are; all else is whole."""
    mesh = jax.sharding.AbstractMesh(shape, ("data", "fsdp", "tensor"))
    state = tutorial.abstract_state(small(n_head=8, n_embd=64), mesh)
    arrays = tutorial.named(state)
    assert len(arrays) == len(jax.tree.leaves(state))
    for name, x in arrays.items():
        axes = next(axes for part, axes in TABLE.items() if part in name)
        parts = [
            np.prod([mesh.shape.get(a, 1) for a in np.atleast_1d(x)]) for x in axes
        ]
        expected = tuple(n // part for n, part in zip(x.shape, parts))
        assert x.sharding.shard_shape(x.shape) == expected, name
    assert arrays["opt_state/1/0/mu/h/0/mlp/c_fc/kernel"].shape == (64, 256)
    assert arrays["model/wte/embedding"].shape == (640, 64)


@pytest.mark.parametrize("size", [6, 2, 1])
def test_a_micro_batch_has_every_kth_window(tutorial, small, size):
    """And what it gives counts as the others' does."""
    config = small(batch_size=6, device_batch_size=size)
    model, windows, k = nnx.Param(jnp.float32(2)), jnp.arange(6.0)[:, None], 6 // size

    def loss(model, windows, config):
        return model[...] * windows.mean() ** 2

    expected = np.mean([windows[i::k].mean() ** 2 for i in range(k)])
    given = model, windows, config
    assert tutorial.mean_over_batch(loss, *given) == pytest.approx(2 * expected)
    found, gradient = tutorial.mean_over_batch(jax.value_and_grad(loss), *given)
    assert found == pytest.approx(2 * expected) and found.shape == ()
    assert gradient[...] == pytest.approx(expected)


def test_the_gpus_of_a_node_are_neighbors_on_fsdp(tutorial, monkeypatch):
    monkeypatch.setattr(tutorial, "Mesh", lambda grid, axes: grid)
    kind = {"platform": "gpu", "device_kind": "H100"}
    gpus = [SimpleNamespace(id=i, **kind) for i in range(32)]
    path = ROOT / "configs/gpt2-7b-gpu.yaml"
    grid = tutorial.create_mesh(trainkit.config.load_config(path, fsdp=8), gpus)
    found = [[gpu.id for gpu in row] for row in grid[:, :, 0]]
    np.testing.assert_array_equal(found, np.arange(32).reshape(4, 8))


PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] = (  # the programs are small, and compiled a third faster
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
sys.path[:0] = ["benchmarks", "tests"]
import jax, numpy as np
from compile import collectives
from conftest import load_notebook, small_config
from samples import windows_for

tutorial = load_notebook()

def run(data, fsdp, tensor, k=1, **changes):
    windows = 24 // (data * fsdp * k)
    config = small_config(
        "build", n_layer=1, batch_size=24, device_batch_size=windows, fsdp=fsdp,
        tensor_parallel=tensor, **changes)
    mesh = tutorial.create_mesh(config, jax.devices()[: data * fsdp * tensor])
    rows = tutorial.NamedSharding(mesh, tutorial.P(("data", "fsdp")))
    with jax.set_mesh(mesh):
        abstract = tutorial.abstract_state(config, mesh)
        state, found = tutorial.first_state(config, abstract), []
        batches = [jax.device_put(x, rows) for x in windows_for(config, 20)]
        step = tutorial.train_step.lower(state, batches[0], config).compile()
        for windows in batches:  # which takes the state as it comes out
            state, metrics = step(state, windows)
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return {"steps": found, "collectives": collectives(step.as_text())}

runs = {f"{mesh} {k}": run(*mesh, k) for mesh in json.loads(sys.argv[1]) for k in (1, 3)}
half = run(4, 1, 1, 3, compute_dtype="bfloat16")
scanned = run(2, 2, 1, 3, scan_layers=True)
print(json.dumps(runs | {"half": half, "scanned": scanned}))
"""
MESHES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 2, 2)]


@pytest.mark.slow
def test_meshes_and_micro_batches_change_rounding_only():
    """Losses and norms: AdamW makes the same of a multiple of the gradients."""
    runs = json.loads(python(PROGRAM, json.dumps(MESHES)).splitlines()[-1])
    expected = np.array(runs["[1, 1, 1] 1"]["steps"])
    assert expected[-1, 0] < 3 < 6 < expected[0, 0]
    half = runs.pop("half")
    for name, run in runs.items():
        np.testing.assert_allclose(run["steps"], expected, atol=2e-5, err_msg=name)
    losses = np.array(half["steps"])[:, 0]
    np.testing.assert_allclose(losses, expected[:, 0], atol=0.03)
    # On data alone, sums are outside of the loop over micro-batches, and in float32.
    for run in (half, runs["[4, 1, 1] 3"]):
        found = run["collectives"]
        assert not found["in_loops"] and {*found["outside"]} == {"all-reduce f32"}
    assert not any(runs["[1, 1, 1] 3"]["collectives"].values())

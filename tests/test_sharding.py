"""The mesh, what of each array a device holds, and the mean over micro-batches and devices."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from samples import python

from trainkit import ops

PARTS = {  # parts of names, of which the first counts, and into how many each axis is cut
    **{"embedding": (32, 1), "c_proj.kernel": (8, 4), "kernel": (4, 8)},
    **{"c_proj.bias": (1,), "ln_": (1,), "bias": (8,)},
    **{"count": (), "learning_rate": (), "step": ()},
}


def test_the_state_is_divided_as_the_rules_say(tutorial, small):
    """Parameters, and the optimizer's moments as they are; all else is whole."""
    mesh = jax.sharding.AbstractMesh((2, 4, 8), ("data", "fsdp", "tensor"))
    config = small(n_head=8, n_embd=64, block_size=32)
    for name, x in tutorial.named(tutorial.abstract_state(config, mesh)).items():
        parts = next(parts for part, parts in PARTS.items() if part in name)
        expected = tuple(n // k for n, k in zip(x.shape, parts, strict=True))
        assert x.sharding.shard_shape(x.shape) == expected, name


def test_a_micro_batch_has_every_kth_window(tutorial, small):
    """So that it is on all devices, and no window moves. A batch may be any pytree, and of
    another size than the configuration's.
    """
    config = small(batch_size=60, device_batch_size=2)
    batch = {"windows": np.arange(6.0)[:, None], "rows": np.arange(6)}

    def largest(model, batch, config):
        assert batch["rows"].shape == (2,)
        return batch["windows"].max() + batch["rows"].sum()

    mean = jax.jit(tutorial.accumulation.mean_over_batch, static_argnums=(0, 3))
    assert mean(largest, None, batch, config) == (3 + 4 + 5) / 3 + 15 / 3


def test_other_devices_than_tpus_are_of_one_slice():
    gpu = SimpleNamespace(platform="gpu", slice_index=3)
    tpu = SimpleNamespace(platform="tpu", slice_index=3)
    assert (ops.slice_of(gpu), ops.slice_of(tpu)) == (0, 3)


def test_optimizers_of_another_form_and_models_that_say_their_own(
    tutorial, small, monkeypatch
):
    """A kernel's moments by Adafactor have its name, and fewer axes: they are whole."""
    mesh = jax.sharding.AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    monkeypatch.setattr(
        tutorial, "create_optimizer", lambda config: optax.adafactor(1e-3)
    )
    state = tutorial.named(tutorial.abstract_state(small(n_embd=128), mesh))
    kernel = "h.0.mlp.c_fc.kernel"
    assert state[f"model.{kernel}"].sharding.spec == tutorial.P("fsdp", "tensor")
    for part in ("v_row", "v_col", "v"):
        x = state[f"opt_state.0.{part}.{kernel}"]
        assert x.ndim == 1 and x.sharding.spec == tutorial.P()


PROGRAM = """
import json, os, re, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
sys.path[:0] = ["benchmarks", "ci", "examples", "tests"]
import jax, llama, llamas
from common import collectives
from conftest import load_notebook, small_config
from flax import nnx
from samples import run_from_guide, windows_for
from trainkit import dry_run
from trainkit.generate import generate

tutorial = load_notebook()

def start(data, fsdp, tensor, **changes):
    sizes = {"n_layer": 1, "batch_size": 24, "fsdp": fsdp, "tensor_parallel": tensor}
    config = small_config("build", **sizes | changes)
    mesh = tutorial.create_mesh(config, jax.devices()[: data * fsdp * tensor])
    rows = tutorial.NamedSharding(mesh, tutorial.P(("data", "fsdp")))
    return config, mesh, rows

def run(data, fsdp, tensor, k=1, jit=False, **changes):
    windows = 24 // (data * fsdp * k)
    config, mesh, rows = start(data, fsdp, tensor, device_batch_size=windows, **changes)
    with jax.set_mesh(mesh):
        state, found = tutorial.first_state(config, tutorial.abstract_state(config, mesh)), []
        batches = [jax.device_put(x, rows) for x in windows_for(config, 20)]
        program = tutorial.train_step.lower(state, batches[0], config).compile()
        step = tutorial.partial(tutorial.train_step, config=config) if jit else program
        for windows in batches:  # GPT-2's program takes the state as it comes out
            state, metrics = step(state, windows)
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state, {
        "steps": found, "collectives": collectives(program.as_text()),
        "devices": mesh.device_ids.ravel().tolist()}

runs = (1, 1, 1, 1), (4, 1, 1, 3), (1, 4, 1, 3), (2, 2, 2, 3)
same = {f"{(*mesh,)} {k}": run(*mesh, k)[1] for *mesh, k in runs}
_, same["scanned"] = run(2, 2, 1, 3, scan_layers=True)
_, half = run(4, 1, 1, 3, compute_dtype="bfloat16")
dropped = [run(*mesh, k, dropout=0.2, n_layer=2, **changes)[1] for *mesh, k, changes in (
    (1, 1, 1, 1, {}), (2, 2, 1, 2, {"scan_layers": True}))]

plain = []
for fsdp, tensor in (1, 1), (2, 2):
    config, mesh, rows = start(4 // fsdp // tensor, fsdp, tensor, block_size=48)
    state = tutorial.abstract_state(config, mesh)
    windows = jax.ShapeDtypeStruct((24, 49), "uint16", sharding=rows)
    grad_fn = jax.value_and_grad(tutorial.loss_fn)
    mean = tutorial.accumulation.mean_over_batch
    for step in (tutorial.partial(mean, grad_fn), grad_fn):
        step = jax.jit(tutorial.partial(step, config=config))
        with jax.set_mesh(mesh):
            program = step.lower(state.model, windows).compile()
        gathered = re.findall(r"= \\w+\\[([\\d,]*)\\]\\S* all-gather", program.as_text())
        plain.append([program.cost_analysis()["flops"], gathered])

others, keys = [], llamas.SHAPES["llama, 3 heads a group"] | {"block_size": 16}
for name in ("create_model", "loss_fn", "RULES"):
    setattr(tutorial, name, getattr(llama, name))
for mesh in (1, 1, 1), (2, 2, 2):  # with an odd vocabulary, such as GPT-2's
    changes = {"tokenizer": "builtin", "vocab_size": 2049, "dropout": 0.1}
    state, found = run(*mesh, 3, jit=True, **keys | changes)
    kernel = state.model.layers[0].self_attn.k_proj.kernel[...]
    found["part"] = kernel.addressable_shards[0].data.shape
    found["text"] = generate(state.model, ["The value"], 8, temperature=0)
    others.append(found)

tutorial = load_notebook()
run_from_guide("def blocks_matrices(", vars(tutorial))
muon = [run(1, 1, 1), run(2, 2, 1)]
names = [name for name in tutorial.named(muon[0][0]) if "muon.inner_state.0.mu." in name]

tutorial = load_notebook()
tutorial.RULES, linear = {}, nnx.Linear

class Linear(linear):
    def __init__(self, *sizes, kernel_init, **options):
        init = nnx.with_partitioning(kernel_init, ("fsdp", "tensor"))
        super().__init__(*sizes, kernel_init=init, **options)

nnx.Linear = Linear
config, mesh, rows = start(1, 2, 2)
given = tutorial.create_state, tutorial.abstract_state, tutorial.loss_fn
dry_run.check_sharding(config, 4, *given)
with jax.set_mesh(mesh):
    state = tutorial.first_state(config, tutorial.abstract_state(config, mesh))
    windows = jax.device_put(windows_for(config, 1)[0], rows)
    state, metrics = tutorial.train_step(state, windows, config)
arrays = tutorial.named(state).items()
own = [" ".join(x.sharding.spec) for name, x in arrays if name.endswith(".kernel")]
print(json.dumps({
    "same": same, "half": half, "dropped": dropped, "plain": plain, "llama": others,
    "muon": [found["steps"] for _, found in muon], "names": names, "own": own}))
"""


@pytest.fixture(scope="module")
def runs():
    """Of twenty steps each."""
    return json.loads(python(PROGRAM).splitlines()[-1])


@pytest.mark.slow
def test_meshes_and_micro_batches_change_rounding_only(runs):
    """Losses and norms: AdamW makes the same of a multiple of the gradients."""
    same = runs["same"]
    expected = np.array(same["(1, 1, 1) 1"]["steps"])
    assert expected[-1, 0] < 3 < 6 < expected[0, 0]
    for name, run in same.items():
        np.testing.assert_allclose(run["steps"], expected, atol=2e-5, err_msg=name)
        assert run["devices"] == sorted(run["devices"])  # neighbors on tensor and fsdp
    # On data alone, sums are outside of the loop over micro-batches, and in float32.
    for run in (runs["half"], same["(4, 1, 1) 3"]):
        found = run["collectives"]
        assert not found["in_loops"] and {*found["outside"]} == {"all-reduce f32"}


@pytest.mark.slow
def test_dropout_is_the_same_on_any_mesh(runs):
    """With micro-batches, and with scanned layers; and it isn't nothing."""
    alone, other = (run["steps"] for run in runs["dropped"])
    np.testing.assert_allclose(other, alone, atol=2e-5)
    assert abs(alone[0][0] - runs["same"]["(1, 1, 1) 1"]["steps"][0][0]) > 1e-3


@pytest.mark.slow
def test_the_plain_gradient_costs_the_same(runs):
    """In place of `mean_over_batch`, as step 5 says: with no activations gathered, which have
    an axis of 48 tokens.
    """
    found = runs["plain"]
    for (flops, _), (plain, gathered) in zip(found[::2], found[1::2]):
        assert plain == pytest.approx(flops, rel=0.05)
        assert not [shape for shape in gathered if "48" in shape.split(",")]
    assert found[3][1]  # parameters


@pytest.mark.slow
def test_llama_on_a_mesh(runs):
    """examples/llama.py: on 2 x 2 x 2 devices, with its own rules, it equals one device."""
    alone, divided = runs["llama"]
    np.testing.assert_allclose(divided["steps"], alone["steps"], atol=1e-4)
    assert alone["steps"][-1][0] < 0.8 * alone["steps"][0][0]
    assert alone["part"] == [54, 20] and divided["part"] == [27, 10]
    assert alone["text"] == divided["text"] and alone["text"][0].startswith("The value")


@pytest.mark.slow
def test_muon_on_a_mesh(runs):
    """By the guide's recipe: of the blocks' matrices, and equal to one device."""
    alone, divided = np.array(runs["muon"])[..., 0]
    np.testing.assert_allclose(divided, alone, atol=2e-5)
    assert alone[-1] < 0.5 * alone[0]
    matrices = {name.partition(".mu.")[2] for name in runs["names"]}
    assert len(matrices) == 6 and all(name.endswith(".kernel") for name in matrices)


@pytest.mark.slow
def test_a_model_that_says_itself_how_it_is_sharded(runs):
    """By NNX's annotations: created under the mesh, with its optimizer's moments."""
    assert len(runs["own"]) == 3 * 6 and {*runs["own"]} == {"fsdp tensor"}

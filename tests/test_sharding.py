"""The mesh, what of each array a device holds, and the mean over micro-batches and devices."""

import json

import jax
import numpy as np
import pytest
from samples import python

PARTS = {  # parts of names, of which the first counts, and into how many each axis is cut
    **{"embedding": (32, 1), "c_proj.kernel": (8, 4), "kernel": (4, 8)},
    **{"c_proj.bias": (1,), "ln_": (1,), "bias": (8,), "count": (), "step": ()},
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
    """So that it is on all devices, and no window moves."""
    config = small(batch_size=6, device_batch_size=2)
    windows = np.arange(6.0)[:, None]

    def largest(model, windows, config):
        return windows.max()

    mean = jax.jit(tutorial.accumulation.mean_over_batch, static_argnums=(0, 3))
    assert mean(largest, None, windows, config) == (3 + 4 + 5) / 3


PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
sys.path[:0] = ["benchmarks", "examples", "tests"]
import jax, llama
from common import collectives
from conftest import load_notebook, small_config
from samples import windows_for
from trainkit.generate import generate

tutorial = load_notebook()

def run(data, fsdp, tensor, k=1, jit=False, **changes):
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
        program = tutorial.train_step.lower(state, batches[0], config).compile()
        step = tutorial.partial(tutorial.train_step, config=config) if jit else program
        for windows in batches:  # GPT-2's program takes the state as it comes out
            state, metrics = step(state, windows)
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return state.model, {
        "steps": found, "collectives": collectives(program.as_text()),
        "devices": mesh.device_ids.ravel().tolist()}

runs = (1, 1, 1, 1), (1, 1, 1, 3), (4, 1, 1, 1), (4, 1, 1, 3), (1, 4, 1, 3), (2, 2, 2, 3)
same = {f"{(*mesh,)} {k}": run(*mesh, k)[1] for *mesh, k in runs}
_, same["scanned"] = run(2, 2, 1, 3, scan_layers=True)
_, half = run(4, 1, 1, 3, compute_dtype="bfloat16")
others = []
for name in ("create_model", "loss_fn", "RULES"):
    setattr(tutorial, name, getattr(llama, name))
for mesh in (1, 1, 1), (2, 2, 2):  # with an odd vocabulary, such as GPT-2's
    model, found = run(*mesh, 3, jit=True, tokenizer="builtin", vocab_size=2049)
    found["part"] = model.blocks[0].qkv.kernel[...].addressable_shards[0].data.shape
    found["text"] = generate(model, ["The value"], 8, temperature=0)
    others.append(found)
print(json.dumps({"same": same, "half": half, "llama": others}))
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
def test_a_model_that_knows_nothing_of_devices_on_a_mesh(runs):
    """examples/llama.py: on 2 x 2 x 2 devices, with its own rules, it equals one device."""
    alone, divided = runs["llama"]
    np.testing.assert_allclose(divided["steps"], alone["steps"], atol=1e-4)
    assert alone["steps"][-1][0] < 0.8 * alone["steps"][0][0]
    assert alone["part"] == [32, 96] and divided["part"] == [16, 48]
    assert alone["text"] == divided["text"] and alone["text"][0].startswith("The value")

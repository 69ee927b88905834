"""Gradients and losses over devices and micro-batches: their mean, once a step, in float32."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainkit.sharding
from flax import nnx
from samples import python


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
def test_a_micro_batch_has_every_kth_window(small, size):
    config = small(batch_size=6, device_batch_size=size)
    params = nnx.State({"kernel": nnx.Param(jnp.float32(2))})
    windows, k = jnp.arange(6.0)[:, None], 6 // size

    def loss(params, windows, config):
        return params["kernel"][...] * windows.mean() ** 2

    parts = [windows[i::k].mean() ** 2 for i in range(k)]
    given = params, windows, config
    assert trainkit.sharding.mean(loss, *given) == pytest.approx(2 * np.mean(parts))
    both = trainkit.sharding.mean(jax.value_and_grad(loss), *given)
    assert both[0] == pytest.approx(2 * np.mean(parts))
    assert both[1]["kernel"][...] == pytest.approx(np.mean(parts))


PROGRAM = """
import json, os, re, sys
os.environ["XLA_FLAGS"] = (  # the programs are small, and compiled a third faster
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
sys.path[:0] = ["benchmarks"]
import jax, numpy as np, program, trainkit.config, trainkit.sharding
from common import load_notebook, lower_step
from notebook_module import initial_state

tutorial = load_notebook()
windows = np.random.default_rng(0).integers(0, 1000, (4, 16, 33), np.uint16)
shape = dict(vocab_size=1000, block_size=32, n_head=8, n_embd=64, batch_size=16,
             loss_chunks=2, warmup_steps=3, decay_steps=20, learning_rate=1e-3)
loss_fn, seen = tutorial.loss_fn, []

def noting(params, windows, config):
    seen.append([params["h"][0]["mlp"]["c_fc"]["kernel"].shape, windows.shape])
    return loss_fn(params, windows, config)

tutorial.loss_fn = noting

def run(data, fsdp, tensor, **changes):
    devices = jax.devices()[: data * fsdp * tensor]
    config = trainkit.config.TrainingConfig(
        device_batch_size=8 // (data * fsdp), fsdp=fsdp, tensor_parallel=tensor,
        devices_per_worker=len(devices),
        **shape | {"n_layer": 1, "compute_dtype": "float32"} | changes)
    mesh = trainkit.sharding.make_mesh(config, devices)
    state = trainkit.sharding.abstract_state(tutorial.create_state, config, mesh)
    lowered = lower_step(tutorial, config, mesh, state)
    # As it is asked for; a CPU's compiler makes float32 of all sums.
    ops = r'"stablehlo.(?:all_reduce|reduce_scatter)".*?\\}\\) : \\(tensor<(.*?)>'
    summed = {x.split("x")[-1] for x in re.findall(ops, lowered.as_text(), re.DOTALL)}
    step = lowered.compile()
    state, steps = initial_state(tutorial, config, mesh), []
    for batch in windows:
        batch = jax.device_put(batch, trainkit.sharding.batch_sharding(mesh))
        state, metrics = step(state, batch)
        steps.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    with jax.set_mesh(mesh):
        steps.append([float(tutorial.eval_step(state.params, batch, config)), 0.0])
    # A device sees its windows, and keeps its part, but computes with all of what fsdp divides.
    kernel = state.params["h"][0]["mlp"]["c_fc"]["kernel"][...]
    assert kernel.addressable_shards[0].data.shape == (64 // fsdp, 256 // tensor)
    assert seen[-1][1] == (8 // (data * fsdp), 33), seen[-1]
    assert seen[-1][0] == ((64 // fsdp, 256) if config.scan_layers else (64, 256))
    return {
        "steps": steps,
        "summed": [*summed],
        "collectives": program.collectives(program.parse(step.as_text())),
    }

half = {"compute_dtype": "bfloat16"}
print(json.dumps({
    "one device": run(1, 1, 1),
    "tensor": run(1, 1, 8),
    "tensor, two layers": run(1, 1, 8, n_layer=2),
    "all three": run(2, 2, 2),
    "by layer, bfloat16": run(2, 4, 1, scan_layers=True, **half),
    "data, bfloat16": run(8, 1, 1, **half),
    "data and fsdp": run(2, 4, 1),
}))
"""


IN_BFLOAT16 = "data, bfloat16", "by layer, bfloat16"


@pytest.fixture(scope="module")
def runs():
    """What a process with eight devices says of the steps on each mesh."""
    return json.loads(python(PROGRAM).splitlines()[-1])


@pytest.mark.slow
def test_losses_and_gradients_of_two_micro_batches_are_those_of_one_device(runs):
    """The norms as well, since AdamW makes the same of a multiple of the gradients."""
    expected = runs["one device"]["steps"]
    for mesh in "tensor", "data and fsdp", "all three", *IN_BFLOAT16:
        far = 0.02 if mesh in IN_BFLOAT16 else 1e-5
        np.testing.assert_allclose(
            runs[mesh]["steps"], expected, atol=far, err_msg=mesh
        )


@pytest.mark.slow
def test_gradients_meet_once_a_step_in_float32(runs):
    """By layer, a layer is fetched in the loop, and its gradients are summed over fsdp."""
    for mesh in "data and fsdp", *IN_BFLOAT16:
        collectives = runs[mesh]["collectives"]
        sums = [c for c in collectives if c["kind"] in ("all-reduce", "reduce-scatter")]
        assert sums and runs[mesh]["summed"] == ["f32"], mesh
        in_loop = {"all-gather", "reduce-scatter"} if "by layer" in mesh else set()
        assert {c["kind"] for c in collectives if c["in_loop"]} == in_loop, mesh
        if mesh == "data and fsdp":  # the token embedding alone has more
            assert sum(c["bytes"] for c in sums) < 4 * 1024 * 64
    assert runs["one device"]["collectives"] == []


@pytest.mark.slow
def test_a_tensor_parallel_layer_sums_activations_four_times(runs):
    """Twice forward and twice backward (Shoeybi et al. 2019, section 3); nothing else."""
    meshes = "tensor", "tensor, two layers"
    one, two = (runs[mesh]["collectives"] for mesh in meshes)
    assert {c["kind"] for c in [*one, *two]} == {"all-reduce"}
    assert len(two) - len(one) == 4

"""Gradients written by hand, and summed over devices once a step."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import trainkit.gradients
import trainkit.layers

ROOT = Path(__file__).resolve().parent.parent


def differentiated(table, features, targets, vocab_size, chunks=1):
    """The loss as `jax.grad` takes it apart, from all logits at once."""
    logits = trainkit.layers.score_tokens(table, features, vocab_size)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    ).mean()


def loss_inputs(vocab_size):
    keys = jax.random.split(jax.random.key(0), 3)
    rows = -(-vocab_size // 128) * 128
    table = jax.random.normal(keys[0], (rows, 64)) / 5
    features = jax.random.normal(keys[1], (4, 24, 64))
    return table, features, jax.random.randint(keys[2], (4, 24), 0, vocab_size)


def gradients_of(loss, table, features, targets, vocab_size, chunks):
    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1))
    return value_and_grad(table, features, targets, vocab_size, chunks)


def relative(found, exact) -> list[float]:
    """The length of the difference, of each gradient, in lengths of the exact one."""
    norm = jnp.linalg.norm
    return [
        float(norm(a.astype(jnp.float32) - b) / norm(b)) for a, b in zip(found, exact)
    ]


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_loss_gradients_by_hand_equal_the_differentiated(chunks):
    table, features, targets = loss_inputs(521)
    exact_loss, exact = gradients_of(
        differentiated, table, features, targets, 521, chunks
    )
    ours = partial(gradients_of, trainkit.layers.cross_entropy)
    loss, found = ours(table, features, targets, 521, chunks)
    assert float(loss) == pytest.approx(float(exact_loss), rel=1e-6)
    assert max(relative(found, exact)) < 1e-6
    assert not np.asarray(found[0])[521:].any()  # the rows that pad the vocabulary

    # In bfloat16, they are as near to float32's as what jax would find.
    half = features.astype(jnp.bfloat16)
    _, found = ours(table, half, targets, 521, chunks)
    _, theirs = gradients_of(differentiated, table, half, targets, 521, chunks)
    assert found[0].dtype == jnp.float32 and found[1].dtype == jnp.bfloat16
    for mine, other in zip(relative(found, exact), relative(theirs, exact)):
        assert mine < 1.05 * other


def test_the_loss_scatters_nothing():
    inputs = *loss_inputs(521), 521, 2
    compiled = jax.jit(
        partial(gradients_of, trainkit.layers.cross_entropy), static_argnums=(3, 4)
    )
    assert " scatter(" not in compiled.lower(*inputs).compile().as_text()


def test_only_kernels_are_cast():
    """Embeddings, biases, and norms stay as exact as they are."""
    params = nnx.State(
        {
            "a": {"kernel": nnx.Param(jnp.ones(3)), "bias": nnx.Param(jnp.ones(3))},
            "wte": {"embedding": nnx.Param(jnp.ones(3))},
        }
    )
    half = SimpleNamespace(compute_dtype="bfloat16")
    cast = trainkit.gradients.fetch(params, None, half)
    types = {".".join(path): x[...].dtype for path, x in nnx.to_flat_state(cast)}
    float32 = {"a.bias": jnp.float32, "wte.embedding": jnp.float32}
    assert types == {"a.kernel": jnp.bfloat16} | float32


PROGRAM = """
import json, sys
sys.path[:0] = ["benchmarks"]
import jax, numpy as np, program, trainkit.config, trainkit.devices
from common import compile_step, load_notebook
from notebook_module import initial_state

tutorial = load_notebook()
windows = np.random.default_rng(0).integers(0, 1000, (4, 16, 33), np.uint16)

def run(data, fsdp, tensor, **changes):
    devices = jax.devices()[: data * fsdp * tensor]
    config = trainkit.config.TrainingConfig(
        vocab_size=1000, block_size=32, n_layer=1, n_head=8, n_embd=64, batch_size=16,
        device_batch_size=8 // (data * fsdp), loss_chunks=2, warmup_steps=3, decay_steps=20,
        learning_rate=1e-3, fsdp=fsdp, tensor_parallel=tensor,
        devices_per_worker=len(devices), **{"compute_dtype": "float32"} | changes)
    mesh = trainkit.devices.make_mesh(config, devices)
    step = compile_step(tutorial, config, mesh)[0]
    state, losses = initial_state(tutorial, config, mesh), []
    for batch in windows:
        batch = jax.device_put(batch, trainkit.devices.batch_sharding(mesh))
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, program.collectives(program.parse(step.as_text()))

def drawn(data, fsdp, **changes):
    # The first losses, with the key of each device and micro-batch.
    config = trainkit.config.TrainingConfig(
        vocab_size=1000, block_size=32, n_layer=1, n_head=8, n_embd=64, batch_size=16,
        platform="cpu", compute_dtype="float32", loss_chunks=2, **changes)
    model, losses = tutorial.create_model(config, config.seed), []
    step_key = jax.random.fold_in(jax.random.key(config.seed), 0)
    for device, rows in enumerate(np.split(windows[0], data * fsdp)):
        for index in range(2):
            key = jax.random.fold_in(jax.random.fold_in(step_key, device), index)
            rngs = tutorial.nnx.Rngs(dropout=key)
            losses.append(float(tutorial.loss_fn(model, rows[index::2], rngs)))
    return losses

print(json.dumps({
    "one device": run(1, 1, 1),
    "data": run(8, 1, 1),
    "data, bfloat16": run(8, 1, 1, compute_dtype="bfloat16"),
    "fsdp": run(1, 8, 1),
    "data and fsdp": run(2, 4, 1),
    "all three": run(2, 2, 2),
    "fsdp, by layer": run(1, 8, 1, scan_layers=True),
    "data and fsdp, by layer": run(2, 4, 1, scan_layers=True),
    "all three, by layer": run(2, 2, 2, scan_layers=True),
    "by layer, bfloat16": run(2, 4, 1, scan_layers=True, compute_dtype="bfloat16"),
    "dropout, bfloat16": run(8, 1, 1, dropout=0.3, compute_dtype="bfloat16"),
    "dropout": run(2, 4, 1, dropout=0.3),
    "dropout by hand": drawn(2, 4, dropout=0.3),
}))
"""


@pytest.fixture(scope="module")
def runs():
    """Losses and collectives on each mesh, from a process with eight devices."""
    flags = "--xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


MESHES = ["data", "fsdp", "data and fsdp", "all three"]
BY_LAYER = [f"{mesh}, by layer" for mesh in MESHES[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES, *BY_LAYER])
def test_losses_of_two_micro_batches_are_those_of_one_device(runs, mesh):
    np.testing.assert_allclose(runs[mesh][0], runs["one device"][0], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_each_device_and_micro_batch_draws_anew(runs):
    losses = runs["dropout by hand"]
    assert len(set(losses)) == len(losses) == 16
    assert runs["dropout"][0][0] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES, "data, bfloat16", "dropout, bfloat16"])
def test_gradients_meet_once_a_step_in_float32(runs, mesh):
    collectives = runs[mesh][1]
    sums = [c for c in collectives if c["kind"] in ("all-reduce", "reduce-scatter")]
    if mesh != "all three":  # tensor parallelism sums activations, layer by layer
        assert sums and not any(c["in_loop"] for c in collectives)
    assert all("bf16" not in c["arrays"] for c in sums)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data and fsdp, by layer", "by layer, bfloat16"])
def test_by_layer_parts_are_summed_over_data_once_a_step(runs, mesh):
    """In the loop, a layer is fetched, and its gradients are summed in float32 over fsdp."""
    collectives = runs[mesh][1]
    inside = [c for c in collectives if c["in_loop"]]
    assert {c["kind"] for c in inside} == {"all-gather", "reduce-scatter"}
    sums = [c for c in collectives if c["kind"] != "all-gather"]
    assert all("bf16" not in c["arrays"] for c in sums)
    assert any(c["kind"] == "all-reduce" for c in sums)


@pytest.mark.slow
def test_fsdp_sums_no_matrix_whole(runs):
    def largest(kind):
        return max(c["bytes"] for c in runs["fsdp"][1] if c["kind"] == kind)

    assert largest("reduce-scatter") > 4 * 1000 * 8  # the token embedding's part
    assert largest("all-reduce") < 4 * 64 * 64  # biases' and norms' gradients


def test_kernels_alone_are_cast(tutorial, small):
    params = tutorial.create_state(small()).params
    half = small(compute_dtype="bfloat16")
    cast = nnx.to_flat_state(trainkit.gradients.fetch(params, None, half))
    dtypes = {(path[-1], str(param[...].dtype)) for path, param in cast}
    others = {(name, "float32") for name in ("bias", "scale", "embedding")}
    assert dtypes == {("kernel", "bfloat16"), *others}
    assert len(cast) == len(nnx.to_flat_state(params))

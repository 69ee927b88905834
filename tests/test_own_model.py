"""Another model than GPT-2, by the seams that the page lists under "Bring your own model"."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ray
from accidents import log_of, losses_of_one_process
from flax import nnx

import trainkit.config
import trainkit.devices

pytestmark = pytest.mark.slow
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).resolve().parent.parent
PAST = 3  # tokens that the model looks at


class WithFeatures(nnx.Module):
    """Token embeddings and an MLP (Bengio et al. 2003), for the page's `loss_fn`."""

    def __init__(self, config, *, rngs):
        self.config, D = config, config.n_embd
        self.wte = nnx.Embed(config.padded_vocab_size, D, rngs=rngs)
        self.inner = nnx.Linear(PAST * D, 4 * D, rngs=rngs)
        self.outer = nnx.Linear(4 * D, D, rngs=rngs)

    def features(self, tokens, *, rngs=None):
        T, x = tokens.shape[1], self.wte(tokens)
        past = [jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, :T] for i in range(PAST)]
        return self.outer(nnx.relu(self.inner(jnp.concatenate(past, axis=-1))))


class Plain(nnx.Module):
    """Logits and nothing else, under names of its own, for a loss of its own."""

    def __init__(self, config, *, rngs):
        self.config, V, D = config, config.vocab_size, config.n_embd
        self.table = nnx.Embed(V, D, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.table(tokens)))


def loss_of_logits(model, windows, rngs=None):
    windows = windows.astype(jnp.int32)
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def momentum(config):
    return optax.sgd(100 * config.learning_rate, momentum=0.9)


def lion(config):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.003))


SEAMS = {
    "features and wte": (
        {"GPT2": WithFeatures, "create_optimizer": lion, "SHARDING_RULES": ()},
        "inner",
    ),
    "a loss of its own": (
        {
            "GPT2": Plain,
            "loss_fn": loss_of_logits,
            "SHARDING_RULES": (("head", ("fsdp", None)),),
            "create_optimizer": momentum,
        },
        "head",
    ),
}


@pytest.mark.extra
@pytest.mark.parametrize("seams", SEAMS)
def test_another_model(tutorial, cluster, small, write_bins, monkeypatch, seams):
    """It learns, on two devices that divide it, and goes on where it stopped."""
    swapped, layer = SEAMS[seams]
    for name, value in swapped.items():
        monkeypatch.setattr(tutorial, name, value)
    config = write_bins(
        small(vocab_size=61, batch_size=8, max_steps=40, fsdp=2, devices_per_worker=2)
    )
    train_loop = tutorial.train_loop_per_worker
    create_state, rules = tutorial.create_state, tutorial.SHARDING_RULES

    def loop(settings):
        train_loop(settings)
        config = trainkit.config.TrainingConfig(**settings)
        mesh = trainkit.devices.make_mesh(config)
        state = trainkit.states.abstract_state(create_state, config, mesh, rules)
        spec = state.params[layer]["kernel"].sharding.spec
        (config.run_path / "divided").write_text(str(spec))

    result = tutorial.make_trainer(config, loop).fit()
    assert "fsdp" in (config.run_path / "divided").read_text()
    model = trainkit.generate.load_model(tutorial.create_model, result.checkpoint)
    assert type(model) is swapped["GPT2"]

    longer = dataclasses.replace(config, max_steps=60)
    assert tutorial.make_trainer(longer, loop).fit().metrics["step"] == 60
    log = log_of(config)
    assert [line["step"] for line in log] == list(range(1, 61))
    losses = [line["loss"] for line in log]
    assert losses[-1] < 0.5 * losses[0] and losses[0] > 4
    alone = dataclasses.replace(longer, fsdp=1, devices_per_worker=1)
    expected = losses_of_one_process(tutorial, alone)
    np.testing.assert_allclose(losses, expected, atol=1e-3)


LLAMA = """
import json, sys
sys.path[:0] = ["ci", "examples", "tests"]
import jax, llama, numpy as np
from notebook_module import initial_state, load_notebook
from samples import windows_for
import trainkit.config, trainkit.devices

tutorial = load_notebook()
tutorial.create_model, tutorial.loss_fn = llama.create_model, llama.loss_fn
tutorial.SHARDING_RULES = ()

def run(n, **changes):
    config = trainkit.config.TrainingConfig(
        vocab_size=521, block_size=16, n_layer=3, n_head=2, n_embd=32, batch_size=8,
        compute_dtype="float32", device_batch_size=1, warmup_steps=2, decay_steps=30,
        learning_rate=1e-2, min_learning_rate=1e-3, platform="cpu", devices_per_worker=n,
        **changes)
    mesh = trainkit.devices.make_mesh(config, jax.devices()[:n])
    with jax.set_mesh(mesh):
        state, losses = initial_state(tutorial, config, mesh), []
        for windows in windows_for(config, 20):
            windows = jax.device_put(windows, trainkit.devices.batch_sharding(mesh))
            state, metrics = tutorial.train_step(state, windows, config)
            losses.append(float(metrics["loss"]))
    kernel = state.params["blocks"][0]["qkv"]["kernel"][...]
    return losses, list(kernel.addressable_shards[0].data.shape)

print(json.dumps([run(1), run(8, fsdp=2, tensor_parallel=2)]))
"""


def test_a_model_that_knows_nothing_of_devices_on_a_mesh():
    """examples/llama.py on 2 x 2 x 2 devices, with an empty table, equals one device."""
    result = subprocess.run(
        [sys.executable, "-c", LLAMA],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (alone, whole), (losses, part) = json.loads(result.stdout.splitlines()[-1])
    np.testing.assert_allclose(losses, alone, atol=1e-4)
    assert alone[-1] < 0.8 * alone[0]
    assert whole == [32, 96] and part == [32, 48]

"""Another model than GPT-2, examples/llama.py, which knows nothing of devices."""

import dataclasses
import json
import sys

import numpy as np
import optax
import pytest
import ray
from accidents import log_of, losses_of_one_process
from conftest import ROOT
from samples import python

import trainkit.generate

pytestmark = pytest.mark.slow
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def lion(config):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.003))


@pytest.mark.extra
def test_another_model_and_optimizer(tutorial, cluster, small, write_bins, monkeypatch):
    """On two devices that divide them; they go on where they stopped."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import llama

    ray.cloudpickle.register_pickle_by_value(llama)
    for name in ("create_model", "loss_fn"):
        monkeypatch.setattr(tutorial, name, getattr(llama, name))
    monkeypatch.setattr(tutorial, "create_optimizer", lion)
    config = write_bins(small(vocab_size=61, fsdp=2, devices_per_worker=2))
    for steps in (10, 20):
        config = dataclasses.replace(config, max_steps=steps)
        result = tutorial.make_trainer(config).fit()
    model = trainkit.generate.load_model(llama.create_model, result.checkpoint)
    assert type(model) is llama.Llama
    alone = dataclasses.replace(config, fsdp=1, devices_per_worker=1)
    losses = [line["loss"] for line in log_of(config)]
    expected = losses_of_one_process(tutorial, alone)
    np.testing.assert_allclose(losses, expected, atol=1e-3)


PROGRAM = """
import json, sys
sys.path[:0] = ["ci", "examples", "tests"]
import jax, llama, numpy as np
from conftest import small_config
from notebook_module import initial_state, load_notebook
from samples import windows_for
import trainkit.sharding

tutorial = load_notebook()
tutorial.create_model, tutorial.loss_fn = llama.create_model, llama.loss_fn
trainkit.sharding.RULES = (
    ("qkv|gate|up", ("fsdp", "tensor")), ("out|down", ("tensor", "fsdp")))

def run(n, **changes):
    changes |= {"n_layer": 3, "batch_size": 8, "device_batch_size": 1}
    config = small_config("build", devices_per_worker=n, **changes)
    mesh = trainkit.sharding.make_mesh(config, jax.devices()[:n])
    with jax.set_mesh(mesh):
        state, losses = initial_state(tutorial, config, mesh), []
        for windows in windows_for(config, 20):
            windows = jax.device_put(windows, trainkit.sharding.batch_sharding(mesh))
            state, metrics = tutorial.train_step(state, windows, config)
            losses.append(float(metrics["loss"]))
    kernel = state.params["blocks"][0]["qkv"]["kernel"][...]
    return losses, list(kernel.addressable_shards[0].data.shape)

print(json.dumps([run(1), run(8, fsdp=2, tensor_parallel=2)]))
"""


def test_a_model_that_knows_nothing_of_devices_on_a_mesh():
    """On 2 x 2 x 2 devices, with rules for its names, it equals one device."""
    printed = python(PROGRAM, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    (alone, whole), (losses, part) = json.loads(printed.splitlines()[-1])
    np.testing.assert_allclose(losses, alone, atol=1e-4)
    assert alone[-1] < 0.8 * alone[0]
    assert whole == [32, 96] and part == [16, 48]

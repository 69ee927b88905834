"""Another model than GPT-2, examples/llama.py, which knows nothing of devices."""

import json

import numpy as np
import pytest
from samples import python

PROGRAM = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path[:0] = ["examples", "tests", "ci"]
import jax, llama
from conftest import load_notebook, small_config
from samples import windows_for
from trainkit.generate import generate

tutorial = load_notebook()
for name in ("create_model", "loss_fn", "RULES"):
    setattr(tutorial, name, getattr(llama, name))

def run(n, **changes):
    config = small_config(
        "build", n_layer=3, batch_size=8, device_batch_size=1, tokenizer="builtin",
        vocab_size=2048, **changes)
    mesh = tutorial.create_mesh(config, jax.devices()[:n])
    rows = tutorial.NamedSharding(mesh, tutorial.P(("data", "fsdp")))
    with jax.set_mesh(mesh):
        abstract = tutorial.abstract_state(config, mesh)
        state, losses = tutorial.first_state(config, abstract), []
        for windows in windows_for(config, 20):
            windows = jax.device_put(windows, rows)
            state, metrics = tutorial.train_step(state, windows, config)
            losses.append(float(metrics["loss"]))
    kernel = state.model.blocks[0].qkv.kernel[...]
    text = generate(state.model, ["The value"], 8, temperature=0)
    return losses, list(kernel.addressable_shards[0].data.shape), text

print(json.dumps([run(1), run(8, fsdp=2, tensor_parallel=2)]))
"""


@pytest.mark.slow
def test_a_model_that_knows_nothing_of_devices_on_a_mesh():
    """On 2 x 2 x 2 devices, with rules for its names, it equals one device; then it writes."""
    (alone, whole, text), (losses, part, same) = json.loads(
        python(PROGRAM).splitlines()[-1]
    )
    np.testing.assert_allclose(losses, alone, atol=1e-4)
    assert alone[-1] < 0.8 * alone[0]
    assert whole == [32, 96] and part == [16, 48]
    assert text == same and text[0].startswith("The value")

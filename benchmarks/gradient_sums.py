"""What it costs in loss to sum gradients over devices in bfloat16 and not in float32.

    python benchmarks/gradient_sums.py [--steps 400] [--seeds 2]

Trains a small model on the bytes of Python's help pages, on eight simulated devices of this
machine, in float32 but for the sums. Each seed gives both runs the same weights and windows.
A bfloat16 sum takes rounded terms and gives a rounded result; what stands between is XLA's
choice, float32 on CPUs.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
from common import in_own_process, load_notebook, print_table
from notebook_module import initial_state

import trainkit.config
import trainkit.devices


def sum_in_bfloat16() -> None:
    """Let `trainkit.devices` send half the bytes."""
    psum = jax.lax.psum

    def rounded(x, axes):
        return psum(x.astype(jnp.bfloat16), axes).astype(x.dtype)

    jax.lax.psum = rounded


def losses(dtype: str, seed: int, steps: int) -> tuple[float, float]:
    """The mean training loss of the last tenth of the steps, and the validation loss."""
    if dtype == "bfloat16":
        sum_in_bfloat16()
    tutorial = load_notebook()
    config = trainkit.config.TrainingConfig(
        vocab_size=256,
        block_size=128,
        n_layer=4,
        n_head=4,
        n_embd=128,
        compute_dtype="float32",
        batch_size=32,
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        warmup_steps=20,
        decay_steps=steps,
        max_steps=steps,
        devices_per_worker=8,
        seed=seed,
    )
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
    train, val = np.split(text.astype(np.uint16), [len(text) * 9 // 10])

    def windows(tokens, rng):
        starts = rng.integers(0, len(tokens) - config.block_size, config.batch_size)
        rows = np.stack([tokens[i : i + config.block_size + 1] for i in starts])
        return jax.device_put(rows, trainkit.devices.batch_sharding(mesh))

    mesh = trainkit.devices.make_mesh(config)
    state = initial_state(tutorial, config, mesh)
    rng, training = np.random.default_rng(seed), []
    with jax.set_mesh(mesh):
        for _ in range(steps):
            state, metrics = tutorial.train_step(state, windows(train, rng), config)
            training.append(float(metrics["loss"]))
        rng = np.random.default_rng(0)  # the same windows for all
        validation = [
            float(tutorial.eval_step(state.params, windows(val, rng), config))
            for _ in range(20)
        ]
    return float(np.mean(training[-steps // 10 :])), float(np.mean(validation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        for dtype in ("float32", "bfloat16"):
            found = in_own_process(losses, dtype, seed, arguments.steps)
            rows.append([seed, dtype, *(f"{loss:.4f}" for loss in found)])
    columns = ["seed", "sums in", "training loss, last tenth", "validation loss"]
    print_table(columns, rows, ["jax", "flax", "optax"])


if __name__ == "__main__":
    main()

"""What a checkpoint costs the training loop.

    python benchmarks/checkpoint.py [--n_layer 6] [--n_embd 384] [--saves 5]

Trains the notebook's model in one process and saves its whole state a few times as the
notebook's loop does. Prints the pause at the start of a save, and how long steps take
while a save is being written, as a ratio to the steps between saves.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import load_notebook, random_windows

import trainkit.checkpoints
import trainkit.config
import trainkit.devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=int, default=6)
    parser.add_argument("--n_embd", type=int, default=384)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--saves", type=int, default=5)
    arguments = vars(parser.parse_args())
    saves = arguments.pop("saves")
    tutorial = load_notebook()
    config = trainkit.config.TrainingConfig(
        n_head=6, compute_dtype="float32", **arguments
    )
    state = tutorial.initial_state(config, trainkit.devices.make_mesh(config))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    windows = random_windows(config)

    def timed_step(state):
        start = time.perf_counter()
        state, _ = tutorial.train_step(state, windows, config)
        jax.block_until_ready(state)
        return state, time.perf_counter() - start

    for _ in range(3):
        state, _ = timed_step(state)
    alone, during, pauses, writes = [], [], [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        orbax = trainkit.checkpoints.create_orbax(config)
        for save in range(saves):
            for _ in range(10):
                state, seconds = timed_step(state)
                alone.append(seconds)
            start = time.perf_counter()
            path = Path(folder).resolve() / str(save)
            trainkit.checkpoints.save_in_background(orbax, str(path), state)
            pauses.append(time.perf_counter() - start)
            while not path.exists():  # Orbax renames the folder when it is complete
                state, seconds = timed_step(state)
                during.append(seconds)
            writes.append(time.perf_counter() - start)
            orbax.wait_until_finished()

    median = statistics.median
    kind = jax.devices()[0].device_kind
    print(f"{kind}, {os.cpu_count()} cores, {size / 1e6:.0f} MB of state")
    print(
        "| pause at the start | time to write | step alone | step during a save | ratio |"
    )
    print("|---|---|---|---|---|")
    print(
        f"| {median(pauses):.3f} s | {median(writes):.2f} s | {median(alone):.3f} s "
        f"| {median(during):.3f} s | {median(during) / median(alone):.2f} |"
    )


if __name__ == "__main__":
    main()

"""What a checkpoint costs the training loop.

    python benchmarks/checkpoint.py [--n_layer 6] [--n_embd 384] [--saves 3]
        [--busy PROCESSES] [--device SECONDS]

Trains the notebook's model in one process and saves its whole state a few times as the
notebook's loop does: with threads that get what is left of the processor, as on CPUs, and
with threads that get their share, as on accelerators, in processes that take turns. Prints
the pause at the start of a save, the time to write it, and how long steps take meanwhile, as
a ratio to the steps between saves. `--busy` lets other processes compute all the time, as
Ray Data's tasks do; with `--device`, a step is a wait of so many seconds, as for an
accelerator.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import interleave, load_notebook, print_table, random_windows
from notebook_module import initial_state

import trainkit.checkpoints
import trainkit.config
import trainkit.devices

SHARES = {"what is left": os.sched_setscheduler, "their share": lambda *_: None}


def measure(share: str, arguments: dict) -> tuple[list, ...]:
    """Seconds of pauses, of whole saves, of steps between saves, and of steps beside them."""
    saves, busy, device = map(arguments.pop, ("saves", "busy", "device"))
    os.sched_setscheduler = SHARES[share]  # which `save_in_background` calls
    tutorial = load_notebook()
    config = trainkit.config.TrainingConfig(
        n_head=6, compute_dtype="float32", **arguments
    )
    state = initial_state(tutorial, config, trainkit.devices.make_mesh(config))
    windows = random_windows(config)
    state, _ = tutorial.train_step(state, windows, config)

    def timed_step(state):
        start = time.perf_counter()
        if device:
            time.sleep(device)
        else:
            state, _ = tutorial.train_step(state, windows, config)
            jax.block_until_ready(state)
        return state, time.perf_counter() - start

    pauses, writes, alone, during = [], [], [], []
    with contextlib.ExitStack() as stack:
        for _ in range(busy):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(other.kill)
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="."))
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
    return pauses, writes, alone, during


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=int, default=6)
    parser.add_argument("--n_embd", type=int, default=384)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--device", type=float, default=0.0)
    arguments = vars(parser.parse_args())
    measured = interleave(measure, [(share, arguments) for share in SHARES], rounds=2)
    rows = []
    for share, rounds in zip(SHARES, measured):
        times = (sum(lists, []) for lists in zip(*rounds))
        pause, write, step, slowed = map(statistics.median, times)
        seconds = f"{pause:.2f} s", f"{write:.1f} s", f"{step:.3f} s", f"{slowed:.3f} s"
        rows.append([share, *seconds, f"{slowed / step:.2f}"])
    columns = [
        "threads get",
        "pause",
        "time to write",
        "step",
        "step in a save",
        "ratio",
    ]
    print_table(columns, rows, ["jax", "orbax-checkpoint"])


if __name__ == "__main__":
    main()

"""The time from `trainer.fit()` to the first logged step, and where it goes.

    python benchmarks/first_step.py [configs/smoke.yaml]

Launches the notebook's own loop twice, in a storage folder of its own: with an empty
compilation cache, and with the one that the first launch left.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # as the notebook's own process

import jax
from common import load_notebook, start_ray

import trainkit.config
import trainkit.devices
import trainkit.run_log
from trainkit import states

STAGES = {
    "loop": "start the workers, import, join them",
    "state": "mesh and state",
    "batch": "first batch",
    "step": "compile and run the first step",
    "line": "first line of the log",
}


def watched(tutorial, path: Path):
    """The notebook's loop, leaving the time at which each stage ended in `path`.

    The notebook's functions are replaced here, and travel to the workers as they are; those
    of trainkit, which the workers import, must be replaced there.
    """
    train_loop, initial_state = tutorial.train_loop_per_worker, states.initial_state
    train_step, batches = tutorial.train_step, trainkit.devices.global_batches
    times = {}

    def note(stage: str) -> None:
        times.setdefault(stage, time.time())

    def noting(stage, function):
        def wrapper(*arguments):
            result = jax.block_until_ready(function(*arguments))
            note(stage)
            return result

        return wrapper

    def noting_batches(*arguments):
        for batch in batches(*arguments):
            note("batch")
            yield batch

    class RunLog(trainkit.run_log.RunLog):
        def write(self):
            line = super().write()
            note("line")
            path.write_text(json.dumps(times))
            return line

    def loop(settings):
        note("loop")
        states.initial_state = noting("state", initial_state)
        trainkit.devices.global_batches = noting_batches
        trainkit.run_log.RunLog = RunLog
        train_loop(settings)

    tutorial.train_step = noting("step", train_step)
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/smoke.yaml")
    arguments = parser.parse_args()
    tutorial = load_notebook()
    start_ray()
    columns = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folder = Path(folder).resolve()
        loop = watched(tutorial, folder / "times.json")
        config = trainkit.config.load_config(
            arguments.config,
            max_steps=3,
            log_interval=1,
            data_dir=str(folder / "data"),
            storage_path=str(folder / "runs"),
        )
        tutorial.prepare_dataset(config)
        for name in ("cold", "warm"):
            run = dataclasses.replace(config, run_name=name)
            trainer = tutorial.make_trainer(run, loop)
            start = time.time()
            trainer.fit()
            times = json.loads((folder / "times.json").read_text())
            ends = [start, *(times[stage] for stage in STAGES)]
            columns[name] = [b - a for a, b in zip(ends, ends[1:])]
    print(f"{arguments.config}, {os.cpu_count()} cores")
    print("| stage | cold cache | warm cache |\n|---|---|---|")
    for stage, cold, warm in zip(STAGES.values(), columns["cold"], columns["warm"]):
        print(f"| {stage} | {cold:.1f} s | {warm:.1f} s |")
    print(f"| in all | {sum(columns['cold']):.1f} s | {sum(columns['warm']):.1f} s |")
    sys.stdout.flush()  # before Ray's own exit


if __name__ == "__main__":
    main()

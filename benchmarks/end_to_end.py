"""The whole loop, as `JaxTrainer` runs it, against the bare compiled step.

    python benchmarks/end_to_end.py configs/smoke.yaml max_steps=360 eval_interval=100

Runs the notebook's own loop with everything on. Halfway between two evaluations, it pauses,
and the same workers run the same step on a batch that is already in memory, with a copy of
the state. So the speed of each stretch, with its one evaluation and checkpoint, stands
between two of the bare step's, and a machine that becomes slower slows all three. Prints the
ratios of their speeds, and how long the loop's own thread spent in each part.
"""

import argparse
import collections
import itertools
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # as the notebook's own process

import jax
import jax.numpy as jnp
import ray.train
from common import load_notebook, parse_changes, start_ray

import trainkit.checkpoints
import trainkit.config
import trainkit.devices
import trainkit.run_log

BARE = 25  # steps of the bare program in each pause


def pauses(config) -> list[int]:
    """The steps after which the loop pauses; it warms up until the first of them."""
    interval = config.eval_interval
    return list(range(interval + interval // 2, config.max_steps, interval))


@jax.jit
def copied(state):
    return jax.tree.map(jnp.copy, state)


def timed_loop(tutorial, path: Path):
    """The notebook's loop, leaving in `path` what its parts took between the pauses.

    The notebook's functions are replaced here, and travel to the workers as they are; those
    of trainkit and Ray, which the workers import, must be replaced there.
    """
    train_loop, train_step = tutorial.train_loop_per_worker, tutorial.train_step
    evaluate, batches = tutorial.evaluate, trainkit.devices.global_batches
    report = ray.train.report
    seconds, whole, bare = collections.Counter(), [], []
    now, clock = time.perf_counter, {"step": 0, "start": None}  # shared, once pickled

    def spend(part, function, *arguments, **options):
        before = now()
        try:
            return function(*arguments, **options)
        finally:
            if clock["start"]:
                seconds[part] += now() - before

    def timed_batches(*arguments):
        stream = batches(*arguments)
        while (batch := spend("data", next, stream, None)) is not None:
            yield batch

    def pause(state, windows, config):
        jax.block_until_ready(state)
        if clock["start"]:
            whole.append(now() - clock["start"])
        state = jax.block_until_ready(copied(state))
        before = now()
        for _ in range(BARE):
            state, _ = train_step(state, windows, config)
        jax.block_until_ready(state)
        bare.append((now() - before) / BARE)
        clock["start"] = now() if len(bare) < len(pauses(config)) else None

    def timed_step(state, windows, config):
        if clock["step"] in pauses(config):
            pause(state, windows, config)
        clock["step"] += 1
        return spend("dispatch", train_step, state, windows, config)

    class RunLog(trainkit.run_log.RunLog):
        def add(self, *step):
            spend("wait for the device", super().add, *step)

        def write(self):
            spend("wait for the device", jax.block_until_ready, self.recent)
            return spend("log", super().write)

    class Checkpointer(trainkit.checkpoints.Checkpointer):
        def save(self, *arguments):
            return spend("save", super().save, *arguments)

    def loop(settings):
        trainkit.devices.global_batches = timed_batches
        trainkit.run_log.RunLog = RunLog
        trainkit.checkpoints.Checkpointer = Checkpointer
        ray.train.report = partial(spend, "save", report)
        train_loop(settings)
        if jax.process_index() == 0:
            found = {"seconds": seconds, "whole": whole, "bare": bare}
            path.write_text(json.dumps(found))

    tutorial.train_step = timed_step
    tutorial.evaluate = partial(spend, "evaluate", evaluate)
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/smoke.yaml")
    parser.add_argument("changes", nargs="*", help="key=value, on top of the file")
    arguments = parser.parse_intermixed_args()
    changes = parse_changes(arguments.changes)
    tutorial = load_notebook()
    start_ray()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folder = Path(folder).resolve()
        places = {
            "data_dir": str(folder / "data"),
            "storage_path": str(folder / "runs"),
            "run_name": "run",
        }
        config = trainkit.config.load_config(arguments.config, **(changes | places))
        if len(pauses(config)) < 2:
            raise SystemExit("max_steps: expected more than 2.5 times eval_interval")
        tutorial.prepare_dataset(config)
        loop = timed_loop(tutorial, folder / "report.json")
        tutorial.make_trainer(config, loop).fit()
        report = json.loads((folder / "report.json").read_text())

    bare = [sum(pair) / 2 for pair in itertools.pairwise(report["bare"])]
    whole = [seconds / config.eval_interval for seconds in report["whole"]]
    ratios = [f"{a / b:.3f}" for a, b in zip(bare, whole)]
    bare, whole = statistics.mean(bare), statistics.mean(whole)
    steps = config.eval_interval * len(ratios)
    tokens = config.batch_size * config.block_size
    print(f"{arguments.config} {' '.join(arguments.changes)}, {os.cpu_count()} cores")
    print("| | a step | tokens/s | share |\n|---|---|---|---|")
    print(f"| bare step | {bare * 1e3:.1f} ms | {tokens / bare:,.0f} | |")
    print(f"| whole loop | {whole * 1e3:.1f} ms | {tokens / whole:,.0f} | 100 % |")
    for part, seconds in sorted(report["seconds"].items(), key=lambda item: -item[1]):
        share = seconds / steps / whole
        print(f"| - {part} | {seconds / steps * 1e3:.2f} ms | | {share:.1%} |")
    print(f"\nof the bare step's speed: {bare / whole:.3f}; each stretch: {ratios}")


if __name__ == "__main__":
    main()

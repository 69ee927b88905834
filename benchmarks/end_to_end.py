"""The whole loop, as `JaxTrainer` runs it, against the bare compiled step.

    python benchmarks/end_to_end.py configs/smoke.yaml max_steps=300 [key=value ...]

Runs the notebook's own loop with everything on, then, in the same workers, the same step on
a batch that is already in memory. Prints the ratio of their speeds, and how long the loop's
own thread spent in each part that is not the step. Needs some hundred steps.
"""

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # as the notebook's own process
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ci"))

import jax
import ray
import yaml
from notebook_module import load_notebook

WARM_UP = 100  # steps before the measurement starts
BARE = 100  # steps of the bare program, before and after


def timed_loop(tutorial, path: Path):
    """The notebook's loop, leaving in `path` what its parts took after the warm-up."""
    train_loop, batches = tutorial.train_loop_per_worker, tutorial.global_batches
    save_checkpoint, eval_step = tutorial.save_checkpoint, tutorial.eval_step
    train_step = tutorial.train_step
    seconds, kept, start = collections.Counter(), {}, []

    def spend(part, function, *arguments):
        before = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            if start:
                seconds[part] += time.perf_counter() - before

    def timed_batches(config, mesh, split, first_step=0):
        stream = batches(config, mesh, split, first_step)
        step = first_step
        while (batch := spend("data", next, stream, None)) is not None:
            kept["windows"] = batch
            step += 1
            if split == "train" and step == WARM_UP + 1:
                jax.block_until_ready(kept["state"])
                seconds.clear()
                start.append(time.perf_counter())
            yield batch

    def kept_step(state, windows, config):
        state, metrics = spend("dispatch", train_step, state, windows, config)
        kept["state"] = state
        return state, metrics

    class RunLog(tutorial.RunLog):
        def add(self, *step):
            spend("wait for the device", super().add, *step)

        def write(self):
            spend("wait for the device", jax.block_until_ready, self.recent)
            return spend("log", super().write)

    def bare(config) -> float:
        """Seconds a step, fed from memory."""
        state = kept["state"]
        before = time.perf_counter()
        for _ in range(BARE):
            state, _ = train_step(state, kept["windows"], config)
        jax.block_until_ready(state)
        kept["state"] = state
        return (time.perf_counter() - before) / BARE

    def loop(settings):
        train_loop(settings)
        jax.block_until_ready(kept["state"])
        whole = time.perf_counter() - start[0]
        config = tutorial.TrainingConfig(**settings)
        report = dict(seconds) | {"whole": whole, "bare": [bare(config), bare(config)]}
        if jax.process_index() == 0:
            path.write_text(json.dumps(report))

    tutorial.global_batches, tutorial.train_step = timed_batches, kept_step
    tutorial.RunLog = RunLog
    tutorial.save_checkpoint = lambda *args: spend("save", save_checkpoint, *args)
    tutorial.eval_step = lambda *args: spend("evaluate", eval_step, *args)
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="configs/smoke.yaml")
    parser.add_argument("changes", nargs="*", help="key=value, on top of the file")
    arguments = parser.parse_intermixed_args()
    changes = dict(change.split("=", 1) for change in arguments.changes)
    changes = {key: yaml.safe_load(value) for key, value in changes.items()}
    tutorial = load_notebook()
    ray.init(log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folder = Path(folder).resolve()
        places = {
            "data_dir": str(folder / "data"),
            "storage_path": str(folder / "runs"),
            "run_name": "run",
        }
        config = tutorial.load_config(arguments.config, **(changes | places))
        if config.max_steps <= WARM_UP:
            raise SystemExit(f"max_steps: expected more than {WARM_UP}, the warm-up")
        tutorial.prepare_dataset(config)
        loop = timed_loop(tutorial, folder / "report.json")
        tutorial.make_trainer(config, loop).fit()
        report = json.loads((folder / "report.json").read_text())

    steps = config.max_steps - WARM_UP
    whole, bare = report.pop("whole") / steps, sum(report.pop("bare")) / 2
    tokens = config.batch_size * config.block_size
    print(f"{arguments.config} {' '.join(arguments.changes)}, {os.cpu_count()} cores")
    print("| | a step | tokens/s | share |\n|---|---|---|---|")
    print(f"| bare step | {bare * 1e3:.1f} ms | {tokens / bare:,.0f} | |")
    print(f"| whole loop | {whole * 1e3:.1f} ms | {tokens / whole:,.0f} | 100 % |")
    for part, seconds in sorted(report.items(), key=lambda item: -item[1]):
        share = seconds / steps / whole
        print(f"| - {part} | {seconds / steps * 1e3:.2f} ms | | {share:.1%} |")
    print(f"\nwhole loop / bare step: {bare / whole:.3f} of its speed")


if __name__ == "__main__":
    main()

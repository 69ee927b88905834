"""The run's log: metrics.jsonl, a progress bar, a function of yours, and the watchdog."""

import faulthandler
import gc
import json
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ray.train
from ray.experimental import tqdm_ray
from tqdm import tqdm

from trainkit.config import TrainingConfig


class RunLog:
    """Takes the metrics of each step, and logs and shows them every `log_interval` steps.

    Reading a number makes the loop wait for the device. In between, the loop stays at most two
    steps ahead: enough for the device never to wait, and few enough for the bar to be right.
    In its block, a step of more than `stall_timeout_s`, or what comes before the first one,
    ends its worker, which prints where it hangs; Ray then starts all of them again.
    """

    def __init__(self, config: TrainingConfig, step: int, send: Callable | None = None):
        """Go on after a step, without later lines. `send` gets each line, on one worker."""
        self._config = config
        self._send = send
        self._path = config.run_path / "metrics.jsonl"
        self._step = step
        self._time = time.perf_counter()
        self._recent = {}
        self._bar = None
        if ray.train.get_context().get_world_rank() == 0:
            begun = "is new; with this run_name, a launch continues it"
            if "://" in config.storage_path:
                begun += ", and nothing keeps two launches out of a bucket"
            if step:
                begun = f"continues at step {step}, with the same settings and tokens; "
                begun += "code isn't compared"
            split = config.split(jax.device_count())
            print(f"{config.run_name} {begun} | {_format(split)}")
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            lines = [text for text in lines if text.endswith("}")]  # not those cut off
            self._lines = [text for text in lines if json.loads(text)["step"] <= step]
            self._is_bucket = "://" in config.storage_path
            self._write()
            self._bar = tqdm_ray.tqdm(desc=config.run_name, total=config.max_steps)
            self._bar.update(step)

    def __enter__(self) -> "RunLog":
        faulthandler.dump_traceback_later(self._config.stall_timeout_s, exit=True)
        return self

    def __exit__(self, *error) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._bar:
            self._bar.close()
            if self._is_bucket:
                self._write()

    def add(self, step: int, metrics: dict, saving: bool) -> dict | None:
        """Take the scalars of a step, which the device may still be computing.

        Gives a line if it is time for one, or if a checkpoint follows (`saving`). Raises
        FloatingPointError if a number since the last line is infinite or NaN.
        """
        faulthandler.dump_traceback_later(self._config.stall_timeout_s, exit=True)
        self._recent[step] = metrics
        jax.block_until_ready(self._recent.get(step - 2))
        if self._bar:
            self._bar.update()
        if not saving and step % self._config.log_interval:
            return None
        for name, value in metrics.items():
            if jnp.shape(value):
                shape = jnp.shape(value)
                raise ValueError(
                    f"metrics: expected scalars, found {name} of shape {shape}"
                )
        recent = jax.tree.map(float, jax.device_get(self._recent))
        self._recent = {}
        for each, values in recent.items():
            if not all(map(math.isfinite, values.values())):
                raise FloatingPointError(
                    f"diverged at step {each}: {_format(values)}. What was saved before is "
                    "good. Lower learning_rate, which makes a new run."
                )
        tokens = self._config.batch_size * self._config.block_size  # of a step
        seconds = time.perf_counter() - self._time
        line = {"step": step, "tokens": step * tokens, **recent[step]}
        line["tokens_per_s"] = round((step - self._step) * tokens / seconds)
        self._step = step
        self._time += seconds
        if self._bar:
            text = json.dumps(line)
            print(_format(line))
            if self._is_bucket:
                self._lines.append(text)
                if saving:
                    self._write()
            else:
                with self._path.open("a") as file:
                    file.write(f"{text}\n")
            try:
                if self._send:
                    self._send(dict(line))
            except Exception as error:
                print(f"send failed at step {step}; the run continues: {error!r}")
        return line

    def _write(self) -> None:
        """Write all lines or none: the disk may be full, and objects in buckets can't grow."""
        new = self._path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in self._lines))
        new.replace(self._path)


def _format(line: dict) -> str:
    """Numbers for people: step 10 | tokens 5,120 | loss 10.73 and so on."""
    formats = {int: ",", float: ".4g", str: ""}
    return " | ".join(f"{k} {v:{formats[type(v)]}}" for k, v in line.items())


def close_bars() -> None:
    """Close those of killed workers, or Python 3.13 crashes (tqdm issue 1687)."""
    for each in gc.get_objects():
        if issubclass(type(each), tqdm):
            each.close()

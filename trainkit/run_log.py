"""The run's log: metrics.jsonl, a progress bar, a function of yours, divergence.

The first worker writes each logged step into the run's folder, where you can read it while
the run goes on. `ray.train.report` is no place for that: it waits for every worker and for
Ray's controller, which asks every 2 s by default. The bar is Ray's experimental `tqdm_ray`,
since no other can be moved by a process on another machine.
"""

import atexit
import faulthandler
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from ray.experimental import tqdm_ray
from tqdm import tqdm

from trainkit import checkpoints, workers
from trainkit.config import TrainingConfig


class RunLog:
    """Takes the metrics of each step, and logs and shows them now and then.

    A step returns before the device has finished it, and reading its numbers would make
    the loop wait. So the loop hands them over as they are, and a line is made only every
    `log_interval` steps. In between, the loop stays at most two steps ahead of the device:
    enough for the device never to wait, and few enough for the bar to tell the truth.

    Attributes:
        diverged: whether a step's loss or gradient was infinite or not a number.
    """

    def __init__(
        self,
        config: TrainingConfig,
        state: Any,
        send: Callable[[dict], None] | None = None,
    ):
        """Go on after the step of `state`; say how the work is divided.

        Args:
            state: has the `step`, a scalar.
            send: gets every line of the log, on the first worker, in a thread of its own.
        """
        self.config, self.recent, self.diverged = config, {}, False
        self.step, self.time = int(state.step), time.perf_counter()
        self.file = self.bar = self.observer = None
        if jax.process_index() == 0:
            print(format_line(config.split))
            self.file = LogFile(config, self.step)
            self.bar = tqdm_ray.tqdm(desc=config.run_name, total=config.max_steps)
            self.bar.update(self.step)
            self.observer = Observer(send) if send else None

    def add(self, step: int, metrics: dict, saving: bool) -> dict | None:
        """Take the scalars of a step, which the device may still be computing.

        Args:
            saving: whether a checkpoint of this step follows; then it is logged, too.

        Returns:
            What Ray is told of a step that is logged: the step, the tokens so far, its
            metrics, and the speed since the last line. None if the run has diverged.
        """
        workers.watch(self.config.stall_timeout_s)
        self.recent[step] = metrics
        jax.block_until_ready(self.recent.get(step - 2))  # at most two are under way
        if self.bar:
            self.bar.update()
        if not saving and step % self.config.log_interval:
            return None
        recent, self.recent = jax.device_get(self.recent), {}
        self.diverged = has_diverged(self.config, recent)
        if self.diverged:
            return None
        tokens = self.config.batch_size * self.config.block_size  # of a step
        steps, seconds = step - self.step, time.perf_counter() - self.time
        self.step, self.time = step, self.time + seconds
        line = {"step": step, "tokens": step * tokens}
        line |= {name: float(value) for name, value in recent[step].items()}
        line["tokens_per_s"] = round(steps * tokens / seconds)
        if self.file:
            self.file.append(line, saving)
            print(format_line(line))
        if self.observer:
            self.observer.lines.put(line)
        return checkpoints.NOT_EVALUATED | line

    def close(self) -> None:
        """Finish what is under way, and watch no longer: nothing more is logged."""
        for each in (self.bar, self.file, self.observer):
            if each:
                each.close()
        faulthandler.cancel_dump_traceback_later()


class LogFile:
    """The run's metrics.jsonl.

    A run that starts again may repeat a few steps. What the log says about them is
    dropped, so each step is in it once. An object in a store can't grow: it is written
    anew, with all lines, before each checkpoint and at the end.
    """

    def __init__(self, config: TrainingConfig, step: int):
        self.path, self.remote = config.run_path / "metrics.jsonl", config.remote
        found = checkpoints.retry(checkpoints.read_log, config)
        self.lines = [json.dumps(found[n]) + "\n" for n in sorted(found) if n <= step]
        if found:
            checkpoints.retry(checkpoints.write_whole, self.path, "".join(self.lines))

    def append(self, line: dict, saving: bool) -> None:
        """Add a line: a step and its numbers."""
        text = json.dumps(line) + "\n"
        if not self.remote:
            with self.path.open("a") as file:
                file.write(text)
            return
        self.lines.append(text)
        if saving:
            self.close()

    def close(self) -> None:
        """Write what isn't written yet."""
        if self.remote:
            checkpoints.retry(self.path.write_text, "".join(self.lines))


class Observer:
    """Calls `send` with line after line, in a thread: it can't end the run, or hold it up."""

    def __init__(self, send: Callable[[dict], None]):
        self.send, self.lines = send, queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Send the lines until there is a None among them."""
        while line := self.lines.get():
            try:
                self.send(dict(line))  # which it may take apart
            except Exception as error:
                print(
                    f"send failed at step {line['step']}; the run continues: {error!r:.300}"
                )

    def close(self, seconds: float = 30) -> None:
        """Wait until all lines are sent, at most so long."""
        self.lines.put(None)
        self.thread.join(seconds)
        if self.thread.is_alive():
            print(f"send has taken more than {seconds} s; what follows isn't sent")


def format_line(line: dict) -> str:
    """Numbers for people: step 10 | tokens 5,120 | loss 10.73 and so on."""
    formats = {int: ",", float: ".4g", str: ""}
    return " | ".join(f"{k} {v:{formats[type(v)]}}" for k, v in line.items())


def has_diverged(config: TrainingConfig, recent: dict[int, dict]) -> bool:
    """Whether a loss or gradient is infinite or not a number; if so, leave a note.

    Such a run never recovers, and must not overwrite good checkpoints. All workers see the
    same numbers, so they stop together.

    Args:
        recent: the metrics of the steps since the last call.
    """
    names = ("loss", "grad_norm", "val_loss")
    for step, metrics in recent.items():
        values = {name: float(metrics[name]) for name in names if name in metrics}
        if not all(map(math.isfinite, values.values())):
            last = next(iter(checkpoints.list_saved(config)), "none yet")
            message = (
                f"Diverged at step {step}: {values}. Last good checkpoint: {last}."
            )
            (config.run_path / "diverged.txt").write_text(message)
            return True
    return False


def refuse_diverged(config: TrainingConfig) -> None:
    """Raise if the run has diverged: it would do so again.

    Raises:
        FloatingPointError: with the step, the numbers, and the last good checkpoint.
    """
    note = config.run_path / "diverged.txt"
    if note.exists():
        raise FloatingPointError(f"{note.read_text()} To try again, delete {note}.")


@atexit.register
def close_bars() -> None:
    """Close what bars are still open, such as those of workers that were killed.

    Python 3.13 and 3.14 crash when tqdm does so late in their shutdown, and a job that has
    done its work would count as failed: https://github.com/tqdm/tqdm/issues/1687.
    """
    for bar in list(tqdm._instances):
        bar.close()

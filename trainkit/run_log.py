"""The run's log: metrics.jsonl, TensorBoard, a progress bar, MFU, a profile, divergence.

The first worker writes each logged step into the run's folder, where you can read it while
the run goes on. `ray.train.report` is no place for that: it waits for every worker and for
Ray's controller, which asks every 2 s by default. The bar is Ray's experimental `tqdm_ray`,
since no other can be moved by a process on another machine.
"""

import atexit
import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from ray.experimental import tqdm_ray
from tqdm import tqdm

from trainkit import checkpoints
from trainkit.config import ModelConfig, TrainingConfig

# Dense bfloat16 FLOP/s a device, from the vendors' data sheets. A name's first match counts.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2_250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
SECONDS_BETWEEN_OBJECTS = 10


class RunLog:
    """Collects the metrics of each step, and logs and shows them now and then.

    A step returns before the device has finished it, and reading its numbers would make
    the loop wait. So the loop hands them over as they are, and asks for a line only every
    `log_interval` steps. In between, it stays at most two steps ahead of the device:
    enough for the device never to wait, and few enough for the bar to tell the truth.
    """

    def __init__(
        self,
        config: TrainingConfig,
        state: Any,
        n_params: int,
        send: Callable[[dict], None] | None = None,
    ):
        """Go on after the step of `state`; say how the work is divided.

        Args:
            state: a pytree of arrays, with `step`.
            n_params: the model's parameters, not counting rows that pad the vocabulary.
            send: gets every line of the log, on the first worker, in a thread of its own.
        """
        self.config, self.recent, step = config, {}, int(state.step)
        self.step, self.time = step, time.perf_counter()
        self.peak = peak_tokens_per_s(config, n_params)
        self.file = self.bar = self.observer = None
        if jax.process_index() == 0:
            print(f"{n_params:,} parameters | {describe_start(config, state)}")
            self.file = LogFile(config, step)
            self.bar = tqdm_ray.tqdm(desc=config.run_name, total=config.max_steps)
            self.bar.update(step)
            self.observer = Observer(send) if send else None

    def add(self, step: int, metrics: dict) -> None:
        """Take the scalars of a step, which the device may still be computing."""
        self.recent[step] = metrics
        profile(self.config, step, metrics)
        jax.block_until_ready(self.recent.get(step - 2))  # at most two are under way
        if self.bar:
            self.bar.update()

    def write(self) -> dict | None:
        """Log a line for the last step, unless a step since the last line diverged.

        Returns:
            The line: step, tokens so far, the step's metrics, and the speed since the last
            line; None if the run has diverged.
        """
        recent = jax.device_get(self.recent)
        if has_diverged(self.config, recent):
            self.close()
            return None
        step, metrics = recent.popitem()
        tokens = self.config.batch_size * self.config.block_size
        speed = (step - self.step) * tokens / (time.perf_counter() - self.time)
        self.step, self.time, self.recent = step, time.perf_counter(), {}
        line = {"step": step, "tokens": step * tokens}
        line |= {name: float(value) for name, value in metrics.items()}
        line["tokens_per_s"] = round(speed)
        if self.peak:
            line["mfu"] = speed / self.peak
        if self.file:
            self.file.append(line)
            print(format_line(line))
            if self.observer:
                self.observer.lines.put(line)
            if step == self.config.max_steps:
                self.close()
        return line

    def close(self) -> None:
        """Finish what is under way: nothing more is logged."""
        for each in (self.bar, self.file, self.observer):
            if each:
                each.close()


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
                self.send(line)
            except Exception as error:
                print(
                    f"send failed at step {line['step']}; the run continues: {error!r:.300}"
                )

    def close(self, seconds: float = 30) -> None:
        """Wait until all lines are sent, at most so long."""
        self.lines.put(None)
        self.thread.join(seconds)


class LogFile:
    """The run's metrics.jsonl, and the same numbers for TensorBoard.

    A run that starts again may repeat a few steps. What the log says about them is
    dropped, so each step is in it once. An object in a store can't grow: it is written
    anew, with all lines, at each evaluation and every few seconds in between, in a thread
    that doesn't hold up the step.
    """

    def __init__(self, config: TrainingConfig, step: int):
        self.path, self.remote = config.run_path / "metrics.jsonl", config.remote
        self.board, self.written = None, time.monotonic()
        self.thread, self.writing = ThreadPoolExecutor(1), None
        lines = checkpoints.retry(checkpoints.read_log, config)
        kept = [json.dumps(lines[n]) + "\n" for n in sorted(lines) if n <= step]
        self.text = "".join(kept)
        if lines:
            checkpoints.write_whole(self.path, self.text)
        if not self.remote:
            from tensorboardX import SummaryWriter  # slow: it imports PyTorch if it can

            # The queue has no end: once a full disk has ended the thread that empties it,
            # one with an end would hold up the run.
            options = {"purge_step": step + 1, "flush_secs": 1, "max_queue": 0}
            self.board = SummaryWriter(str(config.run_path / "tensorboard"), **options)

    def append(self, line: dict) -> None:
        """Add a line: a step and its numbers."""
        text = json.dumps(line) + "\n"
        self.text += text
        if self.remote:
            waited = time.monotonic() - self.written
            idle = self.writing is None or self.writing.done()
            if idle and ("val_loss" in line or waited >= SECONDS_BETWEEN_OBJECTS):
                self.written = time.monotonic()
                self.writing = self.thread.submit(self.write_object)
            return
        with self.path.open("a") as file:
            file.write(text)
        for name, value in line.items():
            self.board.add_scalar(name, value, line["step"])

    def write_object(self) -> None:
        """Write all lines; if that fails, the run goes on, and the next time counts."""
        try:
            checkpoints.retry(self.path.write_text, self.text)
        except Exception as error:
            print(f"Cannot write {self.path} now, but later with more lines: {error}")

    def close(self) -> None:
        """Write what isn't written yet."""
        self.thread.shutdown()
        if self.remote:
            self.write_object()


def format_line(line: dict) -> str:
    """A line of the log for people: step 10 | tokens 5,120 | loss 10.73 and so on."""
    formats = {int: ",", float: ".4g"}
    return " | ".join(f"{k} {v:{formats[type(v)]}}" for k, v in line.items())


def flops_per_token(config: ModelConfig, n_params: int) -> float:
    """6 N + 12 L D T, with N the parameters less the position embedding.

    From nanoGPT's estimate_mfu: https://github.com/karpathy/nanoGPT/blob/master/model.py.
    """
    weights = n_params - config.block_size * config.n_embd
    return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size


def peak_tokens_per_s(config: ModelConfig, n_params: int) -> float | None:
    """What all devices could do at their peak, if the table has it.

    MFU, model FLOPs utilization, is a run's speed divided by this.
    """
    kind = jax.devices()[0].device_kind
    peak = next((PEAK_FLOPS[k] for k in PEAK_FLOPS if kind.startswith(k)), None)
    return peak and peak * jax.device_count() / flops_per_token(config, n_params)


def profile(config: TrainingConfig, step: int, outputs) -> None:
    """Trace the steps between the two of `profile_steps`, on the first worker.

    Args:
        outputs: arrays of `step`, to wait for.
    """
    first, last = getattr(config, "profile_steps", None) or (None, None)
    if step in (first, last) and jax.process_index() == 0:
        jax.block_until_ready(outputs)
        if step == first:
            folder = str(config.run_path / "profile")
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
        else:
            with contextlib.suppress(RuntimeError):  # no trace: a restart came between
                jax.profiler.stop_trace()


@atexit.register
def close_bars() -> None:
    """Close what bars are still open, such as those of workers that were killed.

    Python 3.13 and 3.14 crash when tqdm does so late in their shutdown, and a job that has
    done its work would count as failed: https://github.com/tqdm/tqdm/issues/1687.
    """
    for bar in list(tqdm._instances):
        bar.close()


def has_diverged(config: TrainingConfig, recent: dict[int, dict]) -> bool:
    """Whether a loss or gradient is infinite or not a number; if so, leave a note.

    Such a run never recovers, and must not overwrite good checkpoints. All workers see the
    same numbers, so they stop together.

    Args:
        recent: the metrics of the steps since the last call.
    """
    for step, metrics in recent.items():
        names = ("loss", "grad_norm", "val_loss")
        values = {name: float(metrics[name]) for name in names if name in metrics}
        if all(map(math.isfinite, values.values())):
            continue
        last = next(iter(checkpoints.list_saved(config)), "none yet")
        message = f"Diverged at step {step}: {values}. Last good checkpoint: {last}."
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


def describe_start(config: TrainingConfig, state: Any) -> str:
    """How a batch is divided, and what each device holds of it and of `state`."""
    shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    parts, windows = config.micro_batches, config.device_windows
    token = jax.numpy.dtype(config.token_dtype).itemsize
    batch = windows * (config.block_size + 1) * token
    return (
        f"{config.batch_size * config.block_size:,} tokens a step | on each of "
        f"{jax.device_count()} devices: {windows} windows as {parts} x {windows // parts}, "
        f"state {format_bytes(sum(shards))}, batch {format_bytes(batch)}"
    )


def format_bytes(n: float) -> str:
    """A number of bytes for people, such as 1.4 GiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while n >= 999.5 and len(units) > 1:  # or it would be 1e+03
        n, units = n / 1024, units[1:]
    return f"{n:.3g} {units[0]}"

"""The run's log: metrics.jsonl, a progress bar, a function of yours, and the watchdog."""

import contextlib
import faulthandler
import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
import ray.train
from ray.experimental import tqdm_ray

from trainkit import paths, run_lock
from trainkit.config import TrainingConfig

# Dense bfloat16 FLOP/s of a device, from the vendors' data sheets. A name's first match counts.
_PEAK_FLOPS = {
    "NVIDIA A10G": 70e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2_250e12,
    "NVIDIA L40S": 362e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # a v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1_154e12,  # half a chip, as JAX counts
}
_PATIENCE = 60  # seconds that the end of a run waits for `send`


class RunLog:
    """Takes the metrics of each step, and logs and shows them every `log_interval` steps.

    Reading a number makes the loop wait for the device. In between, the loop stays at most two
    steps ahead: enough for the device never to wait, and few enough for the bar to be right.
    In its block, a step of more than `stall_timeout_s`, or what comes before the first one,
    ends its worker, which prints where it hangs; Ray then starts all of them again.
    """

    def __init__(
        self, settings: Mapping, arrays: Mapping, send: Callable | None = None
    ):
        """Go on after a step, without later lines.

        Args:
            settings: those of `launch.settings`.
            arrays: the state by name: `step`, those of `model.`, and the optimizer's.
            send: gets each line, on the first worker, in a thread, so that the run doesn't wait
                for a tracker.
        """
        self._config = config = TrainingConfig(**settings["config"])
        self._val = settings.get("val", {})
        step = int(arrays["step"])
        self._flops = flops_per_token(config, arrays)
        self._peak = peak_flops(jax.devices()[0].device_kind)
        # A step that was done, and when: from which speed counts, and at the last step.
        self._since: tuple[int, float] | None = None
        self._seen: tuple[int, float] | None = None
        self._recent: dict[int, dict] = {}
        self.diverged = False
        self._lines: _Lines | None = None
        if ray.train.get_context().get_world_rank() == 0:
            print(_first_line(settings, config, arrays, self._peak))
            self._lines = _Lines(config, step, send)

    def __enter__(self) -> "RunLog":
        faulthandler.dump_traceback_later(self._config.stall_timeout_s, exit=True)
        return self

    def __exit__(self, *error) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._lines:
            self._lines.close()

    def add(self, step: int, metrics: dict, saving: bool) -> dict | None:
        """Take the scalars of a step, which the device may still be computing.

        Gives a line if it is time for one, or if a checkpoint follows (`saving`). `loss` in it
        is this step's, and `mean_loss` that of the steps since the line before.

        If a number since then is infinite or NaN, gives None, sets `diverged`, on all workers,
        and leaves a note, with which `fit` and later launches raise an error: Ray would try
        again what a worker raises.
        """
        faulthandler.dump_traceback_later(self._config.stall_timeout_s, exit=True)
        self._recent[step] = metrics
        jax.block_until_ready(self._recent.get(step - 2))
        seen, self._seen = self._seen, None
        if step - 2 in self._recent:
            waits_for_us = _is_done(self._recent[step - 1])  # the device, not we for it
            self._seen = step if waits_for_us else step - 2, time.perf_counter()
            self._since = self._since or self._seen
        if self._lines:
            self._lines.bar.update()
        if not saving and step % self._config.log_interval:
            return None
        speed = self._speed(step, saving, seen)
        recent = jax.tree.map(float, jax.device_get(self._recent))
        self._recent = {}
        for each, values in recent.items():
            if not all(map(math.isfinite, values.values())):
                self.diverged = True
                if self._lines:
                    run_lock.note_divergence(
                        self._config, f"step {each}: {_format(values)}"
                    )
                return None
        tokens = self._config.batch_size * self._config.block_size
        line = {"step": step, "tokens": step * tokens, **recent[step]}
        if losses := [values["loss"] for values in recent.values() if "loss" in values]:
            line["mean_loss"] = sum(losses) / len(losses)
        if "val_loss" in line and "bytes_per_token" in self._val:
            nats_per_byte = line["val_loss"] / self._val["bytes_per_token"]
            line["val_bits_per_byte"] = nats_per_byte / math.log(2)
        line |= speed
        if self._lines:
            self._lines.add(line, saving)
        return line

    def _speed(self, step: int, saving: bool, seen: tuple[int, float] | None) -> dict:
        """Of training since the last line, without evaluations, saves, and the first step
        after each of these or a start, which may be compiled. {} if that leaves no step.
        """
        # What a step returns is there before what an evaluation after it returns. If it is
        # there already, an evaluation was compiled meanwhile: count up to what was seen before.
        name, value = next(iter(self._recent[step].items()))
        is_late = saving and _is_done({name: value})
        jax.block_until_ready(value)
        done = seen if is_late else (step, time.perf_counter())
        since, self._since = self._since, None if saving else done
        if not since or not done or since[0] >= done[0]:
            return {}
        tokens = (
            (done[0] - since[0]) * self._config.batch_size * self._config.block_size
        )
        speed = tokens / (done[1] - since[1])
        found: dict[str, float] = {"tokens_per_s": round(speed)}
        if self._peak:
            found["mfu"] = speed * self._flops / (self._peak * jax.device_count())
        return found


class _Lines:
    """Where lines go, on the first worker: the file, the bar, the output, and `send`."""

    def __init__(self, config: TrainingConfig, step: int, send: Callable | None):
        self._path = config.run_path / "metrics.jsonl"
        self._grows = not paths.is_object_store(self._path)
        texts = []
        with contextlib.suppress(
            FileNotFoundError
        ):  # and no other error: it is rewritten
            texts = self._path.read_text().splitlines()
        texts = [text for text in texts if text.endswith("}")]  # not those cut off
        self._texts = [text for text in texts if json.loads(text)["step"] <= step]
        self._write()
        self.bar = tqdm_ray.tqdm(desc=config.run_name, total=config.max_steps)
        self.bar.update(step)
        self._unsent: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._run, args=(send,), daemon=True)
        self._sender.start()

    def add(self, line: dict, saving: bool) -> None:
        text = json.dumps(line)
        print(_format(line))
        if self._grows:
            with self._path.open("a") as file:
                file.write(f"{text}\n")
        else:
            self._texts.append(text)
            if saving:
                self._write()
        self._unsent.put(line)

    def close(self) -> None:
        self.bar.close()
        if not self._grows:
            self._write()
        self._unsent.put(None)
        self._sender.join(_PATIENCE)
        if self._sender.is_alive():
            print(f"send took over {_PATIENCE} s: it doesn't get the last lines")

    def _run(self, send: Callable | None) -> None:
        """Pass lines to `send`, one after the other, whose errors don't end the run."""
        while line := self._unsent.get():
            try:
                if send:
                    send(dict(line))
            except Exception as error:
                print(
                    f"send failed at step {line['step']}; the run continues: {error!r}"
                )

    def _write(self) -> None:
        """Write all lines or none: the disk may be full, and objects in a bucket can't grow."""
        new = self._path.with_suffix(".new")
        new.write_text("".join(f"{text}\n" for text in self._texts))
        new.replace(self._path)


def _is_done(metrics: dict) -> bool:
    arrays = (x for x in metrics.values() if isinstance(x, jax.Array))
    return all(x.is_ready() for x in arrays)  # type: ignore[attr-defined] # it has it


def rate_of(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """`{"learning_rate": ...}` of the last update, if `optax.inject_hyperparams` keeps one."""
    found = optax.tree.get_all_with_path(
        opt_state, "learning_rate", lambda _, x: isinstance(x, jax.Array)
    )
    rates = [rate for _, rate in found]
    return {"learning_rate": rates[0]} if len(rates) == 1 else {}


def flops_per_token(config: TrainingConfig, arrays: Mapping) -> int:
    """FLOPs to train on a token: 6N + 12LDT, as nanoGPT's `estimate_mfu`.

    N counts the model's weights but tables that are only looked up: embeddings, unless they
    are the output layer, too. In L layers, heads of D numbers in all attend to T tokens;
    D is `n_embd`, unless `model` has a `head_dim`.
    """
    names = [name for name in arrays if name.startswith("model.")]
    looked_up = [name for name in names if name.endswith(".embedding")]
    names = [name for name in names if name not in looked_up]
    V = config.padded_vocab_size
    of_no_layer = (arrays[name] for name in names if not re.search(r"\.\d+\.", name))
    if not any(x.ndim > 1 and x.shape[-1] == V for x in of_no_layer):  # an output layer
        names += [name for name in looked_up if arrays[name].shape[0] == V]
    size: Any = config.model.get("head_dim", config.n_embd / config.n_head)
    attention = int(12 * config.n_layer * config.n_head * size * config.block_size)
    return 6 * sum(arrays[name].size for name in names) + attention


def peak_flops(device_kind: str) -> float | None:
    """Of a device by JAX's name for it, in bfloat16; None if it isn't known."""
    known = (name for name in _PEAK_FLOPS if re.match(rf"{name}\b", device_kind))
    return _PEAK_FLOPS.get(next(known, ""))


def _first_line(
    settings: Mapping, config: TrainingConfig, arrays: Mapping, peak: float | None
) -> str:
    """What this start of a run continues with, and what a device holds of the state."""
    step = int(arrays["step"])
    begun = "is new; with this run_name, a launch continues it"
    if paths.is_object_store(config.storage_path):
        begun += ", and nothing keeps two launches out of a bucket"
    if step:
        begun = f"continues at step {step}, with the same recipe and tokens"
        if branch := settings.get("branch"):
            differs = "; ".join(branch["differs"]) or "nothing differs"
            begun = f"is at step {step}, a branch of {branch['from']}: {differs}"
        begun += "; code isn't compared"
    held = {n: math.prod(x.sharding.shard_shape(x.shape)) for n, x in arrays.items()}
    state = sum(held[name] * arrays[name].dtype.itemsize for name in held)
    parts = config.layout(jax.device_count()) | {
        "state": f"{state / 2**20:,.1f} MiB each"
    }
    if windows := settings.get("val", {}).get("windows"):
        parts["val"] = f"{config.eval_windows:,} of {windows:,}"
    if config.fsdp * config.tensor_parallel > 1:
        whole = [name for name, x in arrays.items() if held[name] == x.size]
        largest = max(whole, key=lambda name: held[name])
        parts["largest that isn't sharded"] = f"{largest} {arrays[largest].shape}"
    if jax.default_backend() != "cpu" and not peak:
        kind = jax.devices()[0].device_kind
        parts["no mfu"] = f"the peak of {kind} isn't in trainkit/run_log.py"
    return f"{config.run_name} {begun} | {_format(parts)}"


def _format(line: dict) -> str:
    """Numbers for people: step 10 | tokens 5,120 | loss 10.73 and so on."""
    formats = {int: ",", float: ".4g", str: ""}
    return " | ".join(f"{k} {v:{formats[type(v)]}}" for k, v in line.items())

"""What Ray can't see: storage that isn't shared, a loss that is no number, a hanging worker."""

import faulthandler
import math
import sys
from collections.abc import Callable

import ray
from etils import epath

from trainkit import lease, records
from trainkit.config import TrainingConfig


def storage_probe(config: TrainingConfig) -> tuple[epath.Path, str]:
    """A file that `check_storage` leaves in the run's folder, and what is in it."""
    context = ray.get_runtime_context()
    return (
        config.run_path / ".shared",
        f"{context.get_session_name()} {context.get_job_id()}",
    )


def check_before_start(config: TrainingConfig, code: tuple[Callable, ...] = ()) -> None:
    """Refuse a run that can't be kept, that has diverged before, or that is another one.

    Ray's record of the run's checkpoints is set aside if Ray couldn't start with it.

    Args:
        code: the functions that decide the result.

    Raises:
        OSError, FloatingPointError: as `check_storage` and `refuse_diverged` say.
        ValueError: as `records.check_recipe`, `check_code`, and
            `check_tokens` say.
    """
    lease.check(config)
    check_storage(config)
    refuse_diverged(config)
    records.check_recipe(config)
    if code:
        records.check_code(config, code)
    records.check_tokens(config)
    records.say_if_done(config)
    lease.take(config)
    records.check_record(config)


def check_storage(config: TrainingConfig) -> None:
    """Refuse a storage path that cannot be written; leave a file there for the workers.

    Raises:
        OSError: with the path and the reason.
    """
    try:
        if not config.remote:  # an object store has no folders
            config.run_path.mkdir(parents=True, exist_ok=True)
        probe, text = storage_probe(config)
        probe.write_text(text)
    except Exception as error:
        raise OSError(
            f"storage_path: cannot write to {config.run_path} ({error}). "
            "Choose a folder or bucket that this user may write to."
        ) from error


def check_storage_is_shared(config: TrainingConfig) -> None:
    """Fail if this worker doesn't see the folder that the run was started in.

    Raises:
        RuntimeError: the same path is another folder on this node.
    """
    probe, expected = storage_probe(config)
    if not probe.exists() or probe.read_text() != expected:
        raise RuntimeError(
            f"storage_path: {config.storage_path} is another folder on this node than "
            "where the run was started. Choose storage that all nodes share, or an "
            "object store."
        )


def diverged(config: TrainingConfig, recent: dict[int, dict]) -> bool:
    """Whether a loss or gradient is infinite or not a number; if so, leave a note.

    Such a run never recovers, and must not overwrite good checkpoints. All workers see the
    same numbers, so they stop together.

    Args:
        recent: the metrics of the steps since the last call.
    """
    for step, metrics in recent.items():
        names = ("loss", "grad_norm", "val_loss")
        values = {name: float(metrics[name]) for name in names if name in metrics}
        in_a_row = int(metrics.get("skipped_in_a_row", 0))
        if all(map(math.isfinite, values.values())):
            continue
        skipped = 0 < in_a_row <= config.max_skipped_steps
        if skipped and math.isfinite(values.get("val_loss", 0)):
            print(f"step {step}: skipped, {values}")
            continue
        last = next(iter(records.saved(config)), "none yet")
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


class Watchdog:
    """Ends this process when `beat` isn't called for `seconds`, and says where it hung.

    A worker that hangs, on a stuck disk or network, makes all the others wait for it
    forever. Once it has ended, Ray starts the group again. `faulthandler` waits in a thread
    of C, so it ends the process even while other code of C holds the interpreter's lock.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.beat(0)

    def beat(self, step: int) -> None:
        """Say that `step` is done."""
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=sys.__stderr__)

    def stop(self) -> None:
        """Watch no longer."""
        faulthandler.cancel_dump_traceback_later()

"""Whether a launch may continue: one at a time, with the run's own recipe, code, and tokens.

A *lease* in the run's folder says which launch has it. The driver takes it for a few minutes.
Then the first worker renews it, and ends it when its loop has returned. A launch that finds
another's lease is refused, unless that one has run out, or was taken by a process of this
machine that is gone. A worker that doesn't find its launch's lease has another folder.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import jax
import ray
import ray.train
from etils import epath

from trainkit import (
    checkpoints,
    devices,
    fingerprints,
    gradients,
    layers,
    run_log,
    states,
    token_files,
    workers,
)
from trainkit.config import RecipeConfig, TrainingConfig

LAUNCH = 300  # seconds that a launch has until its workers start
RENEWED, PAUSE = 60, 15  # seconds that a renewal holds, and between two
KEYS = {"session", "job", "host", "process", "since", "until"}
SHOWN = 12  # lines of a difference
DECIDING = (
    devices,
    gradients,
    layers,
    states,
    token_files,
)  # with the notebook's cells


def check(config: TrainingConfig, code: tuple[Callable, ...] = ()) -> None:
    """Refuse a run that can't be kept, that has diverged before, or that is another one.

    Ray's record of the run's checkpoints is deleted: `checkpoints` says why.

    Args:
        code: the functions that decide the result.

    Raises:
        RuntimeError: another launch has the run.
        OSError: the run's folder can't be written.
        FloatingPointError: as `run_log.refuse_diverged` says.
        ValueError: as `check_recipe`, `check_code`, and `check_tokens` say.
    """
    check_lease(config)
    take_lease(config, 0)  # which keeps no one out yet, but shows that storage is there
    run_log.refuse_diverged(config)
    check_recipe(config)
    if code:
        check_code(config, code)
    check_tokens(config)
    say_if_done(config)
    workers.release_placement_groups()
    take_lease(config, LAUNCH)
    (config.run_path / checkpoints.RECORD).unlink(missing_ok=True)


def check_recipe(config: TrainingConfig) -> None:
    """Refuse to continue a run that was started with another recipe.

    Its windows would be repeated or skipped, and no one would see it. More `max_steps`,
    other machines, and what changes numbers by rounding only are no other recipe.

    Raises:
        ValueError: with the fields that differ, what they were, and what they are now.
    """
    settings = checkpoints.newest_settings(config)
    recipe = dataclasses.fields(RecipeConfig) if settings else ()
    before = {field.name: settings.get(field.name, field.default) for field in recipe}
    if settings:
        before["layout"] = settings.get("layout", 1)
    if differing := differences(before, vars(config)):
        raise ValueError(
            f"run_name: {config.run_path} holds a run with another recipe: "
            f"{'; '.join(differing)}. Restore these values to continue that run, or "
            "choose another run_name to start a new one."
        )


def differences(before: dict, now: dict) -> list[str]:
    """What differs among the keys of both."""
    return [
        f"{key} was {before[key]!r}, and is {value!r}"
        for key, value in now.items()
        if key in before and before[key] != value
    ]


def check_code(config: TrainingConfig, functions: tuple[Callable, ...]) -> None:
    """Refuse a run that has begun with other code; keep this code in the run's folder.

    Args:
        functions: those that decide the result. What they use counts, too, if it is
            defined beside them; comments, formatting, and docstrings don't.

    Raises:
        ValueError: with the name of what differs, and how.
    """
    path, now = config.run_path / "code.py", fingerprints.collect_code(functions)
    begun = path.exists() and checkpoints.list_folders(config)
    before = fingerprints.parse_code(path.read_text()) if begun else now
    names = [n for n in sorted({**before, **now}) if before.get(n) != now.get(n)]
    if names and not config.accept_changed_code:
        old, new = ("\n".join(x.get(n, "") for n in names) for x in (before, now))
        sides = old.split("\n"), new.split("\n"), "the run's", "this notebook's"
        lines = [*difflib.unified_diff(*sides, n=1, lineterm="")]
        raise ValueError(
            f"run_name: {config.run_path} holds a run of other code. What differs is "
            f"{', '.join(names)}:\n"
            + "\n".join(lines[:SHOWN] + ["..."] * (len(lines) > SHOWN))
            + "\nChoose another run_name to start a new run, undo the change, or set "
            "accept_changed_code: true to continue with the new code."
        )
    checkpoints.write_whole(path, "\n\n\n".join(now.values()) + "\n")


def check_tokens(config: TrainingConfig) -> None:
    """Refuse a run that has begun with other tokens; say if trainkit was edited since.

    An update of the tutorial must not end a run. Both are noted in the run's folder.

    Raises:
        ValueError: with what it began with, and what is there now.
    """
    path, known = config.run_path / "begun.json", {"tokens": {}, "modules": {}}
    if checkpoints.list_folders(config):
        known |= checkpoints.read_json(path)
    now = {
        "tokens": token_files.digest(config),
        "modules": {m.__name__: fingerprints.of_file(m.__file__) for m in DECIDING},
    }
    if other := differences(known["tokens"], now["tokens"]):
        raise ValueError(
            f"data_dir: {config.data_dir} holds other tokens than {config.run_path} began "
            f"with: {'; '.join(other)}. Bring the old files back, or choose another "
            "run_name to start a new run."
        )
    if edited := differences(known["modules"], now["modules"]):
        print(
            f"{config.run_path} continues with another trainkit: {'; '.join(edited)}. Its "
            "results may differ from here on; another run_name starts anew."
        )
    checkpoints.write_whole(path, json.dumps({k: known[k] | now[k] for k in known}))


def say_if_done(config: TrainingConfig) -> None:
    """Print that the run has nothing left to do, if that is so."""
    done = checkpoints.step_of(next(iter(checkpoints.list_saved(config)), "step_0"))
    if done >= config.max_steps:
        print(
            f"{config.run_path} has done {done:,} steps, and max_steps is "
            f"{config.max_steps:,}: nothing is trained. Set max_steps higher to continue, or "
            "choose another run_name to start anew."
        )


def check_lease(config: TrainingConfig) -> None:
    """Refuse a launch of a run that another launch has.

    Raises:
        RuntimeError: with who has it, and what to do.
    """
    found = read_lease(config)
    left = found.get("until", 0) - time.time()
    if left <= 0 or found.items() >= this_launch().items():
        return
    host, process = found["host"], found["process"]
    here = host == socket.gethostname()
    if here and (process == os.getpid() or not token_files.is_running(process)):
        return
    raise RuntimeError(
        f"run_name: process {process} on {host} trains {config.run_path}, since "
        f"{found['since']}. Wait for it, or choose another run_name. If that process is "
        f"gone, launch again in {left:.0f} s."
    )


def take_lease(config: TrainingConfig, seconds: float) -> None:
    """Take the lease for a launch, in the driver.

    Raises:
        OSError: the run's folder can't be written, with the path and the reason.
    """
    here = {"host": socket.gethostname(), "process": os.getpid()}
    since = {"since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        if not config.remote:  # an object store has no folders
            config.run_path.mkdir(parents=True, exist_ok=True)
        write_lease(config, this_launch() | here | since, seconds)
    except Exception as error:
        raise OSError(
            f"storage_path: cannot write to {config.run_path} ({error}). "
            "Choose a folder or bucket that this user may write to."
        ) from error


@contextlib.contextmanager
def hold_lease(config: TrainingConfig) -> Iterator[None]:
    """In a worker: check that the lease is this launch's. The first one renews it meanwhile.

    If all goes well, it also ends it. If not, Ray starts the workers again, and the run
    stays this launch's.

    Raises:
        RuntimeError: another launch has taken the lease, or this node has another folder.
    """
    lease = read_lease(config)
    if not lease or not is_ours(lease):
        whose = "no lease"
        if lease:
            who = f"process {lease['process']} on {lease['host']}"
            whose = f"the lease of {who}, since {lease['since']}"
        raise RuntimeError(
            f"storage_path: as this node sees it, {config.run_path} has {whose}, and not "
            "this launch's. Another launch has taken the run while this one waited, or that "
            "path is another folder on this node: then choose storage that all nodes share, "
            "or an object store."
        )
    if ray.train.get_context().get_world_rank():
        yield
        return
    over = threading.Event()

    def renew() -> None:
        while True:
            with contextlib.suppress(Exception):  # a store may fail for a while
                if not is_ours(read_lease(config)):
                    print(f"Another launch has taken {config.run_path}: this one ends.")
                    os._exit(1)  # and when Ray starts it again, it is refused
                write_lease(config, lease, RENEWED)
            if over.wait(PAUSE):
                return

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    with contextlib.suppress(Exception):
        if is_ours(read_lease(config)):
            write_lease(config, lease, 0)


def lease_path(config: TrainingConfig) -> epath.Path:
    """The lease's file."""
    return config.run_path / "lease.json"


def this_launch() -> dict:
    """This driver, or the one that this worker belongs to."""
    context = ray.get_runtime_context()
    return {"session": context.get_session_name(), "job": context.get_job_id()}


def is_ours(lease: dict) -> bool:
    """Whether a lease is this launch's, or none is there."""
    return not lease or lease.items() >= this_launch().items()


def read_lease(config: TrainingConfig) -> dict:
    """What the lease says; empty if there is none, or none that can be read."""
    lease = checkpoints.read_json(lease_path(config))
    return lease if KEYS <= lease.keys() else {}


def write_lease(config: TrainingConfig, lease: dict, seconds: float) -> None:
    """Write a lease that holds for so long from now."""
    text = json.dumps(lease | {"until": time.time() + seconds})
    checkpoints.write_whole(lease_path(config), text)


def guarded(loop: Callable[[dict], None]) -> Callable[[dict], None]:
    """`loop`, holding the run's lease, with advice if a device's memory runs out."""

    @functools.wraps(loop)
    def guarded_loop(settings: dict) -> None:
        try:
            with hold_lease(TrainingConfig(**settings)):
                loop(settings)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            size = ray.train.get_context().get_world_size()
            advice = memory_advice(TrainingConfig(**settings | {"num_workers": size}))
            print(advice)  # now: Ray keeps the error until its last attempt
            raise MemoryError(advice) from error

    return guarded_loop


def memory_advice(config: TrainingConfig) -> str:
    """Up to three keys that save memory, those that cost the least speed first."""
    changes = {
        "attention": {"gpu": "cudnn", "tpu": "splash"}.get(config.platform, "xla"),
        "device_batch_size": config.device_windows // config.micro_batches // 2,
        "loss_chunks": 2 * config.loss_chunks,
        "fsdp": config.mesh_shape(config.worker_range[1])[0] * config.fsdp,
        "scan_layers": True,
    }
    helpful = []
    for key, value in changes.items():
        # Not half a window, or a kernel that can't do this.
        with contextlib.suppress(ValueError):
            if dataclasses.replace(config, **{key: value}) != config:
                helpful.append(f"{key}: {str(value).lower()}")
    helpful = helpful[:3] or ["a higher fsdp or tensor_parallel, on more devices"]
    return (
        "A device has too little memory for this step. What helps, at the least cost of "
        f"speed first: {'; '.join(helpful)}. The run then continues. "
        "`python benchmarks/gpu_compile.py CONFIGURATION` shows what each saves, without a GPU."
    )

"""One launch of a run at a time: a lease in the run's folder says who has it.

The driver takes it for a few minutes before a launch. Then the first worker renews it, and
ends it when its loop has returned. A launch that finds another's lease is refused, unless that
one has run out, or was taken by a process of this machine that is gone.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import ray
import ray.train
from etils import epath

from trainkit import storage
from trainkit.config import TrainingConfig

LAUNCH = 300  # seconds that a launch has until its workers start
RENEWED, PAUSE = 60, 15  # seconds that a renewal holds, and between two
KEYS = {"session", "job", "host", "process", "since", "until"}


def path_of(config: TrainingConfig) -> epath.Path:
    """The lease's file."""
    return config.run_path / "lease.json"


def me() -> dict:
    """This driver, or the one that this worker belongs to."""
    context = ray.get_runtime_context()
    return {"session": context.get_session_name(), "job": context.get_job_id()}


def read(config: TrainingConfig) -> dict:
    """What the lease says; empty if there is none, or none that can be read."""
    try:
        lease = json.loads(path_of(config).read_text())
        return lease if KEYS <= lease.keys() else {}
    except (OSError, ValueError, AttributeError):
        return {}


def write(config: TrainingConfig, lease: dict, seconds: float) -> None:
    """Write a lease that holds for so long from now, whole or not at all."""
    path, text = path_of(config), json.dumps(lease | {"until": time.time() + seconds})
    if config.remote:
        path.write_text(text)
        return
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def check(config: TrainingConfig) -> None:
    """Refuse a launch of a run that another launch has.

    Raises:
        RuntimeError: with who has it, and what to do.
    """
    found, host = read(config), socket.gethostname()
    left = found.get("until", 0) - time.time()
    if left <= 0 or found.items() >= me().items():
        return
    process = found["process"]
    if found["host"] == host and process == os.getpid():
        return
    if found["host"] == host and not storage.is_running(process):
        return
    raise RuntimeError(
        f"run_name: process {process} on {found['host']} trains {config.run_path}, since "
        f"{found['since']}. Wait for it, or choose another run_name. If that process is "
        f"gone, launch again in {left:.0f} s."
    )


def take(config: TrainingConfig) -> None:
    """Take the lease for a launch, in the driver."""
    here = {"host": socket.gethostname(), "process": os.getpid()}
    since = {"since": time.strftime("%Y-%m-%d %H:%M:%S")}
    write(config, me() | here | since, LAUNCH)


@contextlib.contextmanager
def held(config: TrainingConfig) -> Iterator[None]:
    """In the first worker: renew the lease meanwhile, and end it if all goes well.

    If it doesn't, Ray starts the workers again, and the run stays this launch's.

    Raises:
        RuntimeError: another launch has taken the lease.
    """
    if ray.train.get_context().get_world_rank():
        yield
        return
    lease, over = read(config), threading.Event()
    if not lease:
        yield
        return
    if not lease.items() >= me().items():
        raise RuntimeError(
            f"run_name: process {lease['process']} on {lease['host']} has launched "
            f"{config.run_path}, since {lease['since']}, while this launch waited."
        )

    def renew() -> None:
        while True:
            with contextlib.suppress(Exception):  # a store may fail for a while
                write(config, lease, RENEWED)
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
        write(config, lease, 0)

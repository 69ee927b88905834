"""One launch of a run at a time: a lock for drivers, and a launch's mark for its workers.

The operating system frees the lock however its driver ends. It keeps out neither the workers
of a driver that was killed, nor drivers where storage has no locks, or each node its own. So
each launch leaves a random mark in the run's folder, and workers that find another one stop.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator

from filelock import FileLock, Timeout

from trainkit.config import TrainingConfig

NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP  # says a file system
joined: dict[str, str] = {}  # in a worker: its launch's mark, by the run's folder


@contextlib.contextmanager
def hold(config: TrainingConfig) -> Iterator[str]:
    """Have the run until the block ends, in the driver; gives the launch's mark.

    Raises:
        RuntimeError: another launch has it.
        OSError: the run's folder can't be written, with the path and the reason.
    """
    driver = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}"
    mark, path = f"{driver} ({secrets.token_hex(8)})", config.run_path / "launch.txt"
    lock = FileLock(f"{config.run_path}/launch.lock", 0, fallback_to_soft=False)
    try:
        if not config.remote:  # an object store has neither folders nor locks
            config.run_path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
        path.write_text(mark)
    except Timeout:
        raise RuntimeError(
            f"run_name: another launch trains {config.run_path}: {read_mark(config)}. "
            "Wait for it, end it, or choose another run_name."
        ) from None
    except Exception as error:
        lock.release()
        raise OSError(
            f"storage_path: cannot write to {config.run_path} ({error}). "
            "Choose a folder or bucket that this user may write to."
        ) from error
    try:
        yield mark
    finally:
        with contextlib.suppress(Exception):  # storage may have failed
            if read_mark(config) == mark:
                path.unlink()  # so that workers that are left over stop
        lock.release()


def read_mark(config: TrainingConfig) -> str:
    """The mark of the launch that has the run; empty if there is none."""
    try:
        return (config.run_path / "launch.txt").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def confirm(config: TrainingConfig) -> None:
    """Raise RuntimeError, with what to do, if not this worker's launch has the run."""
    mark, found = joined.get(str(config.run_path)), read_mark(config)
    if mark and found != mark:
        raise RuntimeError(
            f"storage_path: on {socket.gethostname()}, {config.run_path} belongs to "
            f"{found or 'no launch'}, and this worker to {mark}. Another launch has taken the "
            "run, and this one ends; or that path is another folder on this node: then "
            "choose storage that all nodes share, or an object store."
        )

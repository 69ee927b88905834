"""One launch of a run at a time, whoever launches it, and however it ends."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from accidents import missing, wait_for
from conftest import ROOT

from trainkit import checkpoints, lock

HOLD = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from trainkit import lock
from trainkit.config import TrainingConfig
with lock.hold(TrainingConfig(**json.loads(sys.argv[2]))) as mark:
    if os.fork() == 0:  # what a driver has started doesn't keep its lock
        print(mark, flush=True)  # once it has let go of it
        os.setsid()
        time.sleep(30)
        os._exit(0)
    sys.stdin.read()
"""
NAMESPACES = "--pid --uts --time --boottime 3600 --fork --kill-child --mount-proc"
ELSEWHERE = ["unshare", *NAMESPACES.split(), "sh", "-c"]
ELSEWHERE += ['hostname elsewhere; exec "$@"', "-"]


@contextlib.contextmanager
def holder(config, *prefix: str):
    """Another process that holds the run; gives it, and its mark or what it says instead."""
    settings = json.dumps(dataclasses.asdict(config))
    command = [*prefix, sys.executable, "-c", HOLD, str(ROOT), settings]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    pipes |= {"text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            mark = process.stdout.readline().strip()
            said = mark or process.stderr.read()
            if "unshare: " in said:
                missing(f"namespaces: {said}")
            yield process, said
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_free(config) -> bool:
    with contextlib.suppress(RuntimeError), lock.hold(config):
        return True
    return False


def join(config, mark: str) -> None:
    """Make this process a worker of the launch of a mark, as far as its run goes."""
    lock.joined[str(config.run_path)] = mark
    lock.confirm(config)


@pytest.mark.parametrize("prefix", [[], ELSEWHERE], ids=["here", "elsewhere"])
def test_one_launch_at_a_time(small, prefix):
    """In other namespaces of processes, mounts, host names, and clocks, too.

    Workers of a driver that was killed stop at the next launch.
    """
    config = small()
    with holder(config, *prefix) as (process, mark):
        words = f"run_name: another launch trains {config.run_path}: {mark}"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            with lock.hold(config):
                raise AssertionError
        join(config, mark)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        lock.confirm(config)  # no one else has the run
        wait_for(lambda: is_free(config), 60, what="the lock of a killed driver")
    with pytest.raises(RuntimeError, match="belongs to no launch"):
        lock.confirm(config)  # `is_free` had it
    with lock.hold(config) as other:
        words = f"belongs to {other}, and this worker to {mark}"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            lock.confirm(config)
        with holder(config, *prefix) as (process, said):
            assert "another launch trains" in said and f"process {os.getpid()}" in said


def test_a_launch_that_ends_in_this_process_frees_the_run(small):
    config = small()
    with contextlib.suppress(KeyboardInterrupt):
        with lock.hold(config):
            assert not is_free(config) and is_free(small(run_name="another"))
            raise KeyboardInterrupt
    assert is_free(config)
    # Nor is there a soft lock, which would judge by host names and process numbers.
    assert [path.name for path in config.run_path.iterdir()] == ["launch.lock"]


def test_a_path_that_is_another_folder_on_this_node(small, tmp_path):
    """Without a mark, or with that of a launch long ago."""
    config, there = small(), small(storage_path=str(tmp_path / "there"))
    lock.confirm(config)  # without a launch, as in a test
    with lock.hold(config) as mark:
        join(config, mark)
        for text in (None, "", "process 7 on far, since then (0123)", mark[:-1]):
            if text is not None:
                there.run_path.mkdir(parents=True, exist_ok=True)
                (there.run_path / "launch.txt").write_text(text)
            words = f"on {socket.gethostname()}, {there.run_path} .*another folder on"
            with pytest.raises(RuntimeError, match=words):
                join(there, mark)


def test_a_worker_saves_for_its_own_launch_only(small, recorded):
    config, state = small(), {"kernel": np.ones((8, 8), np.float32)}
    with lock.hold(config) as mark:
        join(config, mark)
        checkpointer = checkpoints.Checkpointer(config)
        checkpointer.save(state, 10)
        checkpointer.wait()
    with lock.hold(config), pytest.raises(RuntimeError, match="this one ends"):
        checkpointer.save(state, 20)
    assert checkpoints.list_saved(config) == ["step_00000010"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks(small, monkeypatch, number):
    """There, the mark alone decides, as where each node has locks of its own."""

    def acquire(self):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.FileLock, "acquire", acquire)
    config = small()
    with lock.hold(config) as mark:
        join(config, mark)
        with lock.hold(config) as other:
            with pytest.raises(RuntimeError, match="this one ends"):
                lock.confirm(config)
            (config.run_path / "launch.txt").write_text(mark)
        assert lock.read_mark(config) == mark != other  # it is no one else's


def test_storage_that_cannot_be_written(small, tmp_path):
    """Neither its folder nor its lock."""
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "runs/run/launch.lock").mkdir(parents=True)
    for config in (small(storage_path=str(file)), small()):
        with pytest.raises(OSError, match="storage_path: cannot write"):
            lock.hold(config).__enter__()

"""Whether a launch may go on, and what helps when memory runs out."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import ray
import ray.train
from accidents import at_step, in_the_background, log_of, wait_for

import trainkit.config
import trainkit.launch
import trainkit.run_log

ROOT = Path(__file__).resolve().parent.parent
PAUSE = trainkit.launch.PAUSE
ELSEWHERE = {"session": "s", "job": "j", "host": "far", "process": 7, "since": "today"}


@pytest.fixture
def config(small, monkeypatch):
    """A configuration with a run's folder, in a driver of Ray's job 2."""
    context = SimpleNamespace(
        get_session_name=lambda: "session_1", get_job_id=lambda: "02"
    )
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    config = small()
    config.run_path.mkdir(parents=True)
    return config


@pytest.mark.parametrize(
    "change, seconds, refused",
    [
        ({}, 60, True),
        ({}, 0, False),  # it has run out
        ({"host": "here", "process": "ended"}, 60, False),
        ({"host": "here", "process": "other"}, 60, True),
        ({"host": "here", "process": "this"}, 60, False),  # a cell that runs again
    ],
)
def test_who_may_launch(config, monkeypatch, change, seconds, refused):
    monkeypatch.setattr(trainkit.launch.socket, "gethostname", lambda: "here")
    ended = subprocess.Popen(["true"])
    ended.wait()
    processes = {"ended": ended.pid, "other": os.getppid(), "this": os.getpid()}
    lease = ELSEWHERE | change
    lease["process"] = processes.get(lease["process"], lease["process"])
    trainkit.launch.write_lease(config, lease, seconds)
    if not refused:
        trainkit.launch.check(config)
        assert trainkit.launch.read_lease(config)["process"] == os.getpid()
        return
    words = (
        f"run_name: process {lease['process']} on {lease['host']} trains .*since today"
    )
    with pytest.raises(RuntimeError, match=words):
        trainkit.launch.check(config)
    assert trainkit.launch.read_lease(config).items() >= lease.items()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"until": 9e99}'])
def test_lease_that_cannot_be_read_holds_nothing(config, text):
    trainkit.launch.lease_path(config).write_text(text)
    trainkit.launch.check_lease(config)


@pytest.fixture
def worker(monkeypatch):
    """This process as the first worker."""
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(trainkit.launch, "PAUSE", 0.05)


def test_first_worker_renews_and_ends_it(config, worker):
    trainkit.launch.take_lease(config, 60)
    with trainkit.launch.hold_lease(config):
        seen = set()
        wait_for(
            lambda: (
                seen.add(trainkit.launch.read_lease(config)["until"]) or len(seen) > 2
            ),
            what="three renewals",
        )
    assert trainkit.launch.read_lease(config)["until"] <= time.time()


def test_a_worker_whose_lease_was_taken_ends(config, worker, monkeypatch):
    """After a minute without storage, another launch may have the run."""
    codes = []
    monkeypatch.setattr(trainkit.launch.os, "_exit", codes.append)
    trainkit.launch.take_lease(config, 60)
    with trainkit.launch.hold_lease(config):
        monkeypatch.setattr(trainkit.launch, "RENEWED", 1)  # should it write once more
        theirs = ELSEWHERE | {"job": "another"}
        while not codes:
            trainkit.launch.write_lease(config, theirs, 60)
            time.sleep(0.02)
    assert codes[0] == 1


def test_lease_of_a_loop_that_fails_stays(config, worker):
    """Ray starts it again."""
    trainkit.launch.take_lease(config, 60)
    with pytest.raises(OSError):
        with trainkit.launch.hold_lease(config):
            raise OSError
    assert trainkit.launch.read_lease(config)["until"] > time.time() + 30


def test_worker_of_a_launch_that_waited_too_long_is_refused(config, worker):
    trainkit.launch.write_lease(config, ELSEWHERE, 60)
    with pytest.raises(
        RuntimeError, match="has the lease of process 7 on far, .* waited"
    ):
        with trainkit.launch.hold_lease(config):
            raise AssertionError
    assert trainkit.launch.read_lease(config)["process"] == 7


def test_worker_that_sees_another_folder_is_refused(config, worker):
    for text in (None, "", json.dumps(ELSEWHERE | {"until": 0})):
        if text is not None:
            trainkit.launch.lease_path(config).write_text(text)
        with pytest.raises(RuntimeError, match="another folder on this node"):
            with trainkit.launch.hold_lease(config):
                raise AssertionError
    trainkit.launch.take_lease(config, 0)
    with trainkit.launch.hold_lease(config):
        pass


def test_storage_that_cannot_be_written(small, config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="storage_path: cannot write"):
        trainkit.launch.take_lease(small(storage_path=str(tmp_path / "file")), 60)


def test_a_lease_names_the_launch(config, monkeypatch):
    """Its job and process, and the five minutes that it has until its workers start."""
    monkeypatch.setattr(trainkit.launch.time, "time", lambda: 1_000.0)
    trainkit.launch.check(config)
    lease = trainkit.launch.read_lease(config)
    assert lease.pop("since")[:2] == "20"
    assert lease == {
        "session": "session_1",
        "job": "02",
        "host": trainkit.launch.socket.gethostname(),
        "process": os.getpid(),
        "until": 1_300.0,
    }
    trainkit.launch.check(config)  # its own lease is no hindrance
    theirs = lease | {"host": "far", "job": "03", "since": "today"}
    trainkit.launch.write_lease(config, theirs, 60)
    with pytest.raises(RuntimeError, match="on far trains .* launch again in 60 s"):
        trainkit.launch.check(config)
    monkeypatch.setattr(trainkit.launch.time, "time", lambda: 1_060.0)
    trainkit.launch.check(config)


def test_other_workers_leave_the_lease_alone(config, worker, monkeypatch):
    trainkit.launch.take_lease(config, 60)
    path = trainkit.launch.lease_path(config)
    before = path.read_text()
    context = SimpleNamespace(get_world_rank=lambda: 1)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    with trainkit.launch.hold_lease(config):
        time.sleep(0.2)
    assert path.read_text() == before


def test_a_lease_is_renewed_for_a_minute_at_a_time(config, worker, monkeypatch):
    written = []
    monkeypatch.setattr(trainkit.launch, "write_lease", lambda *x: written.append(x[2]))
    trainkit.launch.lease_path(config).write_text(
        json.dumps(ELSEWHERE | trainkit.launch.this_launch() | {"until": 1})
    )
    with trainkit.launch.hold_lease(config):
        wait_for(lambda: len(written) > 1, what="a renewal")
    assert set(written[:-1]) == {60} and written[-1] == 0
    assert (trainkit.launch.LAUNCH, PAUSE) == (300, 15)  # a renewal may fail thrice


def test_a_device_without_memory_gets_advice_and_other_errors_pass(
    config, worker, capsys
):
    def loop(settings):
        assert settings["n_embd"] == 32
        raise jax.errors.JaxRuntimeError(said)

    guarded = trainkit.launch.guarded(loop)
    said = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
    settings = dataclasses.asdict(dataclasses.replace(config, num_workers=(1, 2)))
    trainkit.launch.take_lease(config, 60)
    with pytest.raises(MemoryError, match="too little memory.*device_batch_size: 1;"):
        guarded(settings)  # of four windows on two workers, a device has two
    assert "too little memory" in capsys.readouterr().out
    said = "INTERNAL: another process died"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another process died"):
        guarded(settings)
    assert guarded.__name__ == "loop"


def test_a_launch_with_other_tokens_is_refused(config, write_bins):
    write_bins(config)
    trainkit.launch.check(config)
    (config.run_path / "step_00000002").mkdir()
    trainkit.launch.check(config)
    write_bins(config, seed=1)
    with pytest.raises(ValueError, match="data_dir: .* holds other tokens than"):
        trainkit.launch.check(config)


def test_long_differences_are_cut_off(config, tutorial):
    """Twelve lines of what differs, and dots."""
    functions = tutorial.train_step, tutorial.loss_fn
    trainkit.launch.check_code(config, functions)
    (config.run_path / "step_00000002").mkdir()
    code = config.run_path / "code.py"
    text = code.read_text()
    code.write_text(text + "\n\n\ndef gone():\n" + "    x = 1\n" * 20)
    with pytest.raises(ValueError, match="What differs is gone:") as error:
        trainkit.launch.check_code(config, functions)
    lines = str(error.value).splitlines()
    assert lines[1:3] == ["--- the run's", "+++ this notebook's"]
    assert len(lines) == 1 + 12 + 1 + 1 and lines[13] == "..."
    code.write_text(text + "\n\n\ndef gone():\n" + "    x = 1\n" * 3)
    with pytest.raises(ValueError, match="What differs is gone:") as error:
        trainkit.launch.check_code(config, functions)
    assert "..." not in str(error.value)


SECOND = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/ci"]
import ray
from notebook_module import load_notebook
ray.init(sys.argv[2], log_to_driver=False)
tutorial = load_notebook()
tutorial.make_trainer(tutorial.TrainingConfig(**json.loads(sys.argv[3]))).fit()
"""


@pytest.mark.slow
def test_second_launch_is_refused_and_the_first_undisturbed(
    tutorial, cluster, small, write_bins
):
    config = write_bins(small(max_steps=8, log_interval=1))
    settings = json.dumps(vars(config))
    address = ray.get_runtime_context().gcs_address
    config.run_path.mkdir(parents=True)
    train_loop, may_go_on = tutorial.train_loop_per_worker, config.run_path / "go"

    def loop(settings):
        add = trainkit.run_log.RunLog.add

        def wait_at_step_5(self, step, metrics):
            while step == 5 and not may_go_on.exists():
                time.sleep(0.1)
            add(self, step, metrics)

        trainkit.run_log.RunLog.add = wait_at_step_5
        try:
            train_loop(settings)
        finally:
            trainkit.run_log.RunLog.add = add

    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(lambda: at_step(4)(config), what="step 4")
        second = subprocess.run(
            [sys.executable, "-c", SECOND, ROOT, address, settings],
            capture_output=True,
            text=True,
            timeout=120,
        )
        may_go_on.touch()
        assert result().error is None
    words = f"run_name: process {os.getpid()} on"
    assert second.returncode and words in second.stderr.splitlines()[-1]
    assert [line["step"] for line in log_of(config)] == list(range(1, 9))
    assert trainkit.launch.read_lease(config)["until"] <= time.time()


def test_a_diverged_run_is_not_started_again(cluster, small):
    """Until a person says so, by deleting the note."""
    config = small()
    trainkit.launch.check(config)
    nan = {1: {"loss": 3.0, "grad_norm": 1.0}, 2: {"loss": 3.0, "grad_norm": math.nan}}
    assert trainkit.run_log.has_diverged(config, nan)
    with pytest.raises(FloatingPointError, match="at step 2.*nan.*none yet.*delete"):
        trainkit.launch.check(config)
    (config.run_path / "diverged.txt").unlink()
    trainkit.launch.check(config)


def test_keys_that_help_are_named_and_can_be_set():
    """In order, each as it could stand in the file."""

    def keys(**changes):
        config = trainkit.config.load_config(ROOT / "configs/gpt2-124m.yaml", **changes)
        said = trainkit.launch.memory_advice(config)
        return said.partition("first: ")[2].partition(". The run")[0].split("; ")

    assert keys(num_workers=8) == ["device_batch_size: 15", "loss_chunks: 4", "fsdp: 8"]
    alone = keys(num_workers=1, attention="xla", device_batch_size=1)
    assert alone == ["attention: cudnn", "loss_chunks: 4", "scan_layers: true"]
    least = {"num_workers": 1, "device_batch_size": 1, "loss_chunks": 1_024}
    assert keys(**least, scan_layers=True) == [
        "a higher fsdp or tensor_parallel, on more devices"
    ]


def test_worker_that_runs_out_of_memory_says_what_helps(tutorial, cluster, small):
    """Memory that no machine has; XLA raises what it raises on a GPU."""

    def loop(settings):
        jax.block_until_ready(jax.numpy.zeros(2**44))

    config = small(max_failures=0)
    with pytest.raises(ray.train.TrainingFailedError) as error:
        tutorial.make_trainer(config, loop).fit()
    for words in (
        "Out of memory allocating",
        "too little memory",
        "device_batch_size: 2",
    ):
        assert words in str(error.value)


def unchanged(x):
    return x


@pytest.mark.parametrize("lines, is_cut", [(7, False), (8, True)])
def test_of_a_long_difference_twelve_lines_are_shown(small, lines, is_cut):
    """Three that head it, what surrounds it, and the lines themselves."""
    config = small()
    (config.run_path / "step_00000002").mkdir(parents=True)
    old = "".join(f"    x += {i}\n" for i in range(lines))
    (config.run_path / "code.py").write_text(f"def unchanged(x):\n{old}    return x\n")
    with pytest.raises(ValueError, match="What differs is unchanged:") as error:
        trainkit.launch.check_code(config, (unchanged,))
    shown = str(error.value).partition("unchanged:\n")[2].partition("\nChoose")[0]
    assert len(shown.splitlines()) == 12 + is_cut
    assert shown.endswith("\n...") == is_cut

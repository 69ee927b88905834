"""What only some machines have: buckets, plugins, full processors, nodes that go away."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
import ray.data
import ray.train
from accidents import assert_equal_runs, in_the_background, last_step, lose, wait_for
from conftest import read_arrays, start_ray, stop_ray
from ray.cluster_utils import Cluster

import trainkit.checkpoints
import trainkit.config
import trainkit.run_log
import trainkit.token_files
import trainkit.workers

ROOT = Path(__file__).resolve().parent.parent


# Libraries and flags.


@pytest.mark.parametrize("layout", ["cublas/lib/lib{}.so.12", "cu13/lib/lib{}.so.13"])
def test_pips_cuda_comes_before_the_nodes(tmp_path, monkeypatch, layout):
    """What a library needs is then there already; as a stand-in, one of numpy's."""
    paths = [
        tmp_path / "nvidia" / layout.format(name)
        for name in ("nvJitLink", "cublasLt", "cudnn_graph", "cudart")
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(np.random.bit_generator.__file__, path)
    (tmp_path / "nvidia/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    trainkit.workers.load_cuda_libraries()
    mapped = Path("/proc/self/maps").read_text()
    assert [str(path) in mapped for path in paths] == [True, True, True, False]


def test_a_worker_has_its_nodes_library_path(cluster, small):
    """Where the plugins for the network are; a node here has none that is its own."""
    name, variables = (
        "LD_LIBRARY_PATH",
        trainkit.workers.environment(small(platform="gpu")),
    )

    @ray.remote(runtime_env={"env_vars": {name: variables[name]}})
    def found():
        return os.environ[name].split(":")

    nodes = os.environ.get(name, "").split(":")
    assert ray.get(found.remote()) == [*nodes, "/usr/local/nvidia/lib64"]


def test_your_xla_flags_stay(small, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # one of yours adds a flag
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=there")
    cpu = trainkit.workers.environment(small(devices_per_worker=4))["XLA_FLAGS"]
    assert cpu == "--xla_dump_to=there --xla_force_host_platform_device_count=4"
    gpu = trainkit.workers.environment(small(platform="gpu"))["XLA_FLAGS"]
    ours = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
    assert gpu == f"{ours} --xla_dump_to=there"  # last wins
    monkeypatch.delenv("XLA_FLAGS")
    tpu = trainkit.workers.environment(small(platform="tpu"))
    assert "XLA_FLAGS" not in tpu


def test_windows_is_refused_in_a_sentence():
    script = "import importlib.metadata, sys; sys.platform = 'win32'; import trainkit"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "runs on Linux and macOS, found 'win32'" in result.stderr


# Threads that write checkpoints.


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_only_a_cpu_saves_at_idle_priority(small, tmp_path, monkeypatch, backend):
    """Elsewhere, tasks that fill the node would hold up the loop."""
    config = small()
    orbax = trainkit.checkpoints.create_orbax(config)
    policies, save = [], orbax.save

    def noting_save(*arguments, **options):
        policies.append(os.sched_getscheduler(0))
        return save(*arguments, **options)

    monkeypatch.setattr(orbax, "save", noting_save)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    state = {"kernel": np.ones(8)}
    trainkit.checkpoints.save_in_background(orbax, tmp_path / "step", state)
    orbax.wait_until_finished()
    assert policies == [os.SCHED_IDLE if backend == "cpu" else os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


# An object store, played by a folder: each worker stages its part and uploads it.


@pytest.fixture
def bucket(small, monkeypatch, tmp_path):
    """A configuration whose storage counts as an object store."""

    config = small()
    config.run_path.mkdir(parents=True)
    monkeypatch.setattr(trainkit.config.TrainingConfig, "remote", True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return config


STATE = {"kernel": np.ones((8, 8), np.float32)}


def test_parts_add_up_to_a_checkpoint_when_all_are_there(bucket):
    checkpointer = trainkit.checkpoints.Checkpointer(bucket)
    checkpointer.save(STATE, 10)
    checkpointer.wait()
    assert trainkit.checkpoints.list_saved(bucket) == ["step_00000010"]
    assert list(Path(tempfile.tempdir).rglob("step_*")) == []
    (kernel,) = read_arrays(bucket.run_path / "step_00000010")
    np.testing.assert_array_equal(kernel, STATE["kernel"])

    name = "step_00000020"
    (bucket.run_path / name).mkdir()
    trainkit.checkpoints.mark(bucket, name, 0, 2).write_text("")
    trainkit.checkpoints.mark(bucket, name, 0, 1).with_name("part-1-of-3").write_text(
        ""
    )
    assert trainkit.checkpoints.list_saved(bucket) == ["step_00000010"]
    trainkit.checkpoints.mark(bucket, name, 1, 2).write_text("")
    assert trainkit.checkpoints.list_saved(bucket)[0] == name


def test_what_is_left_of_a_part_goes_before_it_is_written_anew(bucket):
    left = bucket.run_path / "step_00000010" / "left"
    left.parent.mkdir()
    left.write_text("of a worker that was killed")
    trainkit.checkpoints.mark(bucket, "step_00000010", 1, 2).write_text("")
    checkpointer = trainkit.checkpoints.Checkpointer(bucket)
    checkpointer.save(STATE, 10)
    checkpointer.wait()
    marks = [path.name for path in left.parent.glob("part-*")]
    assert not left.exists() and marks == ["part-0-of-1"]


def test_upload_is_tried_again(bucket, monkeypatch, capsys):
    monkeypatch.setattr(trainkit.checkpoints.time, "sleep", lambda seconds: None)
    copy, attempts = trainkit.checkpoints.upload, []

    def upload(*arguments):
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("AWS Error SLOW_DOWN")
        copy(*arguments)

    monkeypatch.setattr(trainkit.checkpoints, "upload", upload)
    checkpointer = trainkit.checkpoints.Checkpointer(bucket)
    checkpointer.save(STATE, 10)
    checkpointer.wait()
    assert trainkit.checkpoints.list_saved(bucket) == ["step_00000010"]
    assert "SLOW_DOWN" in capsys.readouterr().out


def test_wait_waits_for_the_upload(bucket, monkeypatch):
    """So that the watchdog covers it, after the last step, too."""
    monkeypatch.setattr(trainkit.checkpoints, "PAUSES", ())

    def upload(*_):
        raise OSError("gone")

    monkeypatch.setattr(trainkit.checkpoints, "upload", upload)
    checkpointer = trainkit.checkpoints.Checkpointer(bucket)
    checkpointer.save(STATE, 10)
    with pytest.raises(OSError, match="gone"):
        checkpointer.wait()


def test_what_a_killed_worker_staged_is_removed(bucket, monkeypatch):
    """Whatever its rank was; those of other runs, users, and stores stay."""
    mine = trainkit.checkpoints.staging(bucket)
    other_run = mine.with_name(f"{bucket.run_name}-2")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12_345)
        other_user = trainkit.checkpoints.staging(bucket)
    elsewhere = dataclasses.replace(bucket, storage_path="s3://another-bucket/runs")
    other_store = trainkit.checkpoints.staging(elsewhere)
    assert Path(tempfile.tempdir) in mine.parents
    others = [other_run, other_user, other_store]
    for folder in (mine, *others):
        for rank in ("0", "7"):
            (folder / rank / "step_00000010").mkdir(parents=True)
    trainkit.checkpoints.Checkpointer(bucket)
    assert not mine.exists()
    assert all((other / "7" / "step_00000010").exists() for other in others)


def test_listings_of_buckets_are_not_kept():
    for protocol in ("s3", "gs", "gcs"):
        assert fsspec.config.conf[protocol]["use_listings_cache"] is False


def test_lines_of_the_log_that_cannot_be_read_are_dropped(small):
    config = small()
    config.run_path.mkdir(parents=True)
    path = config.run_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1}\n\0\0\0\n{"step": 2}\n[]\n{"step": 3}\n{"step": 4, "lo'
    )
    trainkit.run_log.LogFile(config, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


# A node that goes away while a checkpoint is written.


@pytest.fixture
def three_nodes():
    """Room for a worker and its data tasks on each; one is to spare."""
    stop_ray()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    start_ray(cluster.address)  # on the head, which stays
    for _ in range(2):
        cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    yield cluster
    stop_ray()
    cluster.shutdown()


def loop_that_notes_its_node(tutorial, config):
    train_loop, folder = tutorial.train_loop_per_worker, config.run_path

    def loop(settings):
        rank = ray.train.get_context().get_world_rank()
        node = ray.get_runtime_context().get_node_id()
        (folder / f"node-{rank}").write_text(node)
        train_loop(settings)

    return loop


@pytest.mark.slow
@pytest.mark.extra
def test_node_is_lost_while_a_checkpoint_is_written(tutorial, reference, three_nodes):
    config = dataclasses.replace(reference, run_name="spare", cpus_per_worker=2.0)
    loop = loop_that_notes_its_node(tutorial, config)

    def writing() -> bool:
        return last_step(config) >= 44 and any(config.run_path.glob("*tmp*"))

    with in_the_background(tutorial.make_trainer(config, loop).fit) as result:
        wait_for(writing, pause=0.002, what="a checkpoint that is being written")
        used = [(config.run_path / f"node-{rank}").read_text() for rank in range(2)]
        lost = [node for node in three_nodes.worker_nodes if node.node_id in used]
        lose(three_nodes, lost[0])
        assert result().error is None
    assert_equal_runs(config, reference)

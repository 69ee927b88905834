"""Which devices a worker gets: GPUs that Ray assigned, simulated here, and several each."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import ray.train
from accidents import log_of, losses_of_one_process, wait_for

import trainkit.workers

ROOT = Path(__file__).resolve().parent.parent


def test_missing_resources_are_named(cluster, small):
    config = small(num_workers=2, devices_per_worker=4, platform="gpu", batch_size=8)
    with pytest.raises(RuntimeError, match=r"'GPU': 8.*'GPU': 2"):
        trainkit.workers.check_resources(config)
    trainkit.workers.check_resources(dataclasses.replace(config, autoscaling=True))
    trainkit.workers.check_resources(small(num_workers=2))
    with pytest.raises(
        RuntimeError, match=r"a CPU for Ray Data .*'CPU': 4.5.*'CPU': 4"
    ):
        trainkit.workers.check_resources(small(num_workers=7, batch_size=14))


@ray.remote(num_cpus=3)
class Other:
    def ready(self):
        return True


def test_resources_that_others_use_are_named(cluster, small, capsys):
    config = small(num_workers=2)
    other = Other.remote()
    try:
        assert ray.get(other.ready.remote())
        wait_for(lambda: ray.available_resources().get("CPU", 0) <= 1, what="the actor")
        trainkit.workers.check_resources(config)
        said = capsys.readouterr().out
        assert re.search(r"needs 2 CPUs, and [\d.]+ of 4 are free: others use", said)
    finally:
        ray.kill(other)


@pytest.mark.slow
@pytest.mark.extra
def test_two_workers_with_four_devices_each(tutorial, cluster, small, write_bins):
    """Data, FSDP, and tensor parallelism at once; then on another mesh."""
    config = write_bins(
        small(num_workers=2, devices_per_worker=4, batch_size=8, max_steps=10)
    )
    result = tutorial.make_trainer(config).fit()
    assert result.error is None and result.metrics["step"] == 10
    alone = dataclasses.replace(config, devices_per_worker=1)
    losses = losses_of_one_process(tutorial, dataclasses.replace(alone, max_steps=15))
    np.testing.assert_allclose(
        [x["loss"] for x in log_of(config)], losses[:10], atol=1e-4
    )

    # Written by 8 devices in parallel on the data, restored by 4 that divide the model.
    other = dataclasses.replace(config, num_workers=1, fsdp=4, max_steps=15)
    assert other.mesh_shape(1) == (1, 4, 1)
    assert tutorial.make_trainer(other).fit().error is None
    np.testing.assert_allclose([x["loss"] for x in log_of(config)], losses, atol=1e-4)


def test_workers_are_as_many_as_the_cluster_has_room_for(cluster, small, capsys):
    def complete(**changes):
        return trainkit.workers.with_num_workers(
            small(platform="gpu", **changes)
        ).num_workers

    assert complete() == 2 and complete(num_workers=1) == 1
    assert complete(devices_per_worker=2) == 1
    assert not capsys.readouterr().out
    assert complete(batch_size=3) == 1
    assert "1 workers of 2" in capsys.readouterr().out
    assert complete(fsdp=2) == 2  # which one worker can't form
    with pytest.raises(ValueError, match="fsdp"):
        complete(fsdp=4)
    with pytest.raises(RuntimeError, match="platform: gpu needs 3 GPUs or more, 3 on"):
        complete(devices_per_worker=3)
    with pytest.raises(RuntimeError, match="room for 0 workers"):
        complete(accelerator_type="H100")
    assert trainkit.workers.with_num_workers(small()).num_workers == 1  # on CPUs


def loop_with_played_gpus(tutorial, config):
    """The notebook's loop on workers whose GPUs are CPUs that JAX takes for CUDA's.

    Each notes which GPUs it would see: CUDA decides when JAX first asks for a device.
    """
    train_loop = tutorial.train_loop_per_worker

    def loop(settings):
        from jax._src import hardware_utils, xla_bridge

        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # by Ray's backend, on all
        rank = ray.train.get_context().get_world_rank()

        def start_cuda():
            seen = os.environ["CUDA_VISIBLE_DEVICES"]
            (config.run_path / f"gpus-{rank}").write_text(seen)
            return xla_bridge.make_cpu_client()

        hardware_utils.has_visible_nvidia_gpu = lambda: True
        xla_bridge.register_backend_factory("cuda", start_cuda, priority=500)
        train_loop(settings)

    return loop


@pytest.mark.slow
def test_two_workers_of_a_node_take_two_gpus(tutorial, cluster, small, write_bins):
    """Before the first of them asks JAX for a device."""
    config = write_bins(small(platform="gpu", max_steps=3))  # as many as there are GPUs
    tutorial.make_trainer(config, loop_with_played_gpus(tutorial, config)).fit()
    seen = {(config.run_path / f"gpus-{rank}").read_text() for rank in range(2)}
    assert seen == {"0", "1"}


PLUGIN = """
import pathlib
from jax._src import xla_bridge

def claim():
    pathlib.Path("claimed").touch()
    raise RuntimeError("this accelerator is only played")

def initialize():
    xla_bridge.register_backend_factory("played", claim, priority=500)
"""


DRIVER = """
import os, sys
sys.path[:0] = sys.argv[1], sys.argv[1] + "/ci"
from notebook_module import code_cells, load_notebook
if sys.argv[2] == "as the notebook does":
    exec(code_cells()[0].source)
import jax
if sys.argv[2] == "as the notebook does":
    tutorial = load_notebook()
    demo = tutorial.TrainingConfig(n_layer=1, n_embd=12, vocab_size=99, block_size=8)
    tutorial.create_state(demo)
print(jax.devices())
"""


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [False, True])
def test_driver_leaves_accelerators_to_the_workers(tmp_path, claimed):
    """On a machine with a JAX plugin for an accelerator, which notes who claims it."""
    plugin = tmp_path / "jax_plugins/played"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    (tmp_path / "trainkit").symlink_to(ROOT / "trainkit")  # as beside the notebook
    how = "plain JAX" if claimed else "as the notebook does"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    subprocess.run(
        [sys.executable, "-c", DRIVER, ROOT, how],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=120,
    )
    assert (tmp_path / "claimed").exists() == claimed


@pytest.mark.parametrize("platform, jax_name", trainkit.workers.PLATFORMS.items())
def test_environment_of_a_worker(small, tmp_path, monkeypatch, platform, jax_name):
    """JAX reads it when it is imported, so it must be there before."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    config = small(platform=platform, devices_per_worker=2)
    found = trainkit.workers.environment(config)
    assert found["JAX_PLATFORMS"] == jax_name
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "runs/jax-cache")
    flags = {
        "cpu": "--xla_force_host_platform_device_count=2",
        "gpu": "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0",
    }
    assert found.get("XLA_FLAGS") == flags.get(platform)
    assert ("LD_LIBRARY_PATH" in found) == (platform == "gpu")
    remote = dataclasses.replace(config, storage_path="s3://bucket/runs")
    cache = trainkit.workers.environment(remote)["JAX_COMPILATION_CACHE_DIR"]
    assert cache == str(tmp_path / "data/jax-cache")  # which all nodes share, too
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    found = trainkit.workers.environment(config)
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"
    alone = "--xla_gpu_shard_autotuning=false" in found.get("XLA_FLAGS", "")
    assert alone == (platform == "gpu")


def test_workers_that_do_not_see_one_another_are_refused(small, monkeypatch):
    """Each would train a model of its own."""
    context = SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    with pytest.raises(RuntimeError, match="JAX sees 1 of 2 workers"):
        trainkit.workers.start_worker(dataclasses.asdict(small()))


@pytest.mark.parametrize("capability", ["7.0", "7.5", "8.0", "8.9", "10.0", "12.1"])
def test_gpus_that_lack_bfloat16_are_refused(capability):
    """A T4, as on Colab and Kaggle, has 7.5."""
    gpu = SimpleNamespace(device_kind="Tesla T4", compute_capability=capability)
    check = trainkit.workers.check_generation
    stories = trainkit.config.load_config(ROOT / "configs/stories.yaml")
    advised = {"compute_dtype": "float32", "attention": "xla", "device_batch_size": 4}
    if capability[0] != "7":
        return check(stories, gpu)
    with pytest.raises(
        RuntimeError, match=f"found Tesla T4 with {capability}"
    ) as error:
        check(stories, gpu)
    for key, value in advised.items():
        assert f"{key}: {value}" in str(error.value)
    other = dataclasses.replace(stories, **advised, num_workers=1)
    check(other, gpu)


def test_address_of_a_cluster_that_is_gone(monkeypatch):
    """In seconds; Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        for address in ("", "auto", "local", f"{host}:{port}", f"ray://{host}:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            trainkit.check_address()
    for address in (f"{host}:{port}", f"ray://{host}:{port}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(
            ConnectionError, match=f"RAY_ADDRESS is '{address}', and no"
        ):
            trainkit.check_address()


def test_batch_sizes_that_divide_badly_are_named(small):
    """518 windows on 14 devices are 37 each, a prime number."""
    machine = {"device_batch_size": 32, "num_workers": 14}
    said = trainkit.workers.better_batch_sizes(small(batch_size=518, **machine))
    assert "37 windows for each device" in said and "37 parts of 1" in said
    assert "batch_size: 504 or 532 would take 2" in said
    for good in (448, 504, 532, 14, 28):
        assert not trainkit.workers.better_batch_sizes(
            small(batch_size=good, **machine)
        )


def test_watchdog_watches_the_workers_join_as_well(tutorial, small, monkeypatch):
    """The first communication, in which a bad network hangs, is there."""
    watched = []
    monkeypatch.setattr(trainkit.workers, "Watchdog", watched.append)

    def join(settings):
        raise TimeoutError(watched[0])

    monkeypatch.setattr(trainkit.workers, "start_worker", join)
    with pytest.raises(TimeoutError, match="12.5"):
        tutorial.train_loop_per_worker(dataclasses.asdict(small(stall_timeout_s=12.5)))


def test_workers_that_leave_no_cpu_to_ray_data_say_so(cluster, small, capsys):
    """As after a node was lost: the run would stand still, and no one know why."""
    total = ray.cluster_resources()["CPU"]
    for left, said in ((0.5, True), (1, False)):
        each = (total - left) / 2
        config = small(num_workers=2, cpus_per_worker=each)
        trainkit.workers.say_if_no_cpu_is_left(config)
        text = f"2 workers take {total - left:g} of the cluster's {total:g} CPUs"
        assert (text in capsys.readouterr().out) == said


# A cluster that is only described.


@pytest.fixture
def nodes(monkeypatch):
    """A function that lets Ray list these nodes, resources each; a dead one is a string."""

    def let(*resources, free: dict | None = None):
        alive = [each for each in resources if isinstance(each, dict)]
        listed = [{"Alive": True, "Resources": each} for each in alive]
        gone = {"Alive": False, "Resources": {"CPU": 64, "GPU": 64, "TPU": 64}}
        listed += [gone] * (len(resources) - len(alive))
        total = {k: sum(x.get(k, 0) for x in alive) for x in alive for k in x}
        monkeypatch.setattr(ray, "nodes", lambda: listed)
        monkeypatch.setattr(ray, "cluster_resources", lambda: total)
        monkeypatch.setattr(ray, "available_resources", lambda: total | (free or {}))

    return let


def gpus(n, kind="H100", cpus=32) -> dict:
    return {"CPU": cpus, "GPU": n, f"accelerator_type:{kind}": 1}


@pytest.mark.parametrize(
    "each, room", [(1, 20), (2, 10), (3, 5), (4, 5), (5, 2), (8, 2), (9, 0)]
)
def test_a_worker_never_spans_two_nodes(nodes, small, each, room):
    """Of 8, 8, and 4 GPUs; a node that is gone has none."""
    nodes(gpus(8), gpus(8), {"CPU": 8}, gpus(4, "A100"), "gone")
    config = small(platform="gpu", devices_per_worker=each)
    assert trainkit.workers.count_room(config) == room
    kind = dataclasses.replace(config, accelerator_type="A100")
    assert trainkit.workers.count_room(kind) == 4 // each


def test_as_many_workers_as_share_a_batch(nodes, small, capsys):
    nodes(gpus(8), gpus(8), gpus(4))

    def complete(**changes):
        config = small(**{"platform": "gpu", "batch_size": 64} | changes)
        return trainkit.workers.with_num_workers(config).num_workers

    assert complete(devices_per_worker=8) == 2
    assert not capsys.readouterr().out
    assert complete() == 16  # of 20; 17 to 20 don't divide 64
    assert "16 workers of 20 that the cluster has room for" in capsys.readouterr().out
    assert complete(num_workers=3, batch_size=3) == 3  # which the user has set
    assert complete(num_workers=(2, 4), batch_size=12) == (2, 4)
    assert complete(platform="cpu") == 1
    with pytest.raises(ValueError, match="20.*does not divide evenly over 20|fsdp"):
        complete(fsdp=32)
    with pytest.raises(RuntimeError, match="9 GPUs or more, 9 on a node.*for 0 work"):
        complete(devices_per_worker=9)


def tpus(n) -> dict:
    return {"CPU": 100, "TPU": n, "accelerator_type:TPU-V6E": 1}


SLICE = {"platform": "tpu", "topology": "4x4", "accelerator_type": "TPU-V6E"}
SLICE |= {"devices_per_worker": 4, "batch_size": 64}


def test_workers_of_slices_are_whole_slices(nodes, small, capsys):
    nodes(*[tpus(4)] * 9)

    def complete(**changes):
        return trainkit.workers.with_num_workers(small(**SLICE | changes)).num_workers

    assert complete() == 8
    assert "8 workers of 9" in capsys.readouterr().out
    assert complete(topology="2x4") == 8
    alone = {"topology": None, "accelerator_type": None}
    assert complete(**alone) == 1  # a host by itself, though there are nine
    nodes(tpus(4), tpus(4), tpus(4))
    with pytest.raises(RuntimeError, match="needs 16 TPUs or more, 4 on a") as error:
        complete()
    assert "has room for 3 workers" in str(error.value)
    assert "topology: null, accelerator_type: null" in str(error.value)
    assert "devices_per_worker: 4." in str(error.value)
    nodes({"CPU": 4})
    with pytest.raises(RuntimeError, match="room for 0 workers") as error:
        complete()
    assert "topology: null" not in str(error.value)  # there is no TPU host


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"num_workers": 3, "batch_size": 6, "cpus_per_worker": 2.5},
            (3, False, False, {"CPU": 2.5}),
        ),
        (
            {"platform": "gpu", "num_workers": 2, "devices_per_worker": 8}
            | {"cpus_per_worker": 12.0, "batch_size": 16},
            (2, True, False, {"CPU": 12.0, "GPU": 8}),
        ),
        (SLICE | {"num_workers": 8}, (8, False, True, {"TPU": 4})),
    ],
)
def test_request_to_ray(tutorial, small, changes, expected):
    config = small(**changes)
    found = tutorial.make_trainer(config).scaling_config
    request = (
        found.num_workers,
        found.use_gpu,
        found.use_tpu,
        found.resources_per_worker,
    )
    assert request == expected
    assert found.topology == config.topology
    assert found.accelerator_type == config.accelerator_type


def test_resources_of_several_nodes(nodes, small, capsys):
    """Two workers with 8 GPUs and 12 CPUs each, and a CPU for Ray Data."""
    config = small(platform="gpu", num_workers=2, devices_per_worker=8, batch_size=16)
    config = dataclasses.replace(config, cpus_per_worker=12.0)
    check = trainkit.workers.check_resources
    nodes(gpus(8, cpus=13), gpus(8, cpus=12))
    check(config)
    assert not capsys.readouterr().out
    nodes(gpus(8, cpus=12), gpus(8, cpus=12))
    with pytest.raises(RuntimeError, match=r"take {'CPU': 25.0}.* has {'CPU': 24}"):
        check(config)
    nodes(gpus(8), gpus(7))
    with pytest.raises(RuntimeError, match=r"2 workers.*{'GPU': 16}.*{'GPU': 15}"):
        check(config)
    check(dataclasses.replace(config, autoscaling=True))
    nodes(gpus(8), gpus(8), free={"GPU": 15, "CPU": 24.5})
    check(config)
    said = capsys.readouterr().out.splitlines()[-2:]
    assert "needs 25 CPUs, and 24.5 of 64 are free" in said[0]
    assert "needs 16 GPUs, and 15 of 16 are free" in said[1]
    elastic = dataclasses.replace(config, num_workers=(1, 2))
    nodes(gpus(8))
    check(elastic)  # the fewest are enough
    nodes({"CPU": 64})
    with pytest.raises(RuntimeError, match="1 workers and a CPU"):
        check(elastic)


def test_a_batch_that_divides_badly_is_told_before_the_start(nodes, small, capsys):
    nodes({"CPU": 4})
    trainkit.workers.check_resources(small(batch_size=37, device_batch_size=32))
    assert "37 parts of 1" in capsys.readouterr().out


def test_the_last_cpu_is_ray_datas(nodes, small, capsys):
    config = small(num_workers=3, cpus_per_worker=1.5, batch_size=6)
    for cpus, said in ((5.25, True), (5.5, False)):
        nodes({"CPU": cpus})
        trainkit.workers.say_if_no_cpu_is_left(config)
        text = f"3 workers take 4.5 of the cluster's {cpus} CPUs"
        assert (text in capsys.readouterr().out) == said
    nodes(tpus(4) | {"CPU": 1}, *[tpus(4) | {"CPU": 0}] * 3)
    trainkit.workers.say_if_no_cpu_is_left(small(**SLICE, num_workers=4))
    assert not capsys.readouterr().out  # TPU workers take none


def test_an_address_with_brackets_and_what_is_none(monkeypatch):
    """An IPv6 address, and names that Ray looks up by itself."""
    asked = []

    def connect(address, timeout):
        asked.append((*address, timeout))
        raise OSError("refused")

    monkeypatch.setattr(trainkit.socket, "create_connection", connect)
    monkeypatch.setenv("RAY_ADDRESS", "ray://[::1]:6379")
    with pytest.raises(ConnectionError, match="no cluster answers there"):
        trainkit.check_address()
    assert asked == [("::1", 6379, 5)]
    for address in ("auto", "my-cluster", "local"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        trainkit.check_address()
    assert len(asked) == 1


def test_a_worker_starts_with_the_workers_that_there_are(small, monkeypatch):
    """An elastic run may have fewer. GPUs are chosen before JAX is asked for a device."""
    done, workers = [], trainkit.workers
    context = SimpleNamespace(get_world_size=lambda: 1)
    data = ray.data.DataContext()
    monkeypatch.setattr(ray.data.DataContext, "get_current", lambda: data)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(workers.jax, "set_mesh", done.append)
    monkeypatch.setattr(workers, "say_if_no_cpu_is_left", lambda c: done.append("CPU"))
    monkeypatch.setattr(workers, "use_assigned_gpus", lambda: done.append("GPUs"))
    settings = dataclasses.asdict(small(num_workers=(1, 2)))
    config, mesh = workers.start_worker(settings)
    assert config.num_workers == 1 and mesh.devices.shape == (1, 1, 1)
    assert done == ["CPU", mesh]
    assert (
        data.execution_options.resource_limits.cpu == 1
        and not data.enable_progress_bars
    )
    done.clear()
    monkeypatch.setattr(workers, "check_generation", lambda c, d: done.append(d))
    monkeypatch.setattr(workers.jax, "process_index", lambda: 1)
    _, mesh = workers.start_worker(settings | {"platform": "gpu"})
    (device,) = mesh.devices.ravel()
    assert done == ["GPUs", device, mesh]

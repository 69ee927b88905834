"""Which devices a worker gets, with which libraries; and what is refused at once."""

import dataclasses
import os
import re
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import ray.train
from conftest import SLICE
from samples import python

import trainkit.workers


@pytest.mark.slow
def test_two_workers_of_a_node_take_two_gpus(tutorial, cluster, small):
    """Before the first of them asks JAX for a device, which is when CUDA decides.

    The GPUs are CPUs that JAX takes for CUDA's; each worker notes which ones it would see,
    and where its libraries are: its node's own plugins for the network among them.
    """

    def loop(settings):
        from jax._src import hardware_utils, xla_bridge

        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # by Ray's backend, on all
        note = config.run_path / f"gpus-{ray.train.get_context().get_world_rank()}"

        def start_cuda():
            names = "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"
            note.write_text(" ".join(os.environ[name] for name in names))
            return xla_bridge.make_cpu_client()

        hardware_utils.has_visible_nvidia_gpu = lambda: True
        xla_bridge.register_backend_factory("cuda", start_cuda, priority=500)
        trainkit.workers.start_worker(settings)

    config = small(platform="gpu")
    trainer = tutorial.make_trainer(config, loop)  # as many as there are GPUs
    trainer.fit()
    seen = {(config.run_path / f"gpus-{rank}").read_text() for rank in range(2)}
    libraries = f"{os.environ.get('LD_LIBRARY_PATH', '')}:/usr/local/nvidia/lib64"
    assert seen == {f"{gpu} {libraries}" for gpu in range(2)}


def test_pips_cuda_comes_before_the_nodes(tmp_path, monkeypatch):
    """What a library needs is then there already; as a stand-in, one of numpy's."""
    loaded = "cublas/lib/libcublasLt.so.12", "cudnn/lib/libcudnn_graph.so.9"
    loaded += "cu13/lib/libnvJitLink.so.13", "cu13/lib/libcublasLt.so.13"
    for name in (*loaded, "cu13/lib/libcudart.so.13"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(np.random.bit_generator.__file__, path)
    (tmp_path / "nvidia/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    trainkit.workers.load_cuda_libraries()
    mapped = re.findall(rf"{tmp_path}/nvidia/(.*)", Path("/proc/self/maps").read_text())
    assert {*mapped} == {*loaded}


DRIVER = """
import sys
sys.path.append("ci")
from notebook_module import code_cells
for cell in code_cells()[:2]:
    exec(cell.source)
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device has been asked for"
print(jax.config.jax_platforms)
"""


def test_driver_leaves_accelerators_to_the_workers():
    """Its first cells limit JAX to CPUs, before anything asks JAX for a device."""
    assert python(DRIVER, JAX_PLATFORMS=None).split()[-1] == "cpu"


FLAGS = {
    "cpu": "--xla_force_host_platform_device_count=2",
    "gpu": "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0",
    "tpu": "",
}


@pytest.mark.parametrize("platform", FLAGS)
def test_environment_of_a_worker(small, tmp_path, monkeypatch, platform):
    """JAX reads it when it is imported, so it must be there before. Your flags stay."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    config = small(platform=platform, devices_per_worker=2)
    found = trainkit.workers.environment(config)
    assert found["JAX_PLATFORMS"] == platform.replace("gpu", "cuda")
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "runs/jax-cache")
    assert found.get("XLA_FLAGS", "") == FLAGS[platform]
    assert ("LD_LIBRARY_PATH" in found) == (platform == "gpu")
    remote = dataclasses.replace(config, storage_path="s3://bucket/runs")
    cache = trainkit.workers.environment(remote)["JAX_COMPILATION_CACHE_DIR"]
    assert cache == str(tmp_path / "data-jax-cache")  # which all nodes share, too

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    found = trainkit.workers.environment(config)
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"
    expected = ["--mine", FLAGS[platform]]
    if platform == "gpu":  # the last wins
        expected = [FLAGS[platform], "--xla_gpu_shard_autotuning=false", "--mine"]
    assert found["XLA_FLAGS"] == " ".join(expected).strip()


def test_gpus_that_lack_bfloat16_are_refused(small):
    """A T4, as on Colab and Kaggle, has 7.5."""

    def check(capability: str, dtype: str) -> None:
        gpu = SimpleNamespace(device_kind="Tesla T4", compute_capability=capability)
        trainkit.workers.check_generation(small(compute_dtype=dtype), gpu)

    for capability in ("8.0", "8.9", "10.0", "12.1"):
        check(capability, "bfloat16")
    for capability in ("7.0", "7.5"):
        check(capability, "float32")
        words = f"found Tesla T4 with {capability}.*compute_dtype: float32"
        with pytest.raises(RuntimeError, match=words):
            check(capability, "bfloat16")
            pytest.fail(f"{capability} is taken")


def test_a_worker_starts_with_the_workers_that_there_are(small, monkeypatch):
    """An elastic run may have fewer. GPUs are chosen before JAX is asked for a device.

    It is watched from the beginning: the first communication, in which a bad network hangs,
    is there. Workers that don't see one another would each train a model of their own.
    """
    done, workers = [], trainkit.workers
    context = SimpleNamespace(get_world_size=lambda: 1)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(workers, "watch", done.append)
    monkeypatch.setattr(workers.jax, "set_mesh", done.append)
    monkeypatch.setattr(workers, "use_assigned_gpus", lambda: done.append("GPUs"))
    monkeypatch.setattr(workers, "check_generation", lambda c, d: done.append(d))
    settings = dataclasses.asdict(small(num_workers=(1, 2), stall_timeout_s=12.5))
    config, mesh = workers.start_worker(settings)
    assert config.num_workers == 1 and mesh.devices.shape == (1, 1, 1)
    _, on_gpus = workers.start_worker(settings | {"platform": "gpu"})
    assert done == [12.5, mesh, 12.5, "GPUs", *on_gpus.devices.ravel(), on_gpus]
    context.get_world_size = lambda: 2
    with pytest.raises(RuntimeError, match="JAX sees 1 of 2 workers"):
        workers.start_worker(settings)


def test_address_of_a_cluster_that_is_gone(monkeypatch):
    """In seconds; Ray itself would try for minutes. Names it looks up by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        for address in ("", "auto", "local", "my-cluster", f"ray://{host}:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            trainkit.check_address()
    for address in (f"{host}:{port}", f"ray://{host}:{port}", f"{host}:port"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConnectionError, match=f"{address}'.*no cluster answers"):
            trainkit.check_address()


# A cluster that is only described.


@pytest.fixture
def nodes(monkeypatch):
    """A function that lets Ray list nodes with these resources, and one that is gone."""

    def let(*alive: dict):
        listed = [{"Alive": True, "Resources": each} for each in alive]
        gone = {"Alive": False, "Resources": {"CPU": 64, "GPU": 64, "TPU": 64}}
        total = {k: sum(x.get(k, 0) for x in alive) for x in alive for k in x}
        monkeypatch.setattr(ray, "nodes", lambda: [*listed, gone])
        monkeypatch.setattr(ray, "cluster_resources", lambda: total)

    return let


def gpus(n, kind="H100", cpus=32) -> dict:
    return {"CPU": cpus, "GPU": n, f"accelerator_type:{kind}": 1}


HOST = {"CPU": 100, "TPU": 4, "accelerator_type:TPU-V6E": 1}
COMPLETED = [  # what is set beside the GPUs; the workers, and how many there is room for
    ({}, 16, 20),  # 17 to 20 don't divide 64
    ({"batch_size": 15}, 15, 20),
    ({"batch_size": 30, "fsdp": 2}, 10, 20),  # 15 form no mesh
    ({"devices_per_worker": 8}, 2, 2),  # no worker spans two nodes
    ({"devices_per_worker": 3, "batch_size": 15}, 5, 5),
    ({"devices_per_worker": 9, "batch_size": 18}, 1, 1),  # `check_resources` refuses
    ({"devices_per_worker": 3, "batch_size": 3, "accelerator_type": "A100"}, 1, 1),
    ({"cpus_per_worker": 2.0, "batch_size": 10}, 10, 10),
    ({"num_workers": (2, 4), "batch_size": 12}, (2, 4), (2, 4)),  # the user has set it
    ({"platform": "cpu"}, 1, 1),
    (SLICE, 8, 9),  # two whole slices
    (SLICE | {"batch_size": 48}, 4, 9),
    (SLICE | {"topology": "2x4"}, 8, 9),
    (SLICE | {"topology": None, "accelerator_type": None}, 1, 1),  # a host by itself
]


@pytest.mark.parametrize("changes, workers, room", COMPLETED)
def test_as_many_workers_as_share_a_batch(nodes, small, capsys, changes, workers, room):
    """Of 8, 8, and 4 GPUs, with as many CPUs; a node that is gone has none."""
    nodes(gpus(8, cpus=8), gpus(8, cpus=8), {"CPU": 8}, gpus(4, "A100", 4), *[HOST] * 9)
    config = small(**{"platform": "gpu", "batch_size": 64} | changes)
    assert trainkit.workers.with_num_workers(config).num_workers == workers
    said = f"{workers} workers of {room} that there is room for share a batch.\n"
    assert capsys.readouterr().out == (said if workers != room else "")


TWO = {"platform": "gpu", "num_workers": 2, "devices_per_worker": 8, "batch_size": 16}
TWO |= {"cpus_per_worker": 12.0}
ELASTIC = TWO | {"num_workers": (1, 2)}  # the fewest are enough
ONE_HOST = {"platform": "tpu", "num_workers": 1, "devices_per_worker": 4}
CHECKED = [  # the nodes, what is asked of them, and what is said if they lack it
    ([gpus(8, cpus=13), gpus(8, cpus=12)], TWO, ""),
    ([gpus(8, cpus=12)] * 2, TWO, r"Ray Data a CPU. .*{'CPU': 24, 'GPU': 16}"),
    ([gpus(8, cpus=12)] * 2, TWO | {"autoscaling": True}, ""),
    ([gpus(8), gpus(7)], TWO, "2 workers take .*room for 1 workers"),
    ([gpus(12), gpus(4)], TWO, "2 workers take .*room for 1 workers"),
    ([gpus(12), gpus(4)], ELASTIC, ""),
    ([{"CPU": 64}], ELASTIC, "1 workers take .*'GPU': 0}.*0 workers"),
    ([HOST] * 3, ONE_HOST, ""),
    ([HOST] * 3, SLICE, "4 workers take {'TPU': 4} each of type TPU-V6E.*3 workers"),
]


@pytest.mark.parametrize("alive, asked, words", CHECKED)
def test_missing_resources_are_refused(nodes, small, alive, asked, words):
    """Of two workers with 8 GPUs and 12 CPUs each, say, and a CPU for Ray Data."""
    nodes(*alive)
    said = pytest.raises(RuntimeError, match=words) if words else nullcontext()
    with said:
        trainkit.workers.check_resources(small(**asked))


def test_a_mesh_that_no_number_of_workers_forms_is_refused(nodes, small):
    nodes(gpus(8), gpus(8), gpus(4))
    with pytest.raises(ValueError, match=r"fsdp \(32\): expected to divide 20 devices"):
        trainkit.workers.with_num_workers(small(platform="gpu", fsdp=32))


def test_the_configuration_that_fits_the_cluster(nodes, monkeypatch):
    monkeypatch.delenv("GPT2_CONFIG", raising=False)
    fitting = {"TPU": "stories-tpu-v6e", "GPU": "stories", "CPU": "smoke"}
    for kind, name in fitting.items():
        nodes({"CPU": 8, kind: 8})
        assert trainkit.workers.default_config() == f"configs/{name}.yaml"
    monkeypatch.setenv("GPT2_CONFIG", "mine.yaml")
    assert trainkit.workers.default_config() == "mine.yaml"

"""What the tests share: the notebook as a module, a Ray cluster, small configurations."""

import contextlib
import gc
import os
import socket
import sys
import threading
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # "" finds others: test_device.py
os.environ["RAY_ADDRESS"] = "local"  # never a cluster that happens to be here
os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # 2 s is for long runs
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # one process less to start
os.environ["RAY_TRAIN_METRICS_ENABLED"] = "0"  # nobody reads them
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Nobody's dashboard, or Ray's cleaner could ask another test's, and end a run: upstream.md.
os.environ["RAY_API_SERVER_ADDRESS"] = "http://127.0.0.1:9"
os.environ["RAY_prestart_worker_first_driver"] = "0"  # they would lack the package
for wait in ("raylet_start_wait_time_s", "gcs_server_port_wait_time_s"):
    os.environ[f"RAY_{wait}"] = "120"  # a machine may be busy
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "180"
# Of gcsfs, for test_gcs.py, in whose server nobody needs keys. Read when it is imported.
os.environ["FSSPEC_GCS"] = '{"token": "anon", "use_listings_cache": false}'
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{ROOT}/build/jax-cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs are small: little runs, and they compile in half the time or less.
    flags = "--xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):  # later ones have no such flag
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)

import jax
import numpy as np
import pytest
import ray
from filelock import FileLock
from notebook_module import load_notebook
from ray.cluster_utils import Cluster

from trainkit.config import TrainingConfig

STARTS = {"cluster", "head", "reference", "bucket", "built", "browser"}
LONGEST = "notebook trainer nodes gcs s3 sharding checkpoints tpu_slice".split()


def start_ray(address: str = "local") -> None:
    """Start Ray, or join a cluster, as the notebook does, if that hasn't been done.

    Its node of 4 CPUs says that it has two GPUs.
    """
    if not ray.is_initialized():
        options = {"log_to_driver": False, "include_dashboard": False}
        if address == "local":
            options |= {"num_cpus": 4, "num_gpus": 2}
        environment = {"py_modules": [str(ROOT / "trainkit")]}
        start = partial(ray.init, address, runtime_env=environment, **options)
        try:
            start()
        except Exception:  # Ray gives its agent some 15 s to start, whatever is set
            ray.shutdown()
            start()


def stop_ray() -> None:
    """Shut Ray down, once the threads of abandoned datasets have ended.

    One that touches Ray afterwards ends the whole process, with nothing but exit code 1.
    """
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(("iter_threaded", "StreamingExecutor")):
            thread.join(timeout=30)
    ray.shutdown()


def pytest_sessionfinish():
    stop_ray()


@pytest.fixture(scope="session")
def tutorial():
    return load_notebook()


@pytest.fixture(scope="session")
def llama(tutorial):
    """The notebook with examples/llama.py in a cell below its rules."""
    module = load_notebook(model=ROOT / "examples/llama.py")
    sys.modules["tutorial"] = tutorial
    return module


@pytest.fixture(autouse=True)
def mesh(request):
    """Of one device, as the page sets it, where a test uses the notebook."""
    if not {"tutorial", "llama"} & {*request.fixturenames}:
        yield
        return
    create_mesh = request.getfixturevalue("tutorial").create_mesh
    with jax.set_mesh(create_mesh(TrainingConfig())):
        yield


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """First the files that take longest; mark the tests that start nothing as fast.

    Two processes take file after file, and neither shall be left with a long one at the end.
    """

    def order(item):  # in a file, the tests that share a cluster are the first
        name = item.path.stem.removeprefix("test_")
        place = LONGEST.index(name) if name in LONGEST else len(LONGEST)
        return place, name, "cluster" not in item.fixturenames

    items.sort(key=order)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"slow", "extra"} and not STARTS & {*item.fixturenames}:
            item.add_marker("fast")


@pytest.fixture(scope="module")
def cluster():
    """A real Ray cluster of one node, which stays until a test starts one of its own."""
    start_ray()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def cluster_with_a_head():
    """A cluster that has no more than a head, where this process stays."""
    stop_ray()
    # Ray's own port for the dashboard may be another cluster's.
    options = {"num_cpus": 3, "dashboard_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    start_ray(cluster.address)
    try:
        yield cluster
    finally:
        stop_ray()
        cluster.shutdown()


@contextlib.contextmanager
def cluster_with(variables: dict[str, str]):
    """A new cluster of one node, whose processes have these variables, as this one has."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        stop_ray()
        start_ray()
        yield
        stop_ray()


@pytest.fixture
def head():
    with cluster_with_a_head() as cluster:
        yield cluster


CPUS = {"num_workers": 2, "resources_per_worker": {"CPU": 0.5}}


def small_config(folder: Path, **changes) -> TrainingConfig:
    """A small configuration with its storage in a folder, for two workers on CPUs."""
    values = {
        **{"vocab_size": 521, "block_size": 16, "n_layer": 2, "n_head": 2},
        **{"n_embd": 32, "compute_dtype": "float32", "dataset": "builtin"},
        **{"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 4},
        **{"decay_steps": 40, "max_steps": 20, "log_interval": 1, "eval_interval": 10},
        **{"eval_windows": 8, "scaling": CPUS, "run_name": "run"},
        **{"data_dir": f"{folder}/data", "storage_path": f"{folder}/runs"},
    }
    return TrainingConfig(**(values | changes))


@pytest.fixture
def small(tmp_path):
    """small_config, in this test's own folder."""
    return partial(small_config, tmp_path)


@pytest.fixture(scope="session")
def reference(tutorial, write_bins, tmp_path_factory):
    """The configuration of a run of two workers that nothing has happened to.

    One of the processes of pytest trains it, and the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    config = small_config(
        shared / "reference",
        n_layer=1,  # less to compile in each start
        max_steps=40,
        eval_interval=8,
        stall_timeout_s=90.0,  # longer than a first step on a busy machine
        max_failures=2,
    )
    with FileLock(shared / "reference.lock"):
        if not (done := shared / "reference/done").exists():
            start_ray()
            write_bins(config)
            tutorial.make_trainer(config, tutorial.train_loop_per_worker).fit()
            done.touch()
    return config


def walk(config: TrainingConfig, shape, rng: np.random.Generator) -> np.ndarray:
    """Tokens; each tends to follow its predecessor, so that there is something to learn."""
    steps = rng.choice([1, 2, 3], size=shape, p=[0.8, 0.1, 0.1])
    return (np.cumsum(steps, axis=-1) % config.vocab_size).astype(np.uint16)


@pytest.fixture(scope="session")
def write_bins():
    """A function that fills a configuration's data_dir with token files."""

    def write(config, train_tokens: int = 2_001, val_tokens: int = 401, seed: int = 0):
        rng = np.random.default_rng(seed)
        folder = Path(config.data_dir)
        folder.mkdir(parents=True, exist_ok=True)
        walk(config, train_tokens, rng).tofile(folder / "train.bin")
        walk(config, val_tokens, rng).tofile(folder / "val.bin")
        return config

    return write

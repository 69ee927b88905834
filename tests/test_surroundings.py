"""What else is on the machine: other clusters, proxies, uv, variables, folders, names."""

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import ray.train.v2.jax
from accidents import free_port, in_the_background, wait_for
from conftest import ROOT
from notebook_module import code_cells
from ray.cluster_utils import Cluster
from samples import python

import trainkit
import trainkit.run_log
import trainkit.workers

SMALL_RUN = """
import os, time
import jax, ray, ray.train
from ray.train.v2.jax import JaxConfig, JaxTrainer

note = os.environ["NOTE"]

def where():
    import trainkit.token_files
    return trainkit.token_files.__file__

def loop(settings):
    rank = ray.train.get_context().get_world_rank()
    with open(note, "a") as file:
        print("start", rank, where(), file=file)
    assert jax.device_count() == 2
    while not os.path.exists(note + ".over"):
        time.sleep(0.1)

with open(note, "a") as file:
    print("task", 0, ray.get(ray.remote(where).remote()), file=file)
JaxTrainer(
    loop,
    scaling_config=ray.train.ScalingConfig(
        num_workers=2, resources_per_worker={"CPU": 0.5}
    ),
    run_config=ray.train.RunConfig(
        storage_path=os.path.dirname(note), name="run",
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
    ),
    jax_config=JaxConfig(use_gpu=True),
).fit()
"""


def cell(start: str) -> str:
    """The notebook's code cell with this in it."""
    (found,) = [c.source for c in code_cells() if start in c.source]
    return found


START = f"""
import trainkit
trainkit.set_up_driver()
{cell("import ray.train")}
{cell("ray.init(")}
"""
ALONE = START.replace("ray.init(", "ray.init(num_cpus=2, include_dashboard=False,")


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "grpc_proxy")
EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
HERE, HOME = [sys.executable], str(Path.home())
NO_PROJECT = ["uv", "run", "--no-project", "python"]
PROJECT = ["uv", "run", "--no-sync", "--offline", "python"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "joins, begin, runner, home",
    [
        pytest.param(False, ALONE, NO_PROJECT, "/proc/none", id="without a dashboard"),
        pytest.param(False, START, PROJECT, "", id="started", marks=pytest.mark.extra),
        pytest.param(True, START, HERE, HOME, id="joined", marks=pytest.mark.extra),
    ],
)
def test_a_run_among_others(tmp_path, request, joins, begin, runner, home):
    """Another cluster, uv, proxies that don't answer, and a home that can't be written.

    Nor do workers see this folder.

    Ray's cleaner would ask the other cluster's dashboard, and end this run after 5 s. With uv
    in another environment, or none, Ray would start workers without Ray. gRPC, with which JAX
    connects workers, would ask a proxy, for five minutes. Ray keeps a token at home, and would
    raise a FileNotFoundError.
    """
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "a"\nversion = "1"\nrequires-python = ">=3.11"\n'
    )
    shutil.copytree(ROOT / "trainkit", tmp_path / "trainkit")
    note = tmp_path / "starts"
    variables = {name: f"http://127.0.0.1:{free_port()}" for name in PROXIES}
    variables |= {"UV_PROJECT_ENVIRONMENT": sys.prefix, "VIRTUAL_ENV": sys.prefix}
    variables |= {"UV_CACHE_DIR": f"{tmp_path}/uv", "HOME": home, "NOTE": str(note)}
    address = request.getfixturevalue("head").address if joins else "local"
    variables |= {"RAY_ADDRESS": address, "PYTHONPATH": None}
    hide = "import os; os.rename('trainkit', 'elsewhere')"
    script = begin.replace("workers.check_", f"{hide}\nworkers.check_") + SMALL_RUN
    run = partial(python, EXEC, *runner, "-c", script, cwd=tmp_path)
    with in_the_background(partial(run, **variables)) as finish:
        wait_for(lambda: note.exists() and note.read_text().count("\n") >= 3, 240)
        options = {"include_dashboard": True, "dashboard_port": free_port()}
        other = Cluster(initialize_head=True, head_node_args=options)
        time.sleep(8)
        other.shutdown()
        Path(f"{note}.over").touch()
        finish()
    lines = sorted(line.split() for line in note.read_text().splitlines())
    assert [f"{what} {n}" for what, n, _ in lines] == ["start 0", "start 1", "task 0"]
    for *_, path in lines:  # it came with Ray
        assert not path.startswith((str(tmp_path), str(ROOT)))


@pytest.mark.extra
def test_a_cluster_that_starts_no_process_is_named(tmp_path):
    """Here, since its Python isn't found; Ray would wait forever."""
    script = """
import ray, trainkit.workers
ray.init(num_cpus=1, include_dashboard=False, runtime_env={"py_executable": "/no/python"})
trainkit.workers.check_cluster(8)
"""
    with pytest.raises(AssertionError, match="Ray has started no process within 8 s."):
        python(script)


def test_ray_under_uv_is_set_where_the_cluster_is_started(monkeypatch):
    name = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    monkeypatch.setattr(trainkit, "check_address", lambda: None)
    for address, expected in (("", "0"), ("local", "0"), ("10.0.0.1:6379", None)):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RAY_ADDRESS", address)
        trainkit.set_up_driver()
        assert os.environ.get(name) == expected
        monkeypatch.setenv(name, "1")  # yours
        trainkit.set_up_driver()
        assert os.environ[name] == "1"


@pytest.mark.slow
def test_variables_of_jax():
    """A step, an evaluation, and a text, in a process where JAX is set up in another way."""
    script = """
import sys
sys.path[:0] = ["ci", "tests"]
import numpy as np
from notebook_module import load_notebook
from trainkit.generate import generate_tokens
tutorial = load_notebook()
config = tutorial.TrainingConfig(vocab_size=300, block_size=16, n_layer=1, n_head=2,
    n_embd=32, compute_dtype="float32", batch_size=4, device_batch_size=2, loss_chunks=2,
    warmup_steps=2, decay_steps=9, platform="cpu")
windows = np.zeros((4, 17), np.uint16)
state, metrics = tutorial.train_step(tutorial.create_state(config), windows, config)
print(metrics, tutorial.eval_step(state.params, windows, config))
print(generate_tokens(tutorial.create_model(config), [[1, 2], [3]], 4))
"""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "JAX_DEBUG_NANS": "1"}
    variables |= {"JAX_NUMPY_RANK_PROMOTION": "warn", "JAX_DEFAULT_PRNG_IMPL": "rbg"}
    variables |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    python(script, **variables)


GPUS = [  # that Ray assigned, that are visible, JAX's own setting, visible afterwards
    # Ray 2.60 numbers every worker's GPUs from 0, and tells JAX to take them all.
    (["3"], "0", "0", "3"),
    (["3"], "0", "all", "3"),
    (["10", "9"], "0,1", "all", "9,10"),
    (["3", "2"], "2,3", "0,1", "2,3"),  # called again, or only its own are visible
    # As it may become.
    (["3"], "0,1,2,3,4,5,6,7", "3", "0,1,2,3,4,5,6,7"),  # one is chosen: as for Torch
    (["3"], "0", "1", "0"),
    (["GPU-8f2a"], "GPU-8f2a", "0", "GPU-8f2a"),  # names and not numbers
    (["1"], None, "all", None),
]


@pytest.mark.parametrize("assigned, visible, of_jax, expected", GPUS)
def test_gpus_that_a_worker_takes(monkeypatch, assigned, visible, of_jax, expected):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    settings = SimpleNamespace(values={"jax_cuda_visible_devices": of_jax})
    monkeypatch.setattr(trainkit.workers.jax, "config", settings)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    trainkit.workers.use_assigned_gpus()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected

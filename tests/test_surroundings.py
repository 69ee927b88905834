"""What else is on the machine: other clusters, proxies, uv, variables, and GPUs."""

import os
import shutil
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from accidents import free_port, in_the_background, wait_for
from conftest import ROOT
from notebook_module import code_cells
from ray.cluster_utils import Cluster
from samples import python

import trainkit.workers

START = "\n".join(cell.source for cell in code_cells()[:3])  # up to ray.init
FIT = """
import os, time
note = os.environ["NOTE"]

def loop(settings):
    rank = ray.train.get_context().get_world_rank()
    with open(note, "a") as file:
        print(jax.device_count(), "devices", trainkit.__file__, file=file)
    while not os.path.exists(note + ".over"):
        time.sleep(0.1)

JaxTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
    run_config=ray.train.RunConfig(
        storage_path=os.path.dirname(note),
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
    ),
    jax_config=JaxConfig(use_gpu=True),
).fit()
"""
EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
UV = ["uv", "run", "--no-sync", "--offline", "python"]
JOINED = pytest.param(True, [sys.executable], id="joined", marks=pytest.mark.extra)


@pytest.mark.extra
@pytest.mark.parametrize("joins, runner", [pytest.param(False, UV, id="uv"), JOINED])
def test_a_run_among_others(tmp_path, request, joins, runner):
    """Another cluster that comes and goes, uv, and proxies that don't answer.

    With uv, Ray would start workers in another environment, without Ray. gRPC, with which JAX
    connects workers, would ask a proxy, for five minutes.
    """
    project = '[project]\nname = "a"\nversion = "1"\nrequires-python = ">=3.11"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    shutil.copytree(ROOT / "trainkit", tmp_path / "trainkit")
    note = tmp_path / "note"
    names = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY")
    variables = {name: f"http://127.0.0.1:{free_port()}" for name in names}
    variables |= {
        "UV_PROJECT_ENVIRONMENT": sys.prefix,
        "UV_CACHE_DIR": f"{tmp_path}/uv",
    }
    address = request.getfixturevalue("head").address if joins else "local"
    variables |= {"NOTE": str(note), "RAY_ADDRESS": address, "grpc_proxy": None}
    run = partial(python, EXEC, *runner, "-c", START + FIT, cwd=tmp_path, **variables)
    with in_the_background(run) as finish:
        wait_for(lambda: note.exists() and note.read_text().count("\n") == 2)
        options = {"include_dashboard": True, "dashboard_port": free_port()}
        other = Cluster(initialize_head=True, head_node_args=options)
        time.sleep(5)
        other.shutdown()
        (tmp_path / "note.over").touch()
        finish()
    for line in note.read_text().splitlines():
        assert line.startswith("2 devices /")


@pytest.mark.slow
def test_variables_of_jax():
    """A step, an evaluation, and logits, in a process where JAX is set up in another way."""
    script = """
import sys
sys.path[:0] = ["ci", "tests"]
import jax, numpy as np
from conftest import small_config
from notebook_module import load_notebook
tutorial = load_notebook()
config = small_config("/nowhere", n_layer=1, device_batch_size=2, loss_chunks=2)
windows = np.zeros((4, 17), np.uint16)
jax.set_mesh(tutorial.create_mesh(config))
state, metrics = tutorial.train_step(tutorial.create_state(config), windows, config)
assert metrics["loss"].dtype == np.float32
print(tutorial.eval_step(state.model, windows, config), state.model(windows[:, :-1]))
"""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "JAX_DEBUG_NANS": "1"}
    variables |= {"JAX_NUMPY_RANK_PROMOTION": "warn", "JAX_DEFAULT_PRNG_IMPL": "rbg"}
    python(script, JAX_DEFAULT_MATMUL_PRECISION="highest", **variables)


GPUS = [  # that Ray assigned, that are visible, and visible afterwards
    (["3"], "0", "3"),  # Ray 2.60 numbers every worker's GPUs from 0
    (["10", "9"], "0,1", "9,10"),
    (["3", "2"], "2,3", "2,3"),  # called again, or as a Ray may become
]


@pytest.mark.parametrize("assigned, visible, expected", GPUS)
def test_gpus_that_a_worker_takes(monkeypatch, assigned, visible, expected):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    trainkit.workers.use_assigned_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected

"""What else is on the machine: other clusters, proxies, uv, and JAX's variables."""

import shutil
import sys
import time
from functools import partial

import pytest
from accidents import in_the_background, wait_for
from conftest import ROOT, free_port
from notebook_module import code_cells
from ray.cluster_utils import Cluster
from samples import python

UV = "import os, sys; os.execvp('uv', ['uv', 'run', '--no-sync', '--offline', *sys.argv[1:]])"
CELLS = code_cells()
LAST = [cell.id for cell in CELLS].index("step-1-fit")
PROGRAM = "\n".join(cell.source for cell in CELLS[: LAST + 1])  # and once more
PROGRAM += """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])

def wait_and_fit():
    (folder / "started").touch()
    while not (folder / "over").exists():
        time.sleep(0.1)
    return fit_line_per_worker()

trainer.train_loop_per_worker = wait_and_fit
print(trainer.fit().return_value)
"""


@pytest.mark.extra
def test_a_run_among_others(tmp_path):
    """Step 1, beside a cluster that comes and goes, uv, and proxies that don't answer.

    With uv, Ray would start workers in another environment, without Ray. gRPC, with which JAX
    connects workers, would ask a proxy, for five minutes.
    """
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\nversion = "1"\n')
    for name in ("configs", "trainkit"):
        shutil.copytree(ROOT / name, tmp_path / name)
    proxy = f"http://127.0.0.1:{free_port()}"
    variables = {"http_proxy": proxy, "https_proxy": proxy, "grpc_proxy": None}
    variables |= {"UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_CACHE_DIR": "uv"}
    command = UV, "python", "-c", PROGRAM, tmp_path
    with in_the_background(partial(python, *command, cwd=tmp_path, **variables)) as fit:
        wait_for((tmp_path / "started").exists)
        options = {"include_dashboard": True, "dashboard_port": free_port()}
        other = Cluster(initialize_head=True, head_node_args=options)
        time.sleep(5)
        other.shutdown()
        (tmp_path / "over").touch()
        assert fit().endswith("'in the array': 64}\n")


STEP = """
import sys
sys.path[:0] = ["ci", "tests"]
import jax, numpy as np
from conftest import load_notebook, small_config
tutorial = load_notebook()
config = small_config("/nowhere", n_layer=1, device_batch_size=2, loss_chunks=2)
windows = np.zeros((4, 17), np.uint16)
jax.set_mesh(tutorial.create_mesh(config))
state, metrics = tutorial.train_step(tutorial.create_state(config), windows, config)
print(metrics["loss"].dtype, state.model(windows[:, :-1]).dtype)
"""


@pytest.mark.slow
def test_variables_of_jax():
    """A step, and logits, in a process where JAX is set up in another way."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "JAX_DEBUG_NANS": "1"}
    variables |= {"JAX_NUMPY_RANK_PROMOTION": "warn", "JAX_DEFAULT_PRNG_IMPL": "rbg"}
    assert python(STEP, **variables) == "float32 float32\n"

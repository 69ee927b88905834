"""The notebook as a script, run as a Ray job, with the commands that the guide gives."""

import re
import shutil

import pytest
import ray
from conftest import ROOT, stop_ray
from ruamel.yaml import YAML
from samples import python


@pytest.mark.extra
def test_notebook_runs_as_a_job(tmp_path):
    folder, storage = tmp_path / "tutorial", tmp_path / "storage"
    for name in ("configs", "trainkit"):
        shutil.copytree(ROOT / name, folder / name)
    for name in (".gitignore", "README.ipynb"):  # Ray leaves out what the first names
        shutil.copy(ROOT / name, folder)
    settings = YAML().load((ROOT / "configs/smoke.yaml").read_text())
    settings |= {"max_steps": 6, "eval_interval": 3, "run_name": "job"}
    settings |= {"data_dir": f"{storage}/data", "storage_path": f"{storage}/runs"}
    YAML().dump(settings, folder / "configs/books.yaml")

    guide, words = (ROOT / "docs/guide.md").read_text(), "jupyter nbconvert --to"
    (commands,) = re.findall(rf"```bash\n({words}.*?)```", guide, re.DOTALL)
    stop_ray()
    context = ray.init("local", num_cpus=4, include_dashboard=True, log_to_driver=False)
    commands = commands.replace("127.0.0.1:8265", context.dashboard_url)
    # A cluster takes jobs a few seconds after it has started.
    ready = f"ray job submit --address http://{context.dashboard_url} -- true"
    wait = f"for _ in {{1..20}}; do RAY_AUTH_MODE=token {ready} && break; done\n"
    shell = "import os, sys; os.execvp('bash', ['bash', '-ec', *sys.argv[1:]])"
    ours = {"RAY_ADDRESS": None, "RAY_AUTH_MODE": None}  # which `ray.init` sets here
    said = python(shell, wait + commands, cwd=folder, **ours)
    stop_ray()
    assert "step 6 | " in said
    # No aside: neither step 1's program, which reports this, nor the kill's run.
    assert "'points in a batch': 64" not in said
    assert [*storage.glob("runs/*/step_*6")] == [storage / "runs/job/step_00000006"]

"""The notebook as a script, run as a Ray job, with the commands that the guide gives."""

import os
import re
import shutil
import subprocess

import pytest
import ray
from conftest import ROOT, stop_ray
from ruamel.yaml import YAML


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

    guide, words = (ROOT / "docs/guide.md").read_text(), "jupyter nbconvert --to script"
    (commands,) = re.findall(rf"```bash\n({words}.*?)```", guide, re.DOTALL)
    assert "127.0.0.1:8265" in commands and "configs/books.yaml" in commands
    stop_ray()
    context = ray.init("local", num_cpus=4, include_dashboard=True, log_to_driver=False)
    commands = commands.replace("127.0.0.1:8265", context.dashboard_url)
    ours = ("RAY_ADDRESS", "RAY_AUTH_MODE")  # which `ray.init` sets here
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    for _ in range(20):  # a cluster takes jobs a few seconds after it has started
        result = subprocess.run(["bash", "-e", "-c", commands], **options, timeout=500)
        if "No available agent" not in result.stderr:
            break
    stop_ray()
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-5000:]
    assert "step 6 | " in result.stdout
    assert (storage / "runs/job/step_00000006").is_dir()
    # No aside: neither step 1's program, which reports this, nor the kill.
    assert "'points in a batch': 64" not in said
    assert {path.parent.name for path in storage.glob("runs/*/step_*")} == {"job"}

"""The notebook as a Ray job, with the guide's commands."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess

import nbformat
import psutil
import pytest
import ray
from accidents import in_the_background, wait_for
from conftest import ROOT, stop_ray
from notebook_module import NOTEBOOK
from ruamel.yaml import YAML
from samples import python


def test_a_signal_to_the_job_reaches_the_program(tmp_path):
    """It is bash's process, and has the run's name and the package, and the keys that were
    changed. Its notebook is small, and a copy in another folder, as the first line says.
    """
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    keys = "run_name: other\nmax_steps: 3\nscaling: {num_workers: 1, use_gpu: true}"
    (tmp_path / "keys.yaml").write_text(keys)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/random.py").write_text("error")  # of a run with that name
    source = "import os, pathlib, random, time\n"
    source += "text = pathlib.Path(os.environ['GPT2_CONFIG']).read_text()\n"
    source += "pathlib.Path('told').write_text(f'{text} {os.getpid()}')\ntime.sleep(60)"
    cells = [nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("error")]
    cells[1].metadata.tags = ["aside"]
    about = nbformat.read(NOTEBOOK, as_version=4).metadata
    small = nbformat.v4.new_notebook(cells=cells, metadata=about)
    (tmp_path / "mine").mkdir()
    nbformat.write(small, tmp_path / "mine/copy.ipynb")
    command = ["bash", tmp_path / "ci/job.sh", "keys.yaml", "7"]
    options = {"cwd": tmp_path, "text": True}
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode and "README.ipynb: No such file" in done.stderr
    options["env"] = os.environ | {"NOTEBOOK": "mine/copy.ipynb"}
    done = subprocess.run([*command, "seed"], capture_output=True, **options)
    assert done.returncode and "seed: expected KEY=VALUE" in done.stderr
    digest = hashlib.sha256((tmp_path / "mine/copy.ipynb").read_bytes()).hexdigest()
    said = rf"mine/copy.ipynb of 20\d\d-.*, SHA-256 {digest[:12]}\n"
    assert re.fullmatch(said, done.stdout)
    command += ["scaling.num_workers=16", "seed=2", "beta2=.9"]
    with subprocess.Popen(command, **options) as job:
        wait_for((tmp_path / "told").exists, 60, what="the program")
        told = (tmp_path / "told").read_text()
        job.terminate()
    told, _, pid = told.rpartition(" ")
    expected = {"max_steps": 3, "run_name": "7", "seed": 2, "beta2": 0.9}
    expected["scaling"] = {"num_workers": 16, "use_gpu": True}
    assert YAML(typ="safe").load(told) == expected and pid == str(job.pid)
    assert job.returncode == -signal.SIGTERM


@pytest.fixture
def submit(tmp_path):
    """A function that runs the guide's commands, with changes of the smoke configuration."""
    folder, storage = tmp_path / "tutorial", tmp_path / "storage"
    for name in ("ci", "configs", "trainkit"):
        shutil.copytree(ROOT / name, folder / name)
    for name in (".gitignore", "README.ipynb"):  # Ray leaves out what the first names
        shutil.copy(ROOT / name, folder)
    guide, words = (ROOT / "docs/guide.md").read_text(), "export RAY_AUTH_MODE"
    (commands,) = re.findall(rf"```bash\n({words}.*?)```", guide, re.DOTALL)
    stop_ray()
    context = ray.init("local", num_cpus=4, include_dashboard=True, log_to_driver=False)
    commands = commands.replace("127.0.0.1:8265", context.dashboard_url)
    # A cluster takes jobs a few seconds after it has started.
    ready = f"ray job submit --address http://{context.dashboard_url} -- true"
    wait = f"for _ in {{1..20}}; do RAY_AUTH_MODE=token {ready} && break; done\n"
    shell = "import os, sys; os.execvp('bash', ['bash', '-ec', *sys.argv[1:]])"
    names = (
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_API_SERVER_ADDRESS",
    )  # which are set here
    ours = dict.fromkeys(names)

    def submit(**changes) -> str:
        settings = YAML().load((ROOT / "configs/smoke.yaml").read_text()) | changes
        settings |= {"data_dir": f"{storage}/data", "storage_path": f"{storage}/runs"}
        YAML().dump(settings, folder / "configs/books.yaml")
        return python(shell, wait + commands, cwd=folder, **ours)

    yield submit
    stop_ray()


@pytest.mark.extra
def test_a_job_that_is_killed_and_tried_again_continues(submit, tmp_path):
    run = tmp_path / "storage/runs/job"
    changes = {"max_steps": 300, "eval_interval": 50, "log_interval": 10}
    with in_the_background(lambda: submit(**changes)) as finish:
        first = "step_00000050_*/commit_success.txt"
        wait_for(lambda: any(run.glob(first)), what="a checkpoint")
        for process in psutil.process_iter(["cmdline"]):
            if "build/job.py" in (process.info["cmdline"] or []):
                process.kill()
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            finish()
    # In another package of files: Ray deletes the killed job's when it notices its end.
    said = submit(**changes | {"log_interval": 25})
    assert "job continues at step" in said and "step 300 | " in said
    # No aside: neither step 1's program, which reports this, nor the kill's run.
    assert "points read" not in said
    assert [path.parent.name for path in run.parent.glob("*/step_*300_*")] == ["job"]

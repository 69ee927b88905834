"""The whole notebook on a cluster that begins without a node to work on."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import nbformat
import psutil
import pytest
from accidents import wait_for
from conftest import ROOT, stop_ray
from notebook_module import NOTEBOOK

EMPTY = "auth file_mounts"
LISTS = "cluster_synced_files rsync_exclude rsync_filter initialization_commands"
LISTS += " setup_commands head_setup_commands worker_setup_commands"
LISTS += " head_start_ray_commands worker_start_ray_commands"


def machines(cpus: int, most: int) -> dict:
    given = {"node_config": {}, "min_workers": 0, "max_workers": most}
    return given | {"resources": {"CPU": cpus}}


@pytest.fixture
def from_zero(tmp_path):
    """The address of a head without CPUs, whose autoscaler starts nodes of two on this machine.

    Its nodes look for the head at Ray's usual port.
    """
    stop_ray()
    provider = {"type": "fake_multinode", "use_node_id_as_ip": True}
    provider |= {"disable_node_updaters": True, "disable_launch_config_check": True}
    config = {name: {} for name in EMPTY.split()} | {x: [] for x in LISTS.split()}
    config |= {"cluster_name": "small", "max_workers": 3, "provider": provider}
    config |= {"upscaling_speed": 9, "idle_timeout_minutes": 5}
    config |= {"file_mounts_sync_continuously": False, "head_node_type": "head"}
    config["available_node_types"] = {"head": machines(0, 0), "cpus": machines(2, 3)}
    folder = tempfile.mkdtemp(prefix="ray-")  # short, because it has sockets
    (tmp_path / "cluster.json").write_text(json.dumps(config))
    command = "ray start --head --block --port=6379 --num-cpus=0".split()
    command += [f"--autoscaling-config={tmp_path}/cluster.json"]
    command += [f"--temp-dir={folder}"]
    variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    log = tmp_path / "head.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=os.environ | variables | {"RAY_AUTH_MODE": "token"},
            stdout=file,
        ) as head,
    ):
        try:
            wait_for(lambda: "will now block" in log.read_text(), 60, what="the head")
            yield "127.0.0.1:6379"
        finally:
            for process in psutil.process_iter(["cmdline"]):
                if folder in " ".join(process.info["cmdline"] or []):
                    process.kill()
            head.kill()
            shutil.rmtree(folder)


@pytest.mark.extra
def test_all_cells_run_from_zero_nodes(from_zero, tmp_path):
    """Ray says what is asked for, and that nodes come."""
    for name in ("configs", "trainkit"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(NOTEBOOK, tmp_path)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    command += ["--output", "done.ipynb", NOTEBOOK.name]
    variables = {"RAY_ADDRESS": from_zero, "RAY_AUTH_MODE": "token"}
    options = {"cwd": tmp_path, "env": os.environ | variables, "timeout": 1200}
    subprocess.run(command, check=True, **options)
    cells = nbformat.read(tmp_path / "done.ipynb", as_version=4).cells
    outputs = [x for cell in cells for x in cell.get("outputs", [])]
    said = (x.get("text") or x.get("data", {}).get("text/plain", "") for x in outputs)
    text = "\n".join(said)
    places = [
        text.index(words)
        for words in (
            "{'CPU': 0, ",
            "Requesting resources: {'CPU': 0.5} * 2",
            "Adding 1 node(s) of type cpus",
            "Resized to 2 CPUs",
            "continues at step 8",
            "step 512 | tokens 262,144",
            "continues at step 512",
        )
    ]
    assert places == sorted(places)

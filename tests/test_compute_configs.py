"""The machines in configs/compute that Kubernetes makes, and what the notebook asks for."""

import re

from conftest import ROOT
from ruamel.yaml import YAML
from samples import run_from_guide

from trainkit.config import load_config

FOLDER = ROOT / "configs/compute"


def workers_of(name: str) -> list[tuple[dict, dict, dict]]:
    """Each group of workers, its pod, and what a container of that may use."""
    groups = YAML(typ="safe").load(FOLDER / name)["spec"]["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in groups]
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods]
    return [*zip(groups, pods, limits)]


def test_kuberay_nodes_are_those_that_the_notebook_asks_for(tutorial):
    """A TPU slice; and the guide's nodes of eight GPUs, of which the 7B model needs four."""
    ((group, pod, limits),) = workers_of("kuberay-tpu-v6e.yaml")
    scaling = tutorial.SCALING["v6e_4x4"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert (topology, group["numOfHosts"]) == (scaling.topology, scaling.num_workers)
    assert limits["google.com/tpu"] == str(scaling.resources_per_worker["TPU"])

    config = load_config(ROOT / "configs/gpt2-7b-gpu.yaml", "storage")
    run_from_guide(f'SCALING["{config.machines}"]', vars(tutorial))
    scaling = tutorial.SCALING[config.machines]
    (_, _, limits), _ = workers_of("kuberay-gpu.yaml")
    assert limits["nvidia.com/gpu"] == str(scaling.resources_per_worker["GPU"])
    config.split(scaling.num_workers * scaling.num_gpus_per_worker)


def test_images_have_the_pinned_ray():
    pinned = re.search(r"ray\[.*==(.*)", (ROOT / "requirements-gpu.txt").read_text())[1]
    text = "\n".join(path.read_text() for path in FOLDER.glob("*.yaml"))
    found = re.findall(r'(?:rayVersion: "|\w+/ray:)([\d.]+)', text)
    assert {*found} == {pinned}

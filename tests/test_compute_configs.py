"""The machines in configs/compute that Kubernetes makes, and what the notebook asks for."""

import re
from pathlib import Path

from conftest import ROOT
from ruamel.yaml import YAML
from samples import run_from_guide

from trainkit.config_files import load_config

FOLDER = ROOT / "configs/compute"


def spec_of(name: str) -> dict:
    return YAML(typ="safe").load(FOLDER / name)["spec"]


def workers_of(name: str) -> list[tuple[dict, dict, dict]]:
    """Each group of workers, its pod, and what a container of that may use."""
    groups = spec_of(name)["workerGroupSpecs"]
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
    *with_gpus, _ = workers_of("kuberay-gpu.yaml")
    for _, _, limits in with_gpus:
        assert limits["nvidia.com/gpu"] == str(scaling.resources_per_worker["GPU"])
    config.layout(scaling.num_workers * scaling.num_gpus_per_worker)


def test_a_job_has_the_cluster_of_the_other_file_and_a_run_to_continue():
    """No workers on the head, and time for a notice before a pod is killed."""
    job, cluster = spec_of("kuberay-gpu-job.yaml"), spec_of("kuberay-gpu.yaml")
    assert job["rayClusterSpec"] == cluster
    _, script, config, name = job["entrypoint"].split()
    load_config(ROOT / config, "storage", run_name=name)
    assert (ROOT / Path(script).relative_to("/home/ray/gpt2")).exists()
    assert job["backoffLimit"] and job["ttlSecondsAfterFinished"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group, pod, _ in workers_of("kuberay-gpu.yaml"):
        assert group["replicas"] == group["minReplicas"] == 0
        for variable in pod["containers"][0].get("env", []):
            assert int(variable["value"]) < pod["terminationGracePeriodSeconds"]


def test_images_have_the_pinned_ray():
    pinned = re.search(r"ray\[.*==(.*)", (ROOT / "requirements-gpu.txt").read_text())[1]
    files = [*FOLDER.glob("*.yaml"), FOLDER / "Dockerfile"]
    files.append(ROOT / "ci/places/anyscale/BUILD.yaml")
    text = "\n".join(path.read_text() for path in files)
    found = re.findall(r'(?:rayVersion: "|\w+/ray:)([\d.]+)', text)
    assert {*found} == {pinned}

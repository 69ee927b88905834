"""The machines in configs/compute that Kubernetes makes, and what the notebook asks for."""

import re
from pathlib import Path

import pytest
from conftest import ROOT
from ray.train import ScalingConfig
from ruamel.yaml import YAML

from trainkit.config_files import load_config

FOLDER = ROOT / "configs/compute"


def job_of(name: str) -> dict:
    return YAML(typ="safe").load(FOLDER / name)["spec"]


def spec_of(name: str) -> dict:
    return job_of(name)["rayClusterSpec"]


def workers_of(name: str) -> list[tuple[dict, dict, dict]]:
    """Each group of workers, its pod, and what a container of that may use."""
    groups = spec_of(name)["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in groups]
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods]
    return [*zip(groups, pods, limits)]


def scaling_of(name: str) -> ScalingConfig:
    return ScalingConfig(**load_config(ROOT / "configs" / name, "storage").scaling)


def test_kuberay_nodes_are_those_that_configurations_ask_for():
    """A TPU slice; and nodes of eight GPUs, of which the 7B model needs four."""
    ((group, pod, limits),) = workers_of("kuberay-tpu-v6e.yaml")
    scaling = scaling_of("gpt2-124m-tpu-v6e.yaml")
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert (topology, group["numOfHosts"]) == (scaling.topology, scaling.num_workers)
    assert limits["google.com/tpu"] == str(scaling.resources_per_worker["TPU"])

    scaling = scaling_of("gpt2-7b-gpu.yaml")
    *with_gpus, _ = workers_of("kuberay-gpu.yaml")
    for _, _, limits in with_gpus:
        assert limits["nvidia.com/gpu"] == str(scaling.resources_per_worker["GPU"])
    assert sum(group["maxReplicas"] for group, _, _ in with_gpus) >= scaling.num_workers


JOBS = ["kuberay-gpu.yaml", "kuberay-tpu-v6e.yaml"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_a_run_to_continue_and_time_for_a_notice(name):
    """No workers on the head, and pods are killed later than their workers are to save."""
    job, cluster = job_of(name), spec_of(name)
    check_command(job["entrypoint"])
    assert job["backoffLimit"] and job["ttlSecondsAfterFinished"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group, pod, limits in workers_of(name):
        assert group["replicas"] == group["minReplicas"] == ("tpu" in name)
        if {*limits} - {"memory", "cpu"}:  # it trains
            (variable,) = pod["containers"][0]["env"]
            assert int(variable["value"]) < pod["terminationGracePeriodSeconds"]


def check_command(command: str) -> None:
    """That of a job: with a configuration, a name, and keys to change."""
    _, script, config, name, *changes = command.split()
    script = Path(script)
    if script.is_absolute():
        script = script.relative_to("/home/ray/gpt2")
    assert (ROOT / script).exists()
    config = load_config(ROOT / config, "storage", run_name=name)
    keys = {"scaling.num_workers", "controller_failure_limit"}
    assert {x.partition("=")[0] for x in changes} <= keys


def test_an_anyscale_job_has_the_machines_of_the_other_file():
    """Of which it uses all GPUs."""
    job, machines = (
        YAML(typ="safe").load(FOLDER / x) for x in ("anyscale-job.yaml", "aws.yaml")
    )
    assert job["compute_config"] == machines
    check_command(job["entrypoint"])
    assert job["entrypoint"].endswith("scaling.num_workers=4") and job["max_retries"]
    assert (ROOT / job["requirements"]).exists()


def test_images_have_the_pinned_ray():
    pinned = re.search(r"ray\[.*==(.*)", (ROOT / "requirements-gpu.txt").read_text())[1]
    files = [*FOLDER.glob("*.yaml"), FOLDER / "Dockerfile"]
    files.append(ROOT / "ci/places/anyscale/BUILD.yaml")
    text = "\n".join(path.read_text() for path in files)
    found = re.findall(r'(?:rayVersion: "|\w+/ray:)([\d.]+)', text)
    assert {*found} == {pinned}

"""The machine descriptions in configs/compute: form, and agreement with configs/."""

import re

import pytest
import yaml
from conftest import ROOT

import trainkit.config

RAY = re.search(r"^ray\[.*==(.*)$", (ROOT / "requirements-gpu.txt").read_text(), re.M)


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / "configs/compute" / name).read_text())


ANYSCALE = {"aws.yaml": r"[a-z]\w*\.\w+", "gce.yaml": r"[a-z]\w*-\w+(-\w+)*"}


@pytest.mark.parametrize("name, instance", ANYSCALE.items())
def test_anyscale(name, instance):
    """The user-facing ComputeConfig, whose head runs no work."""
    config = read(name)
    assert config.keys() <= {"head_node", "worker_nodes", "enable_cross_zone_scaling"}
    head, groups = config["head_node"], config["worker_nodes"]
    assert head.keys() == {"instance_type", "resources"}
    assert head["resources"] == {"CPU": 0} and groups
    for group in groups:
        assert group.keys() <= {"name", "instance_type", "min_nodes", "max_nodes"}
        assert group["max_nodes"] >= group.get("min_nodes", 1) > 0
    for node in (head, *groups):
        assert re.fullmatch(instance, node["instance_type"])


def groups_of(name: str) -> list[dict]:
    cluster = read(name)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert cluster["spec"]["rayVersion"] == RAY[1]
    head = cluster["spec"]["headGroupSpec"]
    groups = cluster["spec"]["workerGroupSpecs"]
    for group in [head, *groups]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert group["rayStartParams"] == {}  # required, even if empty
        assert container["resources"]["limits"] == container["resources"]["requests"]
        # Every node sees the storage that load_config looks for.
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == "/mnt/cluster_storage"
        assert mount["name"] in [volume["name"] for volume in pod["volumes"]]
    for group in groups:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    return groups


def limits(group: dict) -> dict:
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_kuberay_tpu_slice_is_the_one_that_the_configuration_asks_for():
    config = trainkit.config.load_config(ROOT / "configs/gpt2-124m-tpu-v6e.yaml")
    (group,) = groups_of("kuberay-tpu-v6e.yaml")
    selector = group["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == config.topology
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
    assert config.accelerator_type == "TPU-V6E"
    chips = int(limits(group)["google.com/tpu"])
    assert group["numOfHosts"] == config.worker_range[0]
    assert chips == config.devices_per_worker == config.chips // group["numOfHosts"]


def test_kuberay_gpu_nodes_stand_beside_cpu_nodes():
    gpu, cpu = groups_of("kuberay-gpu.yaml")
    assert limits(gpu)["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in limits(cpu) and cpu["maxReplicas"] > 0


def test_template_runs_on_an_image_with_this_ray():
    (entry,) = read("BUILD.yaml")
    image = entry["cluster_env"]["image_uri"]
    assert re.fullmatch(rf"anyscale/ray:{re.escape(RAY[1])}-py31[12]-cu\d+", image)

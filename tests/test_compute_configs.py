"""The machine descriptions in configs/compute: form, and agreement with configs/."""

import re
from collections.abc import Iterator

import pytest
import yaml
from conftest import ROOT

from trainkit.config import load_config

RAY = re.search(r"^ray\[.*==(.*)$", (ROOT / "requirements-gpu.txt").read_text(), re.M)


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / "configs/compute" / name).read_text())


ANYSCALE = {"aws.yaml": r"[a-z]\w*\.\w+", "gce.yaml": r"[a-z]\w*-\w+(-\w+)*"}


@pytest.mark.parametrize("name, instance", ANYSCALE.items())
def test_anyscale(name, instance):
    """The user-facing ComputeConfig, whose head runs no work."""
    config = read(name)
    head, (group,) = config["head_node"], config["worker_nodes"]
    assert config.keys() <= {"head_node", "worker_nodes", "enable_cross_zone_scaling"}
    assert head == {"instance_type": head["instance_type"], "resources": {"CPU": 0}}
    assert group.keys() == {"instance_type", "min_nodes", "max_nodes"}
    assert group["max_nodes"] >= group["min_nodes"] > 0
    assert all(re.fullmatch(instance, x["instance_type"]) for x in (head, group))


def groups_of(name: str) -> Iterator[tuple[dict, dict, dict]]:
    """Each group of workers, its pod, and what a container of that may use."""
    spec = read(name)["spec"]
    assert spec["rayVersion"] == RAY[1]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert group["rayStartParams"] == {}  # required, even if empty
        resources = container["resources"]
        assert resources["limits"] == resources["requests"]
        # Every node sees the storage that load_config looks for.
        (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/mnt/cluster_storage"}
        if group is not spec["headGroupSpec"]:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            yield group, pod, resources["limits"]


def test_kuberay_nodes_are_those_that_the_configurations_ask_for():
    """A TPU slice; and nodes of eight GPUs, with others beside them for tokenizing."""
    config = load_config(ROOT / "configs/gpt2-124m-tpu-v6e.yaml")
    ((group, pod, limits),) = groups_of("kuberay-tpu-v6e.yaml")
    selector, google = pod["nodeSelector"], "cloud.google.com/gke-tpu"
    assert selector[f"{google}-topology"] == config.topology
    assert selector[f"{google}-accelerator"] == "tpu-v6e-slice"
    assert config.accelerator_type == "TPU-V6E"
    assert group["numOfHosts"] == config.worker_range[0]
    assert limits["google.com/tpu"] == str(config.devices_per_worker)
    (_, _, gpu), (group, _, cpu) = groups_of("kuberay-gpu.yaml")
    assert gpu["nvidia.com/gpu"] == "8"
    assert "nvidia.com/gpu" not in cpu and group["maxReplicas"] > 0


def test_template_runs_on_an_image_with_this_ray():
    (entry,) = read("BUILD.yaml")
    image = entry["cluster_env"]["image_uri"]
    assert re.fullmatch(rf"anyscale/ray:{re.escape(RAY[1])}-py31[12]-cu\d+", image)

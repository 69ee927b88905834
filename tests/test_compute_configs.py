"""The machines in configs/compute that Kubernetes makes, and what the notebook asks for.

The registry's own checks see to the others.
"""

import re
from collections.abc import Iterator

from conftest import ROOT
from ruamel.yaml import YAML

RAY = re.search(r"(?m)^ray\[.*==(.*)$", (ROOT / "requirements-gpu.txt").read_text())[1]


def read(name: str):
    return YAML(typ="safe").load(ROOT / "configs/compute" / name)


def groups_of(name: str) -> Iterator[tuple[dict, dict, dict]]:
    """Each group, its pod, and what a container of that may use; the head is the first."""
    spec = read(name)["spec"]
    assert spec["rayVersion"] == RAY
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert group["rayStartParams"] == {}  # required, even if empty
        resources = container["resources"]
        assert resources["limits"] == resources["requests"]
        # Every node sees the storage that load_config looks for.
        (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/mnt/cluster_storage"}
        yield group, pod, resources["limits"]


def test_kuberay_nodes_are_those_that_the_notebook_asks_for(tutorial):
    """A TPU slice; and nodes of eight GPUs, with others beside them for tokenizing."""
    scaling = tutorial.SCALING["v6e_4x4"]
    _, (group, pod, limits) = groups_of("kuberay-tpu-v6e.yaml")
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert (topology, group["numOfHosts"]) == (scaling.topology, scaling.num_workers)
    assert limits["google.com/tpu"] == str(scaling.resources_per_worker["TPU"])
    _, (_, _, gpu), (_, _, cpu) = groups_of("kuberay-gpu.yaml")
    assert gpu["nvidia.com/gpu"] == "8" and "nvidia.com/gpu" not in cpu


def test_template_runs_on_an_image_with_this_ray():
    (entry,) = read("BUILD.yaml")
    image = entry["cluster_env"]["image_uri"]
    assert re.fullmatch(rf"anyscale/ray:{re.escape(RAY)}-py31[12]-cu\d+", image)

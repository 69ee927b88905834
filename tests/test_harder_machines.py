"""What only some machines have: libraries, plugins, flags, other systems."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray.data

import trainkit.token_files
import trainkit.workers

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("layout", ["cublas/lib/lib{}.so.12", "cu13/lib/lib{}.so.13"])
def test_pips_cuda_comes_before_the_nodes(tmp_path, monkeypatch, layout):
    """What a library needs is then there already; as a stand-in, one of numpy's."""
    paths = [
        tmp_path / "nvidia" / layout.format(name)
        for name in ("nvJitLink", "cublasLt", "cudnn_graph", "cudart")
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(np.random.bit_generator.__file__, path)
    (tmp_path / "nvidia/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    trainkit.workers.load_cuda_libraries()
    mapped = Path("/proc/self/maps").read_text()
    assert [str(path) in mapped for path in paths] == [True, True, True, False]


def test_a_worker_has_its_nodes_library_path(cluster, small):
    """Where the plugins for the network are; a node here has none that is its own."""
    name, variables = (
        "LD_LIBRARY_PATH",
        trainkit.workers.environment(small(platform="gpu")),
    )

    @ray.remote(runtime_env={"env_vars": {name: variables[name]}})
    def found():
        return os.environ[name].split(":")

    nodes = os.environ.get(name, "").split(":")
    assert ray.get(found.remote()) == [*nodes, "/usr/local/nvidia/lib64"]


def test_your_xla_flags_stay(small, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # one of yours adds a flag
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=there")
    cpu = trainkit.workers.environment(small(devices_per_worker=4))["XLA_FLAGS"]
    assert cpu == "--xla_dump_to=there --xla_force_host_platform_device_count=4"
    gpu = trainkit.workers.environment(small(platform="gpu"))["XLA_FLAGS"]
    ours = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
    assert gpu == f"{ours} --xla_dump_to=there"  # last wins
    monkeypatch.delenv("XLA_FLAGS")
    tpu = trainkit.workers.environment(small(platform="tpu"))
    assert "XLA_FLAGS" not in tpu


def test_windows_is_refused_in_a_sentence():
    script = "import importlib.metadata, sys; sys.platform = 'win32'; import trainkit"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "runs on Linux and macOS, found 'win32'" in result.stderr

"""The real train step, compiled for GPUs that are not there."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
has_plugin = any(importlib.util.find_spec(name) for name in PLUGINS)
needs_plugin = pytest.mark.skipif(
    not has_plugin,
    reason="JAX's CUDA plugin, which compiles for GPUs, is not installed: "
    f"pip install 'jax[cuda12]=={importlib.metadata.version('jax')}'",
)


def compile_for_gpu(*options: str) -> subprocess.CompletedProcess:
    """`benchmarks/gpu_compile.py` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "benchmarks/gpu_compile.py", *options, "--json"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )


def report_on(config: str, *options: str) -> dict:
    result = compile_for_gpu(f"configs/{config}", *options)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.extra
@needs_plugin
def test_gpt2_124m_for_an_h200():
    """32 windows at once: what the program moves, and what must not come back."""
    report = report_on("gpt2-124m.yaml", "batch_size=32")
    assert report["windows_at_once"] == 32
    assert report["attention_kernels"] == 24  # cuDNN's, forward and backward
    assert report["moved_gb"] <= 105
    assert report["temporary_gib"] <= 14
    # Nothing is scattered but the gradients of the two embeddings, and no float32 logits
    # are ever written.
    assert sorted(report["scatters"]) == ["f32[1024,768]", "f32[50304,768]"]
    logits = [a for a in report["largest"] if a.endswith(",50304]")]
    assert logits and not any(array.startswith("f32") for array in logits)
    assert not any(",12,64]" in array for array in report["copies_gb"])  # q, k, v
    assert report["collectives"] == []


@pytest.mark.extra
@needs_plugin
def test_gradients_meet_once_a_step_on_eight_gpus():
    report = report_on("gpt2-124m.yaml", "--gpus=8")
    sums = report["collectives"]
    assert {c["kind"] for c in sums} == {"all-reduce"}
    assert not any(c["in_loop"] for c in sums)
    assert all("bf16" not in c["arrays"] for c in sums)
    padding = (50_304 - 50_257) * 768
    expected = 4 * (report["parameters"] + padding + 1)  # in bytes, and the loss
    assert sum(c["bytes"] for c in sums) == pytest.approx(expected, rel=1e-3)


@pytest.mark.extra
@needs_plugin
def test_fsdp_scatters_the_sums_on_eight_gpus():
    report = report_on("gpt2-124m.yaml", "--gpus=8", "fsdp=8")
    assert not any(c["in_loop"] for c in report["collectives"])
    kinds = {c["kind"] for c in report["collectives"] if c["bytes"] >= 2**20}
    assert kinds == {"all-gather", "reduce-scatter"}  # no matrix is summed whole


@pytest.mark.skipif(has_plugin, reason="it is installed")
def test_without_the_plugin_it_says_what_to_install():
    result = compile_for_gpu("configs/gpt2-124m.yaml")
    assert result.returncode == 1
    assert "pip install 'jax[cuda12]" in result.stderr

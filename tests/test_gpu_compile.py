"""The real train step, compiled for GPUs that are not there."""

import json

import pytest
from conftest import ROOT
from samples import python

pytestmark = [pytest.mark.extra, pytest.mark.usefixtures("compiler_for_gpus")]


def report_on(config: str, *options: str) -> dict:
    """What `benchmarks/gpu_compile.py` says, in a process of its own."""
    arguments = f"configs/{config}", *options, "--json"
    said = python(ROOT / "benchmarks/gpu_compile.py", *arguments, XLA_FLAGS=None)
    return json.loads(said.splitlines()[-1])


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


def test_gradients_meet_once_a_step_on_eight_gpus():
    report = report_on("gpt2-124m.yaml", "--gpus=8")
    sums = report["collectives"]
    assert {c["kind"] for c in sums} == {"all-reduce"}
    assert not any(c["in_loop"] for c in sums)
    assert all("bf16" not in c["arrays"] for c in sums)
    padding = (50_304 - 50_257) * 768
    expected = 4 * (report["parameters"] + padding + 1)  # in bytes, and the loss
    assert sum(c["bytes"] for c in sums) == pytest.approx(expected, rel=1e-3)


FINETUNE = "gpt2-finetune.yaml init_from=scratch platform=gpu num_workers=1"


@pytest.mark.parametrize(
    "run, gpu, parameters, room",
    [
        ("stories.yaml num_workers=4", "a10g", 124_439_808, 16.5),
        ("stories.yaml num_workers=4", "l4", 124_439_808, 16.5),
        (FINETUNE, "a10g", 124_439_808, 16.5),
        ("gpt2-7b-gpu.yaml", "h100", 6_658_404_352, 25),
    ],
)
def test_each_configuration_fits_its_gpu(run, gpu, parameters, room):
    """In the three quarters of a GPU's GiB that JAX takes at once."""
    report = report_on(*run.split(), f"--gpu={gpu}")
    assert report["parameters"] == parameters
    assert report["attention_kernels"] and report["total_gib"] < room
    if "stories" in run:  # as benchmarks/README.md says
        assert report["windows_at_once"] == 16
    if "7b" in run:  # a GPU holds a part, and no matrix is summed whole
        assert report["state_gib"] < 12 * parameters / 32 / 2**30 + 0.1
        sums = [c for c in report["collectives"] if c["kind"] == "all-reduce"]
        assert sum(c["bytes"] for c in sums) < 2**24

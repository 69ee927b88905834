"""Memory: what is counted is what the compiler says, and the error says what helps."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
import ray.train

import trainkit.memory
from trainkit.config import load_config

ROOT = Path(__file__).resolve().parent.parent


def compiled_bytes(tutorial, config) -> int:
    state = jax.eval_shape(lambda: tutorial.create_state(config))
    shape = (config.batch_size, config.block_size + 1)
    windows = jax.ShapeDtypeStruct(shape, np.uint16)
    memory = (
        tutorial.train_step.lower(state, windows, config).compile().memory_analysis()
    )
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


@pytest.mark.parametrize(
    "change",
    [{"device_batch_size": 16}, {"loss_chunks": 2}, {"scan_layers": True}],
    ids=str,
)
def test_savings_are_those_of_the_compiled_program(tutorial, change):
    """Within a factor of two: it is a count of the large arrays."""
    base = dict(
        num_workers=1,
        batch_size=32,
        block_size=256,
        n_layer=6,
        n_embd=128,
        vocab_size=4_096,
    )
    before = load_config(ROOT / "configs/smoke.yaml", **base)
    after = load_config(ROOT / "configs/smoke.yaml", **base | change)
    counted = [sum(trainkit.memory.count(c).values()) for c in (before, after)]
    compiled = [compiled_bytes(tutorial, c) for c in (before, after)]
    assert 0.5 < counted[0] / compiled[0] < 2
    assert 0.5 < (counted[0] - counted[1]) / (compiled[0] - compiled[1]) < 2


@pytest.mark.parametrize(
    "name, num_workers, row",
    [
        ("gpt2-124m", 1, "`gpt2-124m.yaml`: `loss_chunks: 2`"),  # an H200
        ("gpt2-xl", 4, "`gpt2-xl.yaml` | 16 | 16 "),  # a v6e slice of 16 chips
    ],
)
def test_need_is_that_of_the_compiled_program(name, num_workers, row):
    """As benchmarks/README.md has it; XLA's own copies aren't counted."""
    config = load_config(ROOT / f"configs/{name}.yaml", num_workers=num_workers)
    table = (ROOT / "benchmarks/README.md").read_text()
    row = re.escape(row) + r".*?([\d.]+) GiB.*?([\d.]+) GiB"
    compiled = sum(map(float, re.search(row, table).groups())) * 2**30
    assert 0.75 < sum(trainkit.memory.count(config).values()) / compiled < 1.25


def test_only_a_part_of_a_block_is_divided_by_tensor():
    """Its input, the norms' outputs, and the sum after attention are whole everywhere."""
    counts = [
        trainkit.memory.count(
            load_config(
                ROOT / "configs/gpt2-124m.yaml",
                num_workers=1,
                devices_per_worker=devices,
                tensor_parallel=devices,
            )
        )
        for devices in (1, 4)
    ]
    ratio = counts[1]["activations"] / counts[0]["activations"]
    assert ratio == pytest.approx((4 + 8 / 4) / 12)


@pytest.mark.parametrize(
    "n, text",
    [(0, "0 B"), (1000, "0.977 KiB"), (2**20, "1 MiB"), (1010 * 2**30, "0.986 TiB")],
)
def test_sizes_are_never_written_with_an_exponent(n, text):
    assert trainkit.memory.size(n) == text


def test_parameters_are_counted_as_they_are(tutorial):
    config = load_config(ROOT / "configs/gpt2-124m.yaml")
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    found = trainkit.memory.parameters(config) - padding
    assert found == tutorial.count_parameters(config) == 124_439_808


def test_keys_that_help_are_named_and_can_be_set():
    """In order, each as a line that could stand in the file."""
    config = load_config(ROOT / "configs/gpt2-124m.yaml", num_workers=8)
    lines = trainkit.memory.advice(config).splitlines()[1:]
    changes = [line.split(" saves about ")[0].strip() for line in lines]
    assert changes == ["device_batch_size: 15", "loss_chunks: 4", "fsdp: 8"]
    assert all(line.endswith("GiB") for line in lines)
    alone = load_config(ROOT / "configs/gpt2-124m.yaml", num_workers=1, attention="xla")
    assert "  attention: cudnn saves" in trainkit.memory.advice(alone).splitlines()[1]


def test_worker_that_runs_out_of_memory_says_what_helps(tutorial, cluster, small):
    """Memory that no machine has; XLA raises what it raises on a GPU."""

    def loop(settings):
        jax.block_until_ready(jax.numpy.zeros(2**44))

    config = small(max_failures=0)
    with pytest.raises(ray.train.TrainingFailedError) as error:
        tutorial.make_trainer(config, loop).fit()
    for words in (
        "Out of memory allocating",
        "too little memory",
        "device_batch_size: 2",
    ):
        assert words in str(error.value)

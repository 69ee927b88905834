"""What follows from a configuration."""

import os
import pickle
from datetime import date

import pytest

from trainkit.config import TrainingConfig


def test_how_devices_share_a_batch():
    """A device takes as few equal parts as fit."""
    split = TrainingConfig(fsdp=2, tensor_parallel=2).layout(8)
    assert [*split.values()] == [8, "2 x 2 x 2", 480, 120, "4 x 30"]
    config = TrainingConfig(batch_size=12, device_batch_size=8)
    assert config.micro_batches(12) == 2 and config.micro_batches(6) == 1
    assert TrainingConfig(batch_size=14, device_batch_size=5).micro_batches(14) == 7
    assert TrainingConfig(batch_size=37).layout(1)["micro-batches"] == "37 x 1"


def test_the_defaults_are_gpt2_small_as_nanogpt_trains_it():
    """And mean the same on all machines; without end, restarts are -1."""
    config = TrainingConfig(max_failures=-1)
    shape = config.vocab_size, config.block_size, config.n_layer, config.n_head
    assert (*shape, config.n_embd) == (50_257, 1_024, 12, 12, 768)
    batch = 12 * 40  # batch_size x gradient_accumulation_steps
    assert (config.batch_size, config.decay_steps) == (batch, 600_000)
    assert (config.learning_rate, config.warmup_steps) == (6e-4, 2_000)
    adamw = config.weight_decay, config.beta1, config.beta2, config.grad_clip
    assert adamw == (0.1, 0.9, 0.95, 1.0)
    places = os.path.abspath("data"), os.path.abspath("runs")
    assert (config.data_dir, config.storage_path) == places


def test_tokens_take_two_bytes_if_all_ids_fit():
    """The largest of 65,536 is 65,535."""
    types = [TrainingConfig(vocab_size=2**16 + more).token_dtype for more in (0, 1)]
    assert types == ["uint16", "uint32"]


@pytest.mark.parametrize("model", [{1: 2}, {"t": (1, 2)}, {"day": date(2026, 1, 1)}])
def test_keys_of_ones_own_are_json(model):
    """As a checkpoint gives them back, which is compared."""
    with pytest.raises(ValueError, match=r"model\."):
        TrainingConfig(model=model)
    config = TrainingConfig(model={"a": [1, {"b": None}]})
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    assert {**config.model} == config.model and config.model.read == {"a"}


def test_when_a_checkpoint_follows():
    """An evaluation, and what is between. Some stay, and Ray records the last one anyway."""
    steps = {"eval_interval": 8, "save_interval": 3, "keep_every": 6, "max_steps": 18}
    config = TrainingConfig(**steps)
    due = {
        name: [step for step in range(1, 19) if getattr(config, name)(step)]
        for name in ("evaluates", "saves", "keeps")
    }
    assert due["evaluates"] == [8, 16, 18]
    assert due["saves"] == [3, 6, 8, 9, 12, 15, 16, 18]
    assert due["keeps"] == [6, 12]
    plain = TrainingConfig(eval_interval=8, max_steps=18)
    assert [step for step in range(1, 19) if plain.saves(step)] == due["evaluates"]
    assert not any(map(plain.keeps, range(19)))

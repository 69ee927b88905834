"""What follows from a configuration."""

from trainkit.config import TrainingConfig


def test_how_devices_share_a_batch():
    """A device takes as few equal parts as fit."""
    split = TrainingConfig(fsdp=2, tensor_parallel=2).layout(8)
    assert [*split.values()] == [8, "2 x 2 x 2", 480, 120, "4 x 30"]
    config = TrainingConfig(batch_size=12, device_batch_size=8)
    assert config.micro_batches(1) == 2 and config.micro_batches(2) == 1
    assert TrainingConfig(batch_size=14, device_batch_size=5).micro_batches(1) == 7
    assert TrainingConfig(batch_size=37).layout(1)["micro-batches"] == "37 x 1"

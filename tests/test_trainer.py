"""Real JaxTrainer runs: two workers, one JAX program."""

import dataclasses
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import ray.data
import ray.train
from accidents import log_of, saved
from conftest import read_arrays
from samples import add_from_guide

import trainkit.checkpoints


@pytest.mark.slow
def test_two_workers_train_evaluate_and_save(tutorial, reference):
    config, result = reference, ray.train.Result.from_path(reference.run_path)
    log = log_of(config)
    assert [line["step"] for line in log] == list(range(1, 73))
    losses = {line["step"]: line["val_loss"] for line in log if "val_loss" in line}
    assert [*losses] == list(range(12, 73, 12))
    assert log[-1]["loss"] < log[0]["loss"] - 0.2

    # The latest and the best are kept, and the result says where.
    best = sorted(losses, key=losses.get)[:2]
    assert saved(config) == [f"step_{step:08d}" for step in sorted({72, *best})]
    assert result.get_best_checkpoint("val_loss", "min").path.endswith(f"{best[0]:08d}")
    assert result.metrics["val_loss"] == pytest.approx(losses[72])
    assert result.checkpoint.path == str(config.run_path / "step_00000072")
    model = trainkit.checkpoints.load_model(tutorial.create_model, result.checkpoint)
    assert model.config == config  # which is the checkpoint's metadata
    arrays = read_arrays(result.checkpoint.path)
    found = [
        x for _, x in sorted(tutorial.named(model).items())
    ]  # model/..., the first
    for a, b in zip(found, arrays[: len(found)], strict=True):
        np.testing.assert_array_equal(a, b)

    # Written once: no second copy of the arrays anywhere in the run's folder.
    files = [x for x in Path(result.checkpoint.path).rglob("*") if x.is_file()]
    size = sum(file.stat().st_size for file in files)
    assert 0.5 < size / sum(array.nbytes for array in arrays) < 1.3


@pytest.mark.slow
def test_one_worker_continues_what_two_began(tutorial, cluster, reference):
    """With their losses but for rounding; saves between evaluations are never the best."""
    between = {"run_name": "fewer", "max_steps": 24, "checkpoint_interval": 5}
    config = dataclasses.replace(reference, **between)
    tutorial.make_trainer(config).fit()
    assert saved(config) == ["step_00000012", "step_00000024"]
    config = dataclasses.replace(config, max_steps=37)
    trainer = tutorial.make_trainer(config)
    trainer.scaling_config = dataclasses.replace(trainer.scaling_config, num_workers=1)
    best = {checkpoint.path[-2:] for checkpoint, _ in trainer.fit().best_checkpoints}
    assert best <= {"12", "24", "36", "37"}
    losses, expected = ([x["loss"] for x in log_of(c)] for c in (config, reference))
    assert losses[:24] == expected[:24]
    np.testing.assert_allclose(losses, expected[:37], atol=1e-4)


@pytest.mark.extra
def test_training_on_a_stream_of_documents(tutorial, cluster, small):
    """No token files: documents are tokenized while two workers train on them."""
    sizes = {"vocab_size": 50_257, "block_size": 64, "batch_size": 8}
    config = small(**sizes, warmup_steps=2)
    add_from_guide(tutorial, "train_on_stream")
    documents = ray.data.from_items([{"text": topics[name]} for name in [*topics][:12]])
    cut_windows = partial(tutorial.cut_windows, config=config)
    trainer = tutorial.make_trainer(config, tutorial.train_on_stream)
    trainer.datasets = {"windows": documents.map_batches(cut_windows, batch_size=256)}
    assert trainer.fit().error is None
    assert not Path(config.data_dir).exists()

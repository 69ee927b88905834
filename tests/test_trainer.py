"""Real JaxTrainer runs: two workers, one JAX program."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest
import ray.data
from accidents import log_of
from conftest import read_arrays
from notebook_module import abstract_state
from samples import add_from_guide, python

import trainkit.checkpoints
import trainkit.generate
import trainkit.sharding

ONE_PROCESS = """
import json, sys
sys.path[:0] = ["ci", "tests"]
import conftest
from accidents import losses_of_one_process
from samples import without_a_cluster
config = conftest.TrainingConfig(**json.loads(sys.argv[1]))
without_a_cluster(conftest.pytest.MonkeyPatch())
print(json.dumps(losses_of_one_process(conftest.load_notebook(), config)))
"""


@pytest.mark.slow
def test_two_workers_train_evaluate_and_save(tutorial, cluster, undisturbed):
    config, result = undisturbed(2)
    log = log_of(config)
    assert [line["step"] for line in log] == list(range(1, 73))
    losses = {line["step"]: line["val_loss"] for line in log if "val_loss" in line}
    assert [*losses] == list(range(12, 73, 12))
    assert log[-1]["loss"] < log[0]["loss"] - 0.2

    # The same numbers as one process with two devices: the two workers are one program.
    one = dataclasses.replace(config, num_workers=1)
    together = dataclasses.asdict(one) | {"devices_per_worker": 2}
    flags = "--xla_force_host_platform_device_count=2"  # each draws its own dropout
    printed = python(ONE_PROCESS, json.dumps(together), XLA_FLAGS=flags)
    expected = json.loads(printed.splitlines()[-1])
    np.testing.assert_allclose([line["loss"] for line in log], expected, atol=1e-4)

    # The latest and the best are kept, and the result says where.
    best = sorted(losses, key=losses.get)[:2]
    kept = {int(name[5:]) for name in trainkit.checkpoints.list_saved(config)}
    assert kept == {72, *best}
    assert result.get_best_checkpoint("val_loss", "min").path.endswith(f"{best[0]:08d}")
    assert result.metrics["step"] == 72
    assert result.metrics["val_loss"] == pytest.approx(losses[72])
    assert result.path == str(config.run_path)
    folder = config.run_path / "step_00000072"
    assert result.checkpoint.path == str(folder)
    model = trainkit.generate.load_model(tutorial.create_model, result.checkpoint)
    assert model.config == config  # which is the checkpoint's metadata

    # Written once: no second copy of the arrays anywhere in the run's folder.
    state = abstract_state(tutorial, one, trainkit.sharding.make_mesh(one))
    saved = read_arrays(folder)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state))
    assert sorted(leaf.shape for leaf in saved) == shapes
    size = sum(leaf.nbytes for leaf in saved)
    found = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    assert size * 0.5 < found < size * 1.3


@pytest.mark.extra
def test_training_on_a_stream_of_documents(tutorial, cluster, small):
    """No token files: documents are tokenized while two workers train on them."""
    sizes = {"vocab_size": 50_257, "block_size": 64, "batch_size": 8}
    config = small(**sizes, num_workers=2, warmup_steps=2)
    add_from_guide(tutorial, "train_on_stream")
    documents = ray.data.from_items([{"text": topics[name]} for name in [*topics][:12]])
    cut_windows = partial(tutorial.cut_windows, config=config)
    trainer = tutorial.make_trainer(config, tutorial.train_on_stream)
    trainer.datasets = {"windows": documents.map_batches(cut_windows, batch_size=256)}
    assert trainer.fit().error is None
    assert not Path(config.data_dir).exists()

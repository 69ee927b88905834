"""Real JaxTrainer runs: two workers, one JAX program."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import ray.data
import tiktoken
from accidents import batches_of, log_of
from conftest import ROOT
from samples import add_from_guide, loss_of

import trainkit.corpus
import trainkit.sharding

pytestmark = pytest.mark.slow
ONE_PROCESS = """
import json, sys
sys.path[:0] = ["ci", "tests"]
import conftest
from accidents import losses_of_one_process
config = conftest.TrainingConfig(**json.loads(sys.argv[1]))
conftest.start_ray()
print(json.dumps(losses_of_one_process(conftest.load_notebook(), config)))
"""


def test_two_workers_train_evaluate_and_save(tutorial, cluster, undisturbed):
    config, result = undisturbed(2)
    log = log_of(config)
    assert [line["step"] for line in log] == list(range(1, 73))
    evaluated = [line["step"] for line in log if "val_loss" in line]
    assert evaluated == list(range(12, 73, 12))
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_s"} <= log[0].keys()
    assert "mfu" not in log[0]  # a CPU's peak is not in the table
    assert log[-1]["loss"] < log[0]["loss"] - 0.2

    # The same numbers as one process with two devices: the two workers are one program.
    one = dataclasses.replace(config, num_workers=1)
    together = dataclasses.asdict(one) | {"devices_per_worker": 2}
    flags = "--xla_force_host_platform_device_count=2"  # each draws its own dropout
    printed = subprocess.run(
        [sys.executable, "-c", ONE_PROCESS, json.dumps(together)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    expected = json.loads(printed.splitlines()[-1])
    np.testing.assert_allclose([line["loss"] for line in log], expected, atol=1e-4)

    # The result is what step 7 says it is.
    assert result.metrics["step"] == 72
    assert result.metrics["val_loss"] == pytest.approx(log[-1]["val_loss"])
    assert result.path == str(config.run_path)
    assert result.checkpoint.path == str(config.run_path / "step_00000072")
    model = trainkit.generate.load_model(tutorial.create_model, result.checkpoint)
    assert model.config == config
    mesh = trainkit.sharding.make_mesh(one)
    windows = next(batches_of(tutorial, one, mesh, "val"))
    assert np.isfinite(loss_of(tutorial, model, windows))


@pytest.mark.extra  # test_notebook.py has one that is smaller
def test_training_on_a_stream_of_documents(tutorial, cluster, small):
    """No token files: documents are tokenized while two workers train on them."""
    config = small(
        vocab_size=50_257,
        block_size=64,
        batch_size=8,
        num_workers=2,
        warmup_steps=2,
    )
    texts = trainkit.corpus.load(config)["train"]["text"][:12]
    tokenizer = tiktoken.get_encoding("gpt2")
    tokens = [t for x in texts for t in (*tokenizer.encode_ordinary(x), 50_256)]
    documents = datasets.Dataset.from_dict({"text": texts})
    add_from_guide(tutorial, "train_on_stream")
    cut_windows = partial(tutorial.cut_windows, config=config)
    stream = ray.data.from_huggingface(documents).map_batches(
        cut_windows, batch_size=256
    )
    windows = np.stack([row["tokens"] for row in stream.take_all()])
    assert windows.dtype == np.uint16
    joined = [*windows[:, :-1].ravel(), windows[-1, -1]]
    assert joined == tokens[: len(joined)] and len(tokens) - len(joined) < 64

    trainer = tutorial.make_trainer(config, tutorial.train_on_stream)
    trainer.datasets = {"windows": stream}
    assert trainer.fit().error is None
    assert not Path(config.data_dir).exists()

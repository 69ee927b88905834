"""Storage on an object store: a real S3 server on this machine."""

import dataclasses
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tiktoken
from accidents import (
    assert_equal_runs,
    free_port,
    in_the_background,
    kill,
    log_of,
    train_loop_of,
    wait_for,
)
from conftest import start_ray, stop_ray
from ray.train.v2._internal.execution.storage import delete_fs_path
from samples import without_a_cluster

from trainkit import checkpoints, corpus, generate, lock, token_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3 server with an empty bucket; gives the log of what it was asked for."""
    port, requests = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [Path(sys.executable).with_name("moto_server"), "-p", str(port)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": requests.open("wb")}
    server = subprocess.Popen(command, **streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        wait_for(lambda: b"Running on" in requests.read_bytes(), what="the S3 server")
        boto3.client("s3").create_bucket(Bucket="models")
        yield requests
        server.terminate()


@pytest.fixture
def bucket(reference, server):
    """The URL of a folder in the bucket, to which the processes of a new cluster may write."""
    stop_ray()
    start_ray()
    yield "s3://models/runs"
    stop_ray()


def test_save_kill_resume_prune(tutorial, reference, bucket, server):
    """And the log in the bucket has each step once, though an object can't grow."""
    changes = {"run_name": "killed", "max_steps": 48, "checkpoint_interval": 30}
    config = dataclasses.replace(reference, storage_path=bucket, **changes)
    staging = checkpoints.staging(config)

    def writing() -> bool:  # to the disk, before it goes to the store
        return any((staging / "1").glob("step_*tmp*"))

    fit = tutorial.make_trainer(config, train_loop_of(tutorial)).fit
    with in_the_background(fit) as finish:
        saved = partial(checkpoints.list_saved, config)  # to go on from
        wait_for(saved, pause=0.5, what="a checkpoint")
        wait_for(writing, pause=0.002, what="another one")
        kill(config, 1)
        result = finish()
    assert result.error is None and result.metrics["step"] == config.max_steps
    assert_equal_runs(config, reference)

    # The two workers of a node share a download, once a restart.
    fetches = r"GET /models/runs/killed/step_\d+/_METADATA "
    assert len(re.findall(fetches, server.read_text())) == 1

    # Pruned to the two best and the latest, though step 30 was saved without an evaluation;
    # and nothing is left on the disk: what the killed worker was writing was written again.
    lines = [line for line in log_of(config) if "val_loss" in line]
    best = sorted(lines, key=lambda line: line["val_loss"])[:2]
    kept = {f"step_{line['step']:08d}" for line in [*best, lines[-1]]}
    assert checkpoints.list_folders(config) == sorted(kept, reverse=True)
    assert list(staging.glob("*/*")) == []

    model = generate.load_model(
        tutorial.create_model, result.get_best_checkpoint("val_loss", "min")
    )
    assert model.config.run_path == config.run_path


def test_a_recorded_checkpoint_that_is_gone_does_not_end_the_run(
    server, small, recorded
):
    config = small(storage_path="s3://models/runs", run_name="gone")
    recorded.append("step_00000010")
    checkpointer = checkpoints.Checkpointer(config)
    checkpointer.save({"kernel": np.ones((8, 8), np.float32)}, 20)
    checkpointer.wait()
    gone = checkpoints.in_storage(config, "step_00000010")
    delete_fs_path(gone.filesystem, gone.path)  # Ray's, which raises if it isn't there
    assert checkpoints.list_saved(config) == ["step_00000020"]


def test_text_in_a_bucket(tutorial, server, small, monkeypatch):
    """It is tokenized in the order of the files' names."""
    without_a_cluster(monkeypatch)
    for number in range(3):
        texts = [f"Document {20 * number + i} of many" for i in range(20)]
        part, place = pa.table({"body": texts}), f"s3://models/books/{number}.parquet"
        pyarrow.parquet.write_table(part, place, row_group_size=5)
    options = {"text_column": "body", "val_fraction": 0.1, "vocab_size": 50_257}
    options |= {"eval_steps": 1, "batch_size": 1}
    config = small(dataset="s3://models/books/*.parquet", **options)
    manifest = tutorial.prepare_dataset(config)
    train = token_files.open_tokens(config, "train").tolist()
    expected = [f"Document {n} of many<|endoftext|>" for n in range(60) if n % 10]
    assert tiktoken.get_encoding("gpt2").decode(train) == "".join(expected)
    assert manifest["documents"] == 60 and manifest["source"]["files"] == 3
    assert tutorial.prepare_dataset(config) == manifest

    pyarrow.parquet.write_table(part, place)  # the same rows
    with pytest.raises(FileExistsError, match="another source: digest was"):
        tutorial.prepare_dataset(config)
    with pytest.raises(FileNotFoundError, match="no file matches s3://models/none"):
        corpus.read(small(dataset="s3://models/none/*.parquet"))


def test_bucket_that_does_not_exist(server, small):
    with pytest.raises(OSError, match="storage_path: cannot write to s3://nowhere/"):
        with lock.hold(small(storage_path="s3://nowhere/runs")):
            raise AssertionError

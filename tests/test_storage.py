"""Checkpoints in an object store: a real S3 server on this machine."""

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
import pytest
from accidents import (
    assert_equal_losses,
    free_port,
    in_the_background,
    kill,
    log_of,
    train_loop_of,
    wait_for,
    world_sizes,
)
from conftest import start_ray, stop_ray

from trainkit import checkpoints

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An S3 server with an empty bucket, which the processes of a new cluster may use."""
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
        stop_ray()
        start_ray()
        yield requests
        stop_ray()
        server.terminate()


@pytest.fixture
def bucket(tutorial, reference, server, monkeypatch):
    """A configuration with its storage in the bucket, for which the notebook is edited."""
    monkeypatch.setattr(tutorial, "save", checkpoints.save)
    monkeypatch.setattr(tutorial, "restore", checkpoints.restore)
    changes = {"run_name": "killed", "max_steps": 48, "checkpoint_interval": 30}
    return dataclasses.replace(reference, storage_path="s3://models/runs", **changes)


def test_save_kill_resume_prune(tutorial, reference, bucket):
    """And the log in the bucket has each step once, though an object can't grow."""
    staging = Path(tempfile.gettempdir())

    def uploading() -> bool:  # the third one; two are on record
        return len(log_of(bucket)) >= 30 and any(
            staging.glob(f"{bucket.run_name}-*/1/*")
        )

    fit = tutorial.make_trainer(bucket, train_loop_of(tutorial, 0.02)).fit
    with in_the_background(fit) as finish:
        wait_for(uploading, pause=0.002, what="an upload")
        kill(bucket, 1)
        result = finish()
    assert world_sizes(bucket) == [2, 2]
    assert result.error is None and result.metrics["step"] == bucket.max_steps
    assert_equal_losses(bucket, reference)

    # Pruned to the two best and the latest, though step 30 was saved without an evaluation.
    lines = [line for line in log_of(bucket) if "val_loss" in line]
    best = sorted(lines, key=lambda line: line["val_loss"])[:2]
    kept = {line["step"] for line in [*best, lines[-1]]}
    recorded = {Path(c.path).name for c, _ in result.best_checkpoints}
    assert {int(name[5:13]) for name in recorded} | {48} == kept
    model = checkpoints.load_model(
        tutorial.create_model, result.get_best_checkpoint("val_loss", "min")
    )
    assert model.config == bucket

    # A run goes on in the bucket; a fork begins there; without Ray's record, none starts over.
    longer = dataclasses.replace(bucket, max_steps=60)
    assert tutorial.make_trainer(longer).fit().metrics["step"] == 60
    assert_equal_losses(longer, reference)

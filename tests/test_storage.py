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


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The URL of a bucket of a server, which the processes of a new cluster may use."""
    port, log = free_port(), tmp_path / "log"
    command = [Path(sys.executable).with_name("moto_server"), "-p", str(port)]
    server = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    keys = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}
    place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    for name, value in (keys | place | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    wait_for(lambda: b"Running on" in log.read_bytes(), what="the S3 server")
    boto3.client("s3").create_bucket(Bucket="models")
    stop_ray()
    start_ray()
    yield "s3://models/runs"
    stop_ray()
    server.terminate()


@pytest.mark.slow
def test_save_kill_resume_prune(tutorial, reference, bucket, monkeypatch):
    """The log has each step once, though an object can't grow."""
    changes = {"run_name": "killed", "max_steps": 48, "checkpoint_interval": 30}
    config = dataclasses.replace(reference, storage_path=bucket, **changes)
    monkeypatch.setattr(tutorial, "save", checkpoints.save)
    monkeypatch.setattr(tutorial, "restore", checkpoints.restore)
    staged = Path(tempfile.gettempdir())

    def uploading() -> bool:  # the third checkpoint, which nobody evaluated
        return len(log_of(config)) >= 30 and any(staged.glob("killed-*/1/step_*_*"))

    fit = tutorial.make_trainer(config, train_loop_of(tutorial, 0.02)).fit
    with in_the_background(fit) as finish:
        wait_for(uploading, pause=0.002, what="an upload")
        kill(config, 1)
        result = finish()
    assert world_sizes(config) == [2, 2]
    assert_equal_losses(config, reference)

    # Pruned to the two best and the latest.
    lines = [line for line in log_of(config) if "val_loss" in line]
    best = sorted(lines, key=lambda line: line["val_loss"])[:2]
    recorded = {int(x.path[-17:-9]) for x, _ in result.best_checkpoints}
    assert recorded | {48} == {line["step"] for line in [*best, lines[-1]]}
    checkpoint = result.get_best_checkpoint("val_loss", "min")
    model = checkpoints.load_model(tutorial.create_model, checkpoint)
    assert model.config == config

    # A finished run goes on.
    config = dataclasses.replace(config, max_steps=60)
    assert tutorial.make_trainer(config).fit().metrics["step"] == 60
    assert_equal_losses(config, reference)

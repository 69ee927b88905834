"""Runs in `s3://`, on a real server in this process."""

import os
import re
import tarfile
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import boto3
import jax.numpy as jnp
import numpy as np
import pytest
import ray.train
from accidents import (
    as_worker,
    assert_one_worker_continues,
    in_the_background,
    kill,
    log_of,
    starts_of,
    train_loop_of,
    wait_for,
)
from conftest import ROOT, cluster_with
from etils import epath
from moto.server import ThreadedMotoServer
from orbax.checkpoint import v1 as orbax
from pyarrow import fs
from ray.train import collective
from samples import python

from trainkit import checkpoint_reader, s3


@pytest.fixture(scope="module")  # s3fs keeps the address that it found first
def server():
    """A server with a bucket `models`, which the processes of a new cluster may use."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    variables = {
        "AWS_ENDPOINT_URL_S3": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    with cluster_with(variables):
        boto3.client("s3").create_bucket(Bucket="models")
        yield server
    server.stop()


@pytest.fixture
def bucket(server, tmp_path, tutorial, monkeypatch):
    """An address in it, and what the page's cell does for a run there."""
    for name in ("newest", "save"):
        monkeypatch.setattr(tutorial, name, vars(s3)[name])
    return f"s3://models{tmp_path}"


def uploads_the_second(config) -> bool:
    """Whether a worker has a part of another checkpoint than the first, which is recorded."""
    place = f"checkpoints-*/{str(config.run_path)[5:]}/1/step_00000016_*"
    second = any(Path(tempfile.gettempdir()).glob(place))
    record = "checkpoint_manager_snapshot.json"
    return second and (config.run_path / record).exists()


@pytest.mark.slow
def test_a_kill_during_an_upload(tutorial, reference, bucket, tmp_path):
    """The run goes on from the checkpoint before; each worker has half of the state.

    The log has each step once, though an object can't grow.
    """
    changes = {"run_name": "a run", "max_steps": 24, "storage_path": bucket, "fsdp": 2}
    config = replace(reference, **changes, max_failures=1)

    loop = train_loop_of(tutorial, 0.1)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as finish:
        wait_for(lambda: uploads_the_second(config), pause=0.01, what="an upload")
        log = log_of(config)
        kill(config, 1)
        result = finish()
    assert len(starts_of(config)) == 2
    assert 8 <= len(log) < 24
    assert log_of(config)[:8] == log[:8]  # to the digits of tokens_per_s: not again
    losses, expected = (
        [x["loss"] for x in log_of(c)[:24]] for c in (config, reference)
    )
    np.testing.assert_allclose(losses, expected, atol=1e-4)

    # On this node, nothing stays of what was uploaded, or of the worker that was killed.
    place = Path(tempfile.gettempdir(), f"checkpoints-{os.getuid()}")
    assert not [*(place / str(config.run_path)[5:]).rglob("step_*")]

    # Pruned to the two best and the latest.
    losses = {x["step"]: x["val_loss"] for x in log_of(config) if "val_loss" in x}
    best = sorted(losses, key=losses.get)[:2]
    found = {int(Path(x.path).name[5:13]) for x, _ in result.best_checkpoints}
    assert found == {24, *best}
    checkpoint = result.get_best_checkpoint("val_loss", "min")
    model = checkpoint_reader.load_model(
        checkpoint, tutorial.create_model, tutorial.named
    )
    assert model.config == config
    assert_one_worker_continues(tutorial, config)


def test_an_upload_is_tried_again(bucket, monkeypatch):
    """Ray does so, after some errors; nothing that it needs may be gone by then."""
    told = []
    monkeypatch.setattr(ray.train, "report", lambda metrics, **how: told.append(how))
    folder, numbers = epath.Path(bucket) / "run", {"x": jnp.arange(3.0)}

    def loop() -> bool:
        uploaded = s3.save(folder, numbers, 8, {})
        how = told[0]
        for place, name in ((tarfile.TarFile, "add"), (fs, "copy_files")):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="Slow"):
                patch.setattr(place, name, raise_slow_down)
                how["checkpoint_upload_fn"](None, how["checkpoint_dir_name"])
            assert not uploaded.done()
        how["checkpoint_upload_fn"](None, how["checkpoint_dir_name"])
        return uploaded.done()

    assert as_worker(loop)
    path = as_worker(lambda: s3.newest(folder))
    np.testing.assert_array_equal(orbax.load(path, numbers)["x"], numbers["x"])


def test_a_checkpoint_of_which_ray_isnt_told(bucket, monkeypatch):
    """It is uploaded to the first worker's folder, and is the newest."""
    monkeypatch.setattr(ray.train, "report", None)
    folder, numbers = epath.Path(bucket) / "run", {"x": jnp.arange(3.0)}
    name = "step_00000008_1_12345678"
    with monkeypatch.context() as patch:
        patch.setattr(collective, "broadcast_from_rank_zero", lambda own: name)
        as_worker(lambda: s3.save(folder, numbers, 8, None).result())
    path = as_worker(lambda: s3.newest(folder))
    assert path.name == name
    np.testing.assert_array_equal(orbax.load(path, numbers)["x"], numbers["x"])


def test_runs_of_one_name_in_two_buckets_share_nothing_on_a_node(monkeypatch):
    """Nor do those of two people."""
    paths = [epath.Path(f"s3://{name}/runs/mine") for name in "ab"]
    places = {s3._place(path) for path in paths}
    monkeypatch.setattr(os, "getuid", lambda: 4_321)
    places |= {s3._place(path) for path in paths}
    assert len(places) == 4 and len({place.parents[2] for place in places}) == 2


def raise_slow_down(*given, **named):
    raise OSError("AWS Error SLOW_DOWN: Slow Down")


@pytest.mark.extra
def test_the_file_to_start_from_in_a_bucket(server):
    """With the guide's lines. Launched once more, it continues."""
    text = (ROOT / "examples/survive.py").read_text()
    lines, launch = text.split('if __name__ == "__main__":')
    guide = (ROOT / "docs/guide.md").read_text()
    (block,) = re.findall(r"```python\n(from trainkit.s3.*?)```", guide, re.DOTALL)
    (sent,) = re.findall(r"send the package by `(ray.init.*?)`", guide)
    lines += block.replace("my-bucket", "models")
    launch = textwrap.dedent(launch).replace("ray.init()", sent)
    said = []
    for steps in ("steps=24", "steps=32"):
        program = lines + launch.replace("steps=24", steps)
        said.append(python(program, PYTHONPATH=str(ROOT), RAY_ADDRESS="local"))
    assert "step 24 | loss 0.000408" in said[0]
    assert "continues at step 24" in said[1] and "step 32" in said[1]
    assert "step 24 |" not in said[1]


@pytest.mark.extra
def test_a_connection_that_is_lost_during_a_save(
    tutorial, reference, bucket, server, monkeypatch
):
    """The workers start again, and continue from the checkpoint before."""
    config = replace(reference, run_name="lost", max_steps=24, storage_path=bucket)
    loop = train_loop_of(tutorial, 0.05)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as finish:
        wait_for(lambda: uploads_the_second(config), pause=0.01, what="an upload")
        host, port = server.get_host_and_port()
        server.stop()
        time.sleep(5)
        back = ThreadedMotoServer(host, port=port, verbose=False)
        back.start()  # with what was stored, which this process keeps
        assert finish().metrics["step"] == config.max_steps
    losses, expected = (
        [x["loss"] for x in log_of(c)[:24]] for c in (config, reference)
    )
    assert losses == expected

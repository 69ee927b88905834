"""Real JaxTrainer runs of two workers, and every way to die: the run ends undisturbed."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import boto3
import jax
import numpy as np
import pytest
import ray.train
from accidents import (
    as_worker,
    assert_equal_runs,
    in_the_background,
    kill,
    last_step,
    log_of,
    lose,
    saved,
    starts_of,
    train_loop_of,
    wait_for,
)
from conftest import ROOT, start_ray, stop_ray
from moto.server import ThreadedMotoServer
from pyarrow import fs
from samples import run_from_guide

from trainkit import buckets, checkpoints, corpus, runs

RECORD = "checkpoint_manager_snapshot.json"


def evaluate(tutorial, config, model) -> float:
    """As the loop does it, in this process."""
    batches = tutorial.read_validation(config, jax.sharding.get_mesh())
    return np.mean([tutorial.eval_step(model, x, config) for x in batches])


def goes_on_alone(tutorial, config) -> None:
    """One worker restores what two saved at the end."""
    abstract = tutorial.abstract_state(config, jax.sharding.get_mesh())
    search = buckets.newest if "://" in config.storage_path else tutorial.newest
    path = as_worker(partial(search, config.run_path))
    state = tutorial.unnamed(tutorial.restore(path, tutorial.named(abstract)), abstract)
    last = log_of(config)[-1]
    assert state.step == last["step"]
    loss = evaluate(tutorial, config, state.model)
    assert loss == pytest.approx(last["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_two_workers_train_evaluate_and_save(tutorial, cluster, reference):
    config, result = reference, ray.train.Result.from_path(reference.run_path)
    log, last = log_of(config), config.max_steps
    assert [line["step"] for line in log] == list(range(1, last + 1))
    losses = {line["step"]: line["val_loss"] for line in log if "val_loss" in line}
    assert [*losses] == list(range(8, last + 1, 8))
    assert log[-1]["loss"] < log[0]["loss"] - 0.2

    # The latest and the best are kept, and the result says where.
    best = sorted(losses, key=losses.get)[:2]
    assert saved(config) == [f"step_{step:08d}" for step in sorted({last, *best})]
    assert result.metrics["val_loss"] == pytest.approx(losses[last])
    assert result.checkpoint.path == str(config.run_path / saved(config)[-1])

    # The model in the best is the one that was evaluated.
    checkpoint = result.get_best_checkpoint("val_loss", "min")
    model = checkpoints.load_model(checkpoint, tutorial.create_model, tutorial.named)
    assert evaluate(tutorial, config, model) == pytest.approx(losses[best[0]], abs=1e-5)
    goes_on_alone(tutorial, config)


DRIVER = """
import sys, time
from pathlib import Path
sys.path[:0] = ["tests", "ci"]
from accidents import after_each_line
from conftest import TrainingConfig, load_notebook, start_ray
start_ray("{}")
tutorial = load_notebook()
tutorial.SCALING["cpu"].resources_per_worker["CPU"] = 2  # a node for each worker

def wait(line):
    while not Path({!r}).exists():
        time.sleep(0.1)
    time.sleep(0.3)

def loop(settings):
    with after_each_line(wait):
        tutorial.train_loop_per_worker(settings)

tutorial.make_trainer(TrainingConfig(**{}), loop).fit()
"""


@pytest.mark.slow
def test_one_accident_after_the_other(tutorial, reference, head, tmp_path, monkeypatch):
    """A second launch is refused, for the run is in use.

    A node goes away while a checkpoint is written, and another one comes in its place. Then
    the driver dies, while a checkpoint is written. A checkpoint is deleted, and then Ray's
    record emptied, as a full disk does: Ray refuses both. Without a record, the run goes on.
    """
    monkeypatch.setattr(runs, "_PATIENCE", 1)
    head.add_node(num_cpus=3)  # room for one worker and its data tasks, as on the head
    head.wait_for_nodes()
    config = replace(reference, run_name="accidents")
    refused = tmp_path / "refused"
    driver = DRIVER.format(head.address, str(refused), asdict(config))
    trainer = tutorial.make_trainer(config, tutorial.train_loop_per_worker)
    second = partial(trainer.train_loop_per_worker, trainer.train_loop_config)

    def writing(count: int) -> bool:
        assert process.poll() is None
        return any(config.run_path.glob("*tmp*")) and len(saved(config)) >= count

    with subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT) as process:
        try:
            wait_for(lambda: last_step(config), what="the first launch")
            holder = (config.run_path / "locked-by.txt").read_text()
            with pytest.raises(RuntimeError, match=f"is in use by {holder}"):
                as_worker(second)
            refused.touch()
            wait_for(lambda: last_step(config) > 1, what="that it goes on")
            assert (config.run_path / "locked-by.txt").read_text() == holder
            wait_for(lambda: writing(1), pause=0.01, what="a checkpoint being written")
            lose(head, *head.worker_nodes)
            head.add_node(num_cpus=3)
            wait_for(lambda: writing(2), pause=0.01, what="another one")
        finally:
            process.kill()
    log = log_of(config)
    assert log[-1]["step"] < config.max_steps
    total = ray.cluster_resources()["CPU"]
    wait_for(lambda: ray.available_resources().get("CPU") == total, what="its end")
    record = config.run_path / RECORD
    recorded = json.loads(record.read_text())["latest_checkpoint_result"]
    newest = recorded["checkpoint_dir_name"]
    harms = {
        "does not exist anymore": (config.run_path / newest).rmtree,
        "Expecting value": lambda: record.write_text(""),
    }
    for words, harm in harms.items():
        harm()
        with pytest.raises(Exception, match=words):
            tutorial.make_trainer(config, tutorial.train_loop_per_worker).fit()
    record.unlink()
    result = tutorial.make_trainer(config, tutorial.train_loop_per_worker).fit()
    assert result.metrics["step"] == config.max_steps
    assert log_of(config)[:8] == log[:8]  # to the digits of tokens_per_s: not again
    assert_equal_runs(config, reference)


KILLS = [[signal.SIGKILL]] * 3 + [[signal.SIGTERM, signal.SIGKILL]] * 2


@pytest.mark.extra
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("signals", [*KILLS, [signal.SIGSTOP]])
def test_worker_killed_at_random(tutorial, cluster, reference, tmp_path, rank, signals):
    """Also after a SIGTERM, as on a node that is taken away. A stopped one is noticed."""
    config = replace(reference, run_name=tmp_path.name, stall_timeout_s=40.0)
    step = int(np.random.default_rng().integers(1, config.max_steps // 2))
    print(f"at step {step}")
    fit = tutorial.make_trainer(config, train_loop_of(tutorial)).fit
    with in_the_background(fit) as result:
        wait_for(lambda: last_step(config) >= step, what="the step")
        for number in signals:
            with contextlib.suppress(ProcessLookupError):
                kill(config, rank, number)
            time.sleep(0.3)
        result()
    assert len(starts_of(config)) == 2
    assert_equal_runs(config, reference)


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """The URL of a bucket of a server, which the processes of a new cluster may use."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    variables = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="models")
    stop_ray()
    start_ray()
    yield f"s3://models{tmp_path}"
    stop_ray()
    server.stop()


@pytest.mark.slow
def test_object_store(tutorial, reference, bucket, tmp_path, monkeypatch):
    """A kill while checkpoints are uploaded ends a launch. The next one goes on.

    The log has each step once, though an object can't grow. Each worker has half of the state.
    """
    changes = {"run_name": "a run", "max_steps": 24, "storage_path": bucket, "fsdp": 2}
    config = replace(reference, **changes, max_failures=0)

    def uploading() -> bool:  # another checkpoint than the first
        place = f"checkpoints-*/models{tmp_path}/a run/1/step_00000016_*"
        second = any(Path(tempfile.gettempdir()).glob(place))
        return second and (config.run_path / RECORD).exists()

    loop = train_loop_of(tutorial, 0.02)
    with in_the_background(tutorial.make_trainer(config, loop).fit) as finish:
        wait_for(uploading, pause=0.01, what="an upload")
        kill(config, 1)
        with pytest.raises(ray.train.TrainingFailedError):
            finish()
    log = log_of(config)
    result = tutorial.make_trainer(config, loop).fit()
    assert len(starts_of(config)) == 2
    assert log_of(config)[:8] == log[:8]  # to the digits of tokens_per_s: not again
    losses, expected = (
        [x["loss"] for x in log_of(c)[:24]] for c in (config, reference)
    )
    np.testing.assert_allclose(losses, expected, atol=1e-4)

    # Pruned to the two best and the latest.
    losses = {x["step"]: x["val_loss"] for x in log_of(config) if "val_loss" in x}
    best = sorted(losses, key=losses.get)[:2]
    found = {int(Path(x.path).name[5:13]) for x, _ in result.best_checkpoints}
    assert found == {24, *best}
    checkpoint = result.get_best_checkpoint("val_loss", "min")
    model = checkpoints.load_model(checkpoint, tutorial.create_model, tutorial.named)
    assert model.config == config
    goes_on_alone(tutorial, config)

    # Copied from the bucket to a folder, or from a folder to the bucket, it is refused, before
    # it starts over beside checkpoints, which Ray's copied record would delete.
    files, root = fs.FileSystem.from_uri(bucket)
    fs.copy_files(f"{root}/a run", f"{tmp_path}/a run", source_filesystem=files)
    there = {"destination_filesystem": files}
    fs.copy_files(str(reference.run_path), f"{root}/{reference.run_name}", **there)
    changed = ((config, str(tmp_path)), (reference, bucket))
    for copied in (replace(c, storage_path=place) for c, place in changed):
        before = sorted(path.name for path in copied.run_path.iterdir())
        with pytest.raises(ValueError, match="storage_path: .* and copied to"):
            tutorial.make_trainer(copied, loop)
        assert sorted(path.name for path in copied.run_path.iterdir()) == before


@pytest.mark.extra
def test_training_on_a_stream_of_documents(tutorial, cluster, small):
    """By the guide's two blocks: documents are tokenized while two workers train on them."""
    config = small(vocab_size=50_257, block_size=64, batch_size=8)
    names = vars(tutorial) | {"config": config, "dataset": corpus.builtin}
    run_from_guide("def train_on_stream(", names)
    found = run_from_guide("streamed = replace(", names)["result"].return_value
    assert found["step"] == 20 and found["loss"] < 10.8  # ln 50,257

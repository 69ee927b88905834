"""Storage on an object store: a real S3 server on this machine."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import boto3
import pyarrow as pa
import pyarrow.parquet
import pytest
import tiktoken
from accidents import (
    Accidents,
    assert_equal_runs,
    at_step,
    kill,
    log_of,
    train_loop_of,
    wait_for,
    worker_of,
)
from conftest import start_ray, stop_ray
from samples import byte_pairs
from scoring import score

import trainkit.checkpoints
import trainkit.corpus
import trainkit.generate
import trainkit.huggingface
import trainkit.lock
import trainkit.token_files
import trainkit.tokenizers

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def requests(tmp_path_factory) -> Path:
    """What the S3 server was asked for."""
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def bucket(requests):
    """The URL of an empty bucket, which this process and the cluster's may write to."""
    port = free_port()
    server = subprocess.Popen(
        [Path(sys.executable).with_name("moto_server"), "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=requests.open("wb"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        wait_for(lambda: answers(port), what="the S3 server")
        boto3.client("s3").create_bucket(Bucket="models")
        stop_ray()  # a new cluster, whose processes have these variables
        start_ray()
        yield "s3://models/runs"
        stop_ray()
        server.terminate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


SAVE = """
import sys
sys.path[:0] = {root!r}, {root!r} + "/ci"
from pathlib import Path
import jax
from notebook_module import initial_state, load_notebook
from trainkit.checkpoints import create_orbax, save_in_background
from trainkit.config import TrainingConfig
from trainkit.devices import make_mesh
rank = int(sys.argv[1])
jax.distributed.initialize("127.0.0.1:{port}", 2, rank)
tutorial = load_notebook()
config = TrainingConfig(**{settings!r})
state = initial_state(tutorial, config, make_mesh(config))
if rank == 1:  # what a worker that was killed left there; it takes a while to delete
    left = Path({folder!r}, "1", "saved.orbax-checkpoint-tmp")
    left.mkdir(parents=True)
    for number in range(20_000):
        (left / str(number)).touch()
orbax = create_orbax(config)
save_in_background(orbax, Path({folder!r}, str(rank), "saved"), state)
orbax.wait_until_finished()
"""


def test_each_worker_writes_when_its_own_folder_is_there(small, tmp_path):
    """Two real processes; the second takes longer to make its folder."""
    config = small(num_workers=2, storage_path="s3://models/runs")
    settings = dataclasses.asdict(config)
    folder, root = str(tmp_path), str(ROOT)
    script = SAVE.format(root=root, port=free_port(), settings=settings, folder=folder)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=300)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], errors
    names = [path.name for path in (tmp_path / "1" / "saved").iterdir()]
    assert "_METADATA" in names and not any(name.isdigit() for name in names)


def kill_while_writing(rank: int):
    """While a checkpoint is on its way to the disk, before it goes to the store."""

    def harm(config):
        worker = worker_of(config, rank)  # before, since the store takes a while
        staging = trainkit.checkpoints.staging(config) / str(rank)
        wait_for(lambda: any(staging.glob("step_*tmp*")), pause=0.002)
        os.kill(worker, signal.SIGKILL)

    return harm


def test_save_kill_resume_prune(tutorial, reference, bucket, requests):
    config = dataclasses.replace(reference, run_name="killed", storage_path=bucket)
    accident = Accidents(config, (at_step(14), kill_while_writing(1)))
    result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()
    accident.join()
    assert result.error is None and result.metrics["step"] == config.max_steps
    assert_equal_runs(config, reference)

    # The two workers of a node share a download, once a restart.
    fetched = re.findall(
        r"GET /models/runs/killed/step_\d+/_METADATA ", requests.read_text()
    )
    assert len(fetched) == 2

    # Pruned to the two best and the latest, here as there; and nothing left on the disk:
    # what the killed worker was writing has been written again.
    saved = trainkit.checkpoints.list_saved(config)
    assert saved == trainkit.checkpoints.list_saved(reference) and len(saved) <= 3
    assert list(trainkit.checkpoints.staging(config).glob("*/*")) == []

    model = trainkit.generate.load_model(
        tutorial.create_model, result.get_best_checkpoint("val_loss", "min")
    )
    assert model.config.run_path == config.run_path


def test_text_in_a_bucket(tutorial, bucket, small):
    """It is tokenized in the order of the files' names, by tasks of Ray Data."""
    texts = [f"Document {number} of many" for number in range(60)]
    for number in range(3):
        table = pa.table({"body": texts[number * 20 :][:20], "id": range(20)})
        with pa.BufferOutputStream() as parquet:
            pyarrow.parquet.write_table(table, parquet, row_group_size=5)
            body = parquet.getvalue().to_pybytes()
        key = f"books/part-{number}.parquet"
        boto3.client("s3").put_object(Bucket="models", Key=key, Body=body)
    config = small(
        dataset="s3://models/books/*.parquet",
        text_column="body",
        val_fraction=0.1,
        vocab_size=50_257,
        eval_steps=1,
        batch_size=1,
    )
    manifest = tutorial.prepare_dataset(config)
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    ids = [[*encode(text), 50_256] for text in texts]
    for split in ("train", "val"):  # each tenth
        expected = [x for n, x in enumerate(ids) if (n % 10 == 0) == (split == "val")]
        found = trainkit.token_files.open_tokens(config, split)
        assert found.tolist() == sum(expected, [])
    assert manifest["documents"] == 60 and manifest["source"]["files"] == 3
    assert tutorial.prepare_dataset(config) == manifest

    boto3.client("s3").put_object(Bucket="models", Key=key, Body=body + b"PAR1")
    with pytest.raises(FileExistsError, match="another source: digest was"):
        tutorial.prepare_dataset(config)
    with pytest.raises(FileNotFoundError, match="no file matches s3://models/none"):
        trainkit.corpus.read(small(dataset="s3://models/none/*.parquet"))


@pytest.mark.extra
def test_from_text_in_a_bucket_to_a_scored_model(tutorial, bucket, small, tmp_path):
    """With a tokenizer of its own; a worker is killed on the way, and no step is lost."""
    byte_pairs(tmp_path / "tokenizer.json", [*topics.values()], 600)
    table = pa.table({"text": [*topics.values()]})
    with pa.BufferOutputStream() as parquet:
        pyarrow.parquet.write_table(table, parquet, row_group_size=20)
        body = parquet.getvalue().to_pybytes()
    boto3.client("s3").put_object(Bucket="models", Key="text/a.parquet", Body=body)
    settings = {
        "dataset": "s3://models/text/",
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "vocab_size": 600,
        "block_size": 64,
        "val_fraction": 0.1,
        "num_workers": 2,
        "max_steps": 24,
        "decay_steps": 24,
        "eval_interval": 8,
        "log_interval": 1,
    }
    alone = small(run_name="alone", storage_path=str(tmp_path / "runs"), **settings)
    tutorial.prepare_dataset(alone)
    expected = tutorial.make_trainer(alone).fit()

    config = small(run_name="own", storage_path=bucket, **settings)
    assert tutorial.prepare_dataset(config)["source"]["tokenizer"] == config.tokenizer
    accident = Accidents(config, (at_step(12), kill(1)))
    result = tutorial.make_trainer(config, train_loop_of(tutorial)).fit()
    accident.join()
    assert result.metrics["loss"] == expected.metrics["loss"]
    assert_equal_runs(config, alone)

    model = trainkit.generate.load_model(
        tutorial.create_model, result.get_best_checkpoint("val_loss", "min")
    )
    (text,) = trainkit.generate.generate(model, ["The value of"], max_new_tokens=8)
    assert text.startswith("The value of")
    exported = trainkit.huggingface.export(model, tmp_path / "exported")
    tokenizer = trainkit.tokenizers.load(config.tokenizer)
    assert score(model, tokenizer, exported, tmp_path) == pytest.approx(3 / 5)


@pytest.mark.extra
def test_damaged_checkpoint_in_a_store(tutorial, reference, bucket):
    """It is refused, and the one before it used, by a run with more to do."""
    config = dataclasses.replace(reference, run_name="damaged", storage_path=bucket)
    assert tutorial.make_trainer(config).fit().error is None
    path = config.run_path / f"step_{config.max_steps:08d}" / "_METADATA"
    path.write_text(json.dumps({"tree_metadata": {}}))
    longer = dataclasses.replace(config, max_steps=config.max_steps + 5)
    result = tutorial.make_trainer(longer).fit()
    assert result.error is None and result.metrics["step"] == longer.max_steps
    assert [x["step"] for x in log_of(config)] == list(range(1, longer.max_steps + 1))
    losses = [[x["loss"] for x in log_of(c)] for c in (config, reference)]
    assert losses[0][: config.max_steps] == losses[1]


def test_bucket_that_does_not_exist(bucket, small):
    with pytest.raises(OSError, match="storage_path: cannot write to s3://nowhere/"):
        with trainkit.lock.hold(small(storage_path="s3://nowhere/runs")):
            raise AssertionError


def test_a_store_has_no_locks_and_the_last_launch_has_the_run(
    bucket, small, monkeypatch
):
    config = small(storage_path=bucket, run_name="launched-twice")
    monkeypatch.setattr(trainkit.lock, "joined", {})
    with trainkit.lock.hold(config) as first:
        trainkit.lock.joined[str(config.run_path)] = first
        trainkit.lock.confirm(config)
        with trainkit.lock.hold(config):
            with pytest.raises(RuntimeError, match="and this one ends"):
                trainkit.lock.confirm(config)
    with pytest.raises(RuntimeError, match="belongs to no launch"):
        trainkit.lock.confirm(config)  # nor is one there when both have ended

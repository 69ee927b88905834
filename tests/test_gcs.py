"""Runs in Google's storage, on a server of it, by step 2's functions."""

import time
from dataclasses import replace
from functools import partial

import pytest
from accidents import (
    assert_one_worker_continues,
    in_the_background,
    kill,
    log_of,
    saved,
    starts_of,
    train_loop_of,
    wait_for,
    whole,
)
from conftest import cluster_with
from places import GoogleStorage

from trainkit import checkpoint_reader


@pytest.fixture(scope="module")
def google(tmp_path_factory):
    """A server that the processes of a new cluster may use."""
    server = GoogleStorage(tmp_path_factory.mktemp("google"), "filesystem")
    server.start()
    with cluster_with(server.variables):
        yield server
    server.stop()


@pytest.fixture
def run(reference, google, tmp_path):
    """A function: the reference's configuration, with changes, in the bucket."""
    there = {"run_name": "a-run", "storage_path": f"gs://models{tmp_path}"}
    return lambda **changes: replace(reference, **there, **changes)


def assert_equal_so_far(config, reference) -> None:
    """Of what was logged, each step once, bit for bit."""
    lines = log_of(config)
    for key in ("step", "loss", "val_loss"):
        expected = [x.get(key) for x in log_of(reference)[: len(lines)]]
        assert [x.get(key) for x in lines] == expected


@pytest.mark.slow
def test_a_worker_is_killed(tutorial, run, reference):
    """The run ends as if nothing had happened. The best checkpoints and the latest are kept,
    and the model in the best is read from there.
    """
    config, loop = run(max_steps=24), train_loop_of(tutorial, 0.1)
    fit = partial(tutorial.fit, tutorial.make_trainer(config, loop))
    with in_the_background(fit) as finish:
        wait_for(lambda: saved(config), what="a checkpoint")
        time.sleep(0.5)
        kill(config, 1)
        result = finish()
    assert len(starts_of(config)) == 2
    assert_equal_so_far(config, reference)
    losses = {x["step"]: x["val_loss"] for x in log_of(config) if "val_loss" in x}
    assert [*losses] == [8, 16, 24]
    assert {int(name[5:]) for name in saved(config)} >= {
        24,
        min(losses, key=losses.get),
    }
    checkpoint = result.get_best_checkpoint("val_loss", "min")
    model = checkpoint_reader.load_model(
        checkpoint, tutorial.create_model, tutorial.named
    )
    assert model.config == config
    assert_one_worker_continues(tutorial, config)


@pytest.mark.extra
def test_an_outage_of_the_server(tutorial, run, google, reference):
    """The server ends during a save, and comes back."""
    config, loop = run(max_steps=24), train_loop_of(tutorial, 0.1)

    def saving() -> bool:
        begun = {path.name[:13] for path in config.run_path.glob("step_*")}
        return bool(saved(config)) and len(begun) > len(saved(config))

    fit = partial(tutorial.fit, tutorial.make_trainer(config, loop))
    with in_the_background(fit) as finish:
        wait_for(saving, pause=0.005, what="a second save")
        google.stop()
        time.sleep(5)
        google.start()
        assert finish().metrics["step"] == config.max_steps
    assert_equal_so_far(config, reference)


@pytest.mark.extra
def test_a_branch_begins_there(tutorial, run, reference):
    """And goes on as the run itself does, bit for bit."""
    config = run(max_steps=8)
    tutorial.fit(tutorial.make_trainer(config, tutorial.train_loop_per_worker))
    (path,) = whole(config)
    changes = {"run_name": "branch", "branch_from": str(path), "max_steps": 16}
    branch = replace(config, **changes)
    tutorial.fit(tutorial.make_trainer(branch, tutorial.train_loop_per_worker))
    losses = [(line["step"], line["loss"]) for line in log_of(branch)]
    assert losses == [(x["step"], x["loss"]) for x in log_of(reference)[8:16]]

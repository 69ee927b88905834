"""The loop in this process, as Ray Train's local mode runs it: what it logs, saves, reports."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import ray.train
from accidents import log_of, saved
from conftest import read_arrays
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer


@pytest.fixture
def play(tutorial, cluster, monkeypatch):
    """A function that runs the loop; gives the reports to Ray, (name, metrics) each."""
    reports = []

    def report(metrics, checkpoint, checkpoint_dir_name, checkpoint_upload_fn, **_):
        done = checkpoint_upload_fn(checkpoint, checkpoint_dir_name)
        reports.append((done.path[-13:], metrics))

    def run(config, notices=()):
        notices = iter(notices)
        reports.clear()
        monkeypatch.setattr(ray.train, "report", report)
        monkeypatch.setattr(
            ray.train, "get_preemption_info", lambda: next(notices, None)
        )
        settings = {"config": dataclasses.asdict(config), "tokens": None}
        JaxTrainer(
            tutorial.train_loop_per_worker,
            train_loop_config=settings,
            scaling_config=ScalingConfig(num_workers=0),
        ).fit()
        return list(reports)

    return run


@pytest.fixture
def odd(small, write_bins):
    """Intervals that don't divide one another, nor the number of steps.

    Of 33 windows in steps of 4, an epoch ends inside a batch.
    """
    config = small(
        **{"seed": 7, "n_layer": 1, "device_batch_size": 2, "checkpoint_interval": 5},
        **{"max_steps": 11, "log_interval": 3, "eval_interval": 4, "eval_steps": 3},
    )
    return write_bins(config, train_tokens=33 * 16 + 9)


def test_what_is_logged_saved_and_reported(tutorial, play, odd):
    """And a run of 11 steps that goes on, to 14, is that of a plain loop, bit for bit."""
    reports = play(odd)
    steps = [4, 5, 8, 10, 11]  # the last one, too
    assert saved(odd) == [f"step_{step:08d}" for step in steps]
    log = {line["step"]: line for line in log_of(odd)}
    assert [*log] == [3, 4, 5, 6, 8, 9, 10, 11]
    assert [step for step, line in log.items() if "val_loss" in line] == [4, 8, 11]
    lines = [{"val_loss": math.inf} | log[step] for step in steps]
    assert reports == list(zip(saved(odd), lines))

    longer = dataclasses.replace(odd, max_steps=14)
    reports = play(longer)  # Ray knows none here, so it is told of the last one
    assert [name[-2:] for name, _ in reports] == ["11", "12", "14"]
    log |= {line["step"]: line for line in log_of(longer)}

    mesh = tutorial.create_mesh(odd)
    state = tutorial.first_state(odd, tutorial.abstract_state(odd, mesh))
    validation = [*tutorial.read_batches(odd, mesh, "val", range(3))]
    batches = tutorial.read_batches(odd, mesh, "train", range(14))
    with jax.set_mesh(mesh):
        for step, windows in enumerate(batches, 1):
            state, metrics = tutorial.train_step(state, windows, odd)
            losses = [tutorial.eval_step(state.model, x, odd) for x in validation]
            metrics["val_loss"] = sum(losses) / len(losses)
            for name in log.get(step, {}).keys() & metrics.keys():
                assert log[step][name] == float(metrics[name]), (step, name)
            if step in (11, 14):
                arrays = read_arrays(odd.run_path / f"step_{step:08d}")
                expected = [x for _, x in sorted(tutorial.named(state).items())]
                jax.tree.map(np.testing.assert_array_equal, arrays, expected)


def test_a_run_that_diverges_ends_and_saves_nothing_bad(play, odd):
    wild = dataclasses.replace(odd, learning_rate=1e30, run_name="wild")
    with pytest.raises(FloatingPointError, match="diverged at step 2: .*learning_rate"):
        play(wild)
    assert not saved(wild) and not log_of(wild)


def test_a_notice_that_a_machine_goes_away_saves_once(play, odd):
    """It is asked for every ten steps, and stays until the machine is gone."""
    calm = {"max_steps": 35, "eval_interval": 35, "checkpoint_interval": 100}
    reports = play(dataclasses.replace(odd, **calm), [None, "soon", "soon"])
    assert [name for name, _ in reports] == ["step_00000020", "step_00000035"]
    assert [metrics["val_loss"] < math.inf for _, metrics in reports] == [False, True]

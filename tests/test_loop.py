"""The loop in this process, as Ray Train's local mode runs it: what it logs, saves, reports."""

import dataclasses
import math

import pytest
import ray.train
from accidents import log_of, saved
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer


@pytest.fixture
def play(tutorial, cluster, monkeypatch):
    """A function that runs the loop; gives the reports to Ray, (name, metrics) each."""
    reports, notices = [], []

    def report(metrics, checkpoint, checkpoint_dir_name, checkpoint_upload_fn, **_):
        done = checkpoint_upload_fn(checkpoint, checkpoint_dir_name)
        reports.append((done.path[-13:], metrics))

    def run(config, *found):
        reports.clear()
        notices[:] = found
        settings = {"config": dataclasses.asdict(config), "tokens": None}
        alone, loop = ScalingConfig(num_workers=0), tutorial.train_loop_per_worker
        JaxTrainer(loop, train_loop_config=settings, scaling_config=alone).fit()
        return list(reports)

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: notices.pop(0))
    return run


@pytest.fixture
def odd(small, write_bins):
    """Intervals that don't divide one another, nor the number of steps."""
    config = small(
        **{"n_layer": 1, "device_batch_size": 2, "checkpoint_interval": 5},
        **{"max_steps": 11, "log_interval": 3, "eval_interval": 4, "eval_steps": 3},
    )
    return write_bins(config)


def test_what_is_logged_saved_and_reported(play, odd):
    """Also of a run that goes on; Ray, which is new here, is told of its checkpoint."""
    reports, steps = play(odd, None), [4, 5, 8, 10, 11]  # the last one, too
    assert saved(odd) == [f"step_{step:08d}" for step in steps]
    log = {line["step"]: line for line in log_of(odd)}
    assert [*log] == [3, 4, 5, 6, 8, 9, 10, 11]
    assert [step for step, line in log.items() if "val_loss" in line] == [4, 8, 11]
    lines = [{"val_loss": math.inf} | log[step] for step in steps]
    assert reports == list(zip(saved(odd), lines))
    reports = play(dataclasses.replace(odd, max_steps=14))
    assert [name[-2:] for name, _ in reports] == ["11", "12", "14"]
    assert reports[0][1] == lines[-1]


def test_a_run_that_diverges_ends_and_saves_nothing_bad(play, odd):
    wild = dataclasses.replace(odd, learning_rate=1e30, run_name="wild")
    with pytest.raises(FloatingPointError, match="diverged at step 2: .*learning_rate"):
        play(wild)
    assert not saved(wild) and not log_of(wild)


def test_a_notice_that_a_machine_goes_away_saves_once(play, odd):
    """It is asked for every ten steps, until there is one."""
    calm = {"max_steps": 35, "eval_interval": 35, "checkpoint_interval": 100}
    reports = play(dataclasses.replace(odd, **calm), None, "soon")
    assert [name for name, _ in reports] == ["step_00000020", "step_00000035"]
    assert [metrics["val_loss"] < math.inf for _, metrics in reports] == [False, True]

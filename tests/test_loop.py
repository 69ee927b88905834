"""The loop in this process: what it trains on, evaluates, logs, saves, and reports.

Ray's part is played: `Blocks` for its datasets, and a list for its reports. test_trainer.py has
the same loop on real workers.
"""

import dataclasses
import faulthandler
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import ray.train
from conftest import SLICE, read_arrays
from notebook_module import initial_state
from samples import shuffled_in_plain_integers, without_a_cluster

from trainkit import checkpoints, launch, sharding, workers


def windows_of(config, split) -> np.ndarray:
    """All windows of a file, in its order, [windows, T + 1]."""
    tokens = np.fromfile(Path(config.data_dir) / f"{split}.bin", np.uint16)
    T = config.block_size
    return np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T]


@pytest.fixture
def play(tutorial, recorded, monkeypatch):
    """A function that runs the loop in this process.

    It returns the reports to Ray, (name, metrics) each, and what the watchdog was told.
    """
    without_a_cluster(monkeypatch)
    told, reports, known = [], [], []

    def report(metrics, checkpoint, checkpoint_dir_name, **_):
        assert Path(checkpoint.path).name == checkpoint_dir_name
        reports.append((checkpoint_dir_name, metrics))
        known.append(checkpoint)

    monkeypatch.setattr(workers, "watch", told.append)
    stop = "cancel_dump_traceback_later"
    monkeypatch.setattr(faulthandler, stop, lambda: told.append("stop"))
    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: None)

    def run(config):
        latest, mesh = known[-1] if known else None, sharding.make_mesh(config)
        monkeypatch.setattr(ray.train, "get_checkpoint", lambda: latest)
        monkeypatch.setattr(workers, "start_worker", lambda _: (config, mesh))
        config.run_path.mkdir(parents=True, exist_ok=True)
        told.clear(), reports.clear()
        with jax.set_mesh(mesh):
            tutorial.train_loop_per_worker(dataclasses.asdict(config))
        return list(reports), list(told)

    return run


@pytest.fixture
def odd(small, write_bins):
    """Intervals that don't divide one another, nor the number of steps.

    Of 33 windows in steps of 4, an epoch ends inside a batch.
    """
    config = small(
        **{"seed": 7, "n_layer": 1, "device_batch_size": 2},
        **{"max_steps": 11, "log_interval": 3, "eval_interval": 4, "eval_steps": 3},
        **{"checkpoint_interval": 5, "stall_timeout_s": 77.0},
    )
    return write_bins(config, train_tokens=33 * 16 + 9)


def test_what_is_logged_saved_and_reported(tutorial, play, odd):
    """And a run of 11 steps that goes on, to 14, is that of a plain loop, bit for bit.

    The order is that of all versions, or runs that go on would repeat windows.
    """
    reports, told = play(odd)
    saved = [f"step_{step:08d}" for step in (4, 5, 8, 10, 11)]
    assert [name for name, _ in reports] == saved  # the last step, too
    assert checkpoints.list_saved(odd) == saved[::-1]
    log = checkpoints.read_log(odd)
    assert [*log] == [3, 4, 5, 6, 8, 9, 10, 11]
    assert [step for step, line in log.items() if "val_loss" in line] == [4, 8, 11]
    lines = [log[step] for step in (4, 5, 8, 10, 11)]
    expected = [{"val_loss": math.inf} | line for line in lines]
    assert [metrics for _, metrics in reports] == expected
    assert told == [77.0] * 11 + ["stop"]

    longer = dataclasses.replace(odd, max_steps=14)
    reports, told = play(longer)
    assert [name for name, _ in reports] == ["step_00000012", "step_00000014"]
    assert told == [77.0] * 3 + ["stop"]
    log |= checkpoints.read_log(longer)

    mesh, found = sharding.make_mesh(odd), {}
    keys = [odd.seed * 4_294_967_296 + epoch for epoch in range(2)]
    order = [shuffled_in_plain_integers(i, 33, key) for key in keys for i in range(33)]
    batches = windows_of(odd, "train")[order[:56]].reshape(14, 4, 17)
    validation = windows_of(odd, "val")[:12].reshape(3, 4, 17)
    state = initial_state(tutorial, odd, mesh)
    with jax.set_mesh(mesh):
        for step, windows in enumerate(batches, 1):
            state, metrics = tutorial.train_step(state, windows, odd)
            losses = [tutorial.eval_step(state.params, x, odd) for x in validation]
            metrics["val_loss"] = sum(losses) / len(losses)
            found[step] = {name: float(value) for name, value in metrics.items()}
            if step in (11, 14):
                arrays = read_arrays(odd.run_path / f"step_{step:08d}")
                leaves = jax.tree.leaves(state._asdict())
                jax.tree.map(np.testing.assert_array_equal, arrays, leaves)
    for step, line in log.items():
        for name in line.keys() & found[step].keys():
            assert line[name] == found[step][name], (step, name)


def test_a_run_that_diverges_stops_and_saves_nothing_bad(play, odd):
    """When it next writes a line, which is at step 3."""
    wild = dataclasses.replace(odd, learning_rate=1e30, run_name="wild")
    reports, told = play(wild)
    assert told == [77.0] * 3 + ["stop"]
    assert not reports and not checkpoints.list_saved(wild)
    assert (wild.run_path / "diverged.txt").exists()


@pytest.mark.parametrize(
    "changes, use, resources",
    [
        ({"cpus_per_worker": 2.5}, (False, False), {"CPU": 2.5}),
        ({"platform": "gpu"}, (True, False), {"CPU": 0.5, "GPU": 1}),
        (SLICE | {"num_workers": 8}, (False, True), {"TPU": 4}),
    ],
)
def test_what_the_trainer_asks_of_ray(
    tutorial, small, monkeypatch, changes, use, resources
):
    """Nothing starts: what the request says."""
    guarded = []
    monkeypatch.setattr(launch, "guard", lambda *given: guarded.append(given))
    config = small(**{"num_workers": 2, "max_failures": 5} | changes)
    tutorial.make_trainer(config)
    ((trainer, *given),) = guarded
    functions = ("create_state", "train_step", "eval_step")
    assert given == [config, *(getattr(tutorial, name) for name in functions)]
    assert trainer.train_loop_config == dataclasses.asdict(config)
    run, kept = trainer.run_config, trainer.run_config.checkpoint_config
    assert (run.name, run.storage_path) == (config.run_name, config.storage_path)
    assert run.failure_config.max_failures == 5
    assert (kept.num_to_keep, kept.checkpoint_score_attribute) == (2, "val_loss")
    assert kept.checkpoint_score_order == "min"
    environment = workers.environment(config)
    assert run.worker_runtime_env == {"env_vars": environment}
    asked, backend = trainer.scaling_config, trainer.backend_config
    assert (asked.use_gpu, asked.use_tpu) == use
    assert asked.resources_per_worker == resources
    for name in ("num_workers", "topology", "accelerator_type"):
        assert getattr(asked, name) == getattr(config, name)
    # JAX is told to join the workers, also on CPUs.
    assert (backend.use_gpu, backend.use_tpu) == (not use[1], use[1])

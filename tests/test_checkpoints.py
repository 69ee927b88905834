"""Checkpoints: whole, pruned, readable for years, refused when damaged or half written."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import ray
import ray.train
from accidents import batches_of, copy_run, disk_of
from conftest import read_arrays
from flax import nnx
from notebook_module import abstract_state
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,
)
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

import trainkit.checkpoints
import trainkit.config
import trainkit.devices

pytestmark = pytest.mark.slow
DATA = Path(__file__).parent / "data"


@pytest.fixture
def finished(cluster, undisturbed):
    """A run of 72 steps that had six checkpoints, and its result."""
    return undisturbed(2)


@pytest.fixture
def copy_of(finished):
    """A function that copies the finished run under another name."""

    def copy(name: str, **changes):
        config = dataclasses.replace(finished[0], run_name=name, **changes)
        return copy_run(finished[0], config)

    return copy


def test_latest_and_best_are_kept(finished):
    config, result = finished
    kept = {int(name[5:]) for name in trainkit.checkpoints.list_saved(config)}
    lines = (config.run_path / "metrics.jsonl").read_text().splitlines()
    losses = {
        x["step"]: x["val_loss"] for x in map(json.loads, lines) if "val_loss" in x
    }
    assert len(losses) == 6
    best = sorted(losses, key=losses.get)[:2]
    assert kept == {72, *best}
    assert result.get_best_checkpoint("val_loss", "min").path.endswith(f"{best[0]:08d}")


def test_a_checkpoint_is_whole(tutorial, finished):
    """Parameters, both moments of AdamW, the step; and as metadata the configuration."""
    config, result = finished
    checkpointer = ocp.PyTreeCheckpointer()
    metadata = checkpointer.metadata(result.checkpoint.path).custom_metadata
    assert trainkit.config.TrainingConfig(**metadata) == config
    alone = dataclasses.replace(config, num_workers=1)
    state = abstract_state(tutorial, alone, trainkit.devices.make_mesh(alone))
    saved = read_arrays(result.checkpoint.path)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state))
    assert sorted(leaf.shape for leaf in saved) == shapes
    # Written once: no second copy of the arrays anywhere in the run's folder.
    size = sum(leaf.nbytes for leaf in saved)
    files = [f for f in Path(result.checkpoint.path).rglob("*") if f.is_file()]
    assert size * 0.5 < sum(f.stat().st_size for f in files) < size * 1.3


def hashes(tree) -> dict[str, str]:
    """What `data/old_checkpoint/arrays.json` holds of each array."""

    def digest(array):
        array = np.asarray(array)
        text = f"{array.dtype} {array.shape}".encode()
        return hashlib.sha256(text + array.tobytes()).hexdigest()[:16]

    return {k: digest(v) for k, v in ocp.tree.to_flat_dict(tree, sep=".").items()}


def test_an_old_checkpoint_is_still_read(tutorial):
    """The first of its layout: the model alone, and the whole state, bit for bit."""
    expected = json.loads((DATA / "old_checkpoint/arrays.json").read_text())
    checkpoint = ray.train.Checkpoint(DATA / "old_checkpoint/step_00000003")
    model = trainkit.generate.load_model(tutorial.create_model, checkpoint)
    params = hashes({"params": nnx.state(model, nnx.Param)})
    assert params == {k: v for k, v in expected.items() if k.startswith("params.")}

    config = dataclasses.replace(
        model.config, num_workers=1, run_name="old_checkpoint", storage_path=str(DATA)
    )
    assert trainkit.checkpoints.list_saved(config) == ["step_00000003"]
    target = abstract_state(tutorial, config, trainkit.devices.make_mesh(config))
    orbax = trainkit.checkpoints.create_orbax(config)
    state = trainkit.checkpoints.read(orbax, checkpoint.path, target)
    assert hashes(state) == expected and int(state.step) == 3


@pytest.mark.extra  # test_lost_runs.py has the same without a cluster
def test_checkpoint_of_another_model_is_told_by_its_shapes(tutorial, copy_of):
    config = copy_of("other", n_embd=64, max_failures=0)
    with pytest.raises(
        ray.train.TrainingFailedError, match="step_00000072 is .* of another model"
    ):
        tutorial.make_trainer(config).fit()
    assert not list(config.run_path.glob("*.refused"))
    assert trainkit.checkpoints.list_saved(config)[0] == "step_00000072"


@pytest.mark.skipif(
    not hasattr(os, "SCHED_IDLE"), reason="threads with idle priority are Linux's"
)
def test_saving_leaves_the_processor_to_training(tutorial, small, tmp_path):
    """New threads do the work, at idle priority; the calling one keeps its own."""
    config = small(n_embd=512)
    orbax = trainkit.checkpoints.create_orbax(config)
    state = tutorial.create_state(config)
    jax.block_until_ready(state)
    before = set(os.listdir("/proc/self/task"))
    trainkit.checkpoints.save_in_background(orbax, str(tmp_path / "step"), state)
    policies = set()
    for thread in set(os.listdir("/proc/self/task")) - before:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            policies.add(os.sched_getscheduler(int(thread)))
    orbax.wait_until_finished()
    assert os.SCHED_IDLE in policies  # others may have started threads meanwhile
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert len(read_arrays(tmp_path / "step")) == len(jax.tree.leaves(state))


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@pytest.mark.extra  # test_lost_runs.py fills a disk, too
def test_full_disk_while_saving(tutorial, finished, tmp_path):
    """There is room for two checkpoints and a half."""
    room = 2.5 * size_of(Path(finished[1].checkpoint.path)) / 2**20
    with disk_of(tmp_path / "disk", room) as disk:
        config = dataclasses.replace(
            finished[0], storage_path=str(disk), run_name="full", max_failures=0
        )
        no_space = pytest.raises(
            ray.train.TrainingFailedError, match="(?i)space|RESOURCE_EXHAUSTED"
        )
        with no_space:
            tutorial.make_trainer(config).fit()
        saved = trainkit.checkpoints.list_saved(config)
        assert saved[-1] == "step_00000012"
        for name in saved:
            arrays = read_arrays(config.run_path / name)
            assert all(np.isfinite(array).all() for array in arrays)


def test_full_disk_while_preparing(tutorial, cluster, small, tmp_path):
    with disk_of(tmp_path / "disk", 0.1) as disk:
        config = small(data_dir=str(disk / "data"), val_fraction=0.1)
        with pytest.raises(OSError, match=f"data_dir: the disk of {disk} has no room"):
            tutorial.prepare_dataset(config)
        with pytest.raises(ValueError, match=f"data_dir: {disk} is a mounted disk"):
            tutorial.prepare_dataset(small(data_dir=str(disk)))
        assert list(disk.iterdir()) == []


def test_resuming_late_is_as_quick_as_resuming_early(
    tutorial, cluster, small, write_bins
):
    """Time to the first batch at step 10 and at step 100,000: nothing is read in vain."""
    config = write_bins(small(max_steps=200_000), train_tokens=1_000_001)

    def seconds(step):
        start = time.monotonic()
        mesh = trainkit.devices.make_mesh(config)
        batches = batches_of(tutorial, config, mesh, first_step=step)
        with contextlib.closing(batches):
            next(batches).block_until_ready()
            return time.monotonic() - start

    seconds(0)  # start Ray Data's processes
    early, late = (min(seconds(step) for _ in range(3)) for step in (10, 100_000))
    print(f"first batch: {early:.2f} s at step 10, {late:.2f} s at step 100,000")
    assert late < 2 * early + 0.5


def test_a_save_that_is_not_evaluated_is_no_best_checkpoint(tutorial, small, tmp_path):
    """Ray's own bookkeeping of four evaluations, with four more saves between each two."""
    config = small(storage_path=str(tmp_path))
    kept = tutorial.make_run_config(config).checkpoint_config
    losses = {1_000: 3.0, 2_000: 2.5, 3_000: 2.9, 4_000: 3.3}

    async def report_all() -> CheckpointManager:
        storage = StorageContext(str(tmp_path), config.run_name)
        manager = CheckpointManager(kept, storage)
        for step in range(200, 4_001, 200):
            line = {"step": step, "loss": 1.0}
            if step in losses:
                line["val_loss"] = losses[step]
            saved = trainkit.checkpoints.in_storage(config, f"step_{step:08d}")
            Path(saved.path).mkdir(parents=True)
            metrics = trainkit.checkpoints.metrics_of(line)
            manager.register_checkpoint(_TrainingReport(saved, metrics, False))
        return manager

    manager = asyncio.run(report_all())
    left = [
        trainkit.checkpoints.step_of(path.name) for path in tmp_path.glob("*/step_*")
    ]
    assert sorted(left) == [2_000, 3_000, 4_000]
    assert manager.best_checkpoint_result.metrics["val_loss"] == 2.5

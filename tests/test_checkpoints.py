"""What the loop logs, saves, reports, and restores, as Ray Train's local mode runs it."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import ray.train
from accidents import (
    after_each_line,
    as_worker,
    assert_equal_runs,
    disk_of,
    log_of,
    saved,
    wait_for,
)
from orbax.checkpoint import v1 as orbax

from trainkit import buckets, loading, runs, token_files


@pytest.fixture
def config(small, write_bins):
    """Intervals that don't divide one another, nor the number of steps."""
    config = small(
        **{"n_layer": 1, "device_batch_size": 2, "max_steps": 11},
        **{"log_interval": 3, "eval_interval": 4, "eval_steps": 3},
    )
    return write_bins(config)


@pytest.fixture
def reports(monkeypatch):
    """What Ray is told: of each checkpoint its metrics, and how to report it."""
    found = []
    monkeypatch.setattr(ray.train, "report", lambda *a, **k: found.append((*a, k)))
    return found


@pytest.fixture
def play(tutorial, cluster, reports):
    """A function that runs the loop; gives the reports to Ray, (name, metrics) each."""

    def run(config, act=lambda line: None, tokens=None, send=None):
        reports.clear()
        settings = {"config": asdict(config), "tokens": tokens}
        try:
            with after_each_line(act):
                as_worker(lambda: tutorial.train_loop_per_worker(settings, send))
        finally:  # wait for the last save, which a worker's end would end
            for _, how in reports[-1:]:
                how["checkpoint_upload_fn"](None, "")
        return [(how["checkpoint_dir_name"], metrics) for metrics, how in reports]

    return run


@pytest.fixture
def restore(tutorial, config, reports):
    """A function that restores with changes, as the loop does; None if there is nothing."""

    def restore_by(newest=tutorial.newest, tokens=None, **changes):
        changed = replace(config, **changes)
        like = tutorial.abstract_state(changed, tutorial.create_mesh(changed))
        path = as_worker(lambda: newest(changed.run_path))
        if path is None:
            return None
        runs.check_recipe(path, {"config": asdict(changed), "tokens": tokens})
        return tutorial.unnamed(tutorial.restore(path, tutorial.named(like)), like)

    return restore_by


def test_what_is_logged_saved_and_reported(play, config):
    """Also of a run that goes on, from its newest whole checkpoint."""
    sent, steps = [], [4, 8, 11]  # the last one, too
    reports = play(config, send=sent.append)
    assert saved(config) == [f"step_{step:08d}" for step in steps]
    log = {line["step"]: line for line in log_of(config)}
    assert [*log] == [3, 4, 6, 8, 9, 11] and sent == [*log.values()]
    assert [step for step, line in log.items() if "val_loss" in line] == steps
    assert reports == [*zip(saved(config), map(log.get, steps), strict=True)]

    (config.run_path / "step_00000012.orbax-checkpoint-tmp").mkdir()
    reports = play(replace(config, max_steps=14))
    assert [name[-2:] for name, _ in reports] == ["12", "14"]


def test_a_run_that_diverges_ends_and_saves_nothing_bad(play, config):
    wild = replace(config, learning_rate=1e30)
    with pytest.raises(FloatingPointError, match="diverged at step 2: .*learning_rate"):
        play(wild)
    assert not saved(wild) and not log_of(wild)


@pytest.mark.parametrize("turn", range(3))
def test_a_disk_that_is_full_at_any_save_loses_nothing(play, config, tmp_path, turn):
    """Wherever it cuts a checkpoint off; once there is room, the run goes on."""
    config = replace(config, max_steps=9)
    harmed = replace(config, storage_path=str(tmp_path / "disk"))
    play(config)
    names = saved(config)
    files = Path(config.run_path / names[turn]).rglob("*")
    free = int(np.random.default_rng().integers(sum(x.stat().st_size for x in files)))
    print(f"{free} bytes are left for {names[turn]}")

    def fill(line: dict) -> None:
        if line["step"] == int(names[turn][5:]):
            wait_for(lambda: saved(harmed) == names[:turn], what="the save before")
            leave(free)

    with disk_of(tmp_path / "disk", 24) as leave:
        with pytest.raises(Exception, match="No space left"):
            play(harmed, fill)
        assert saved(harmed) == names[:turn]
        (tmp_path / "disk/filler").unlink()
        play(harmed)
        assert saved(harmed) == names
        assert_equal_runs(harmed, config)


def test_what_is_saved_is_what_was_there(tutorial, config, reports, restore):
    """Though training goes on with donated buffers, which NumPy shares on a CPU."""
    assert restore() is None and not reports
    about = {"config": asdict(config), "tokens": None}
    trained = tutorial.create_state(config)
    expected = [np.array(x) for x in jax.tree.leaves(trained)]
    saving = tutorial.save(config.run_path, tutorial.named(trained), 0, {}, about)
    for _ in range(3):
        windows = np.zeros((4, 17), np.uint16)
        trained, _ = tutorial.train_step(trained, windows, config)
    saving.result()
    state = restore()
    assert jax.tree.structure(state) == jax.tree.structure(trained)
    for found, array in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.sharding.mesh == tutorial.create_mesh(config)


def test_ray_records_a_checkpoint_once_it_is_written(tutorial, reports, monkeypatch):
    """Or its record could name one that isn't whole."""
    saving = Future()
    monkeypatch.setattr(orbax, "save_async", lambda *given, **named: saving)
    tutorial.save(Path("run"), {}, 8, {})
    ((_, how),) = reports
    with ThreadPoolExecutor() as pool:
        recorded = pool.submit(how["checkpoint_upload_fn"], "checkpoint", "")
        with pytest.raises(TimeoutError):
            recorded.result(0.2)
        saving.set_result(None)
        assert recorded.result() == "checkpoint"


def test_the_loop_waits_for_each_save_before_the_next_and_for_the_last(
    play, config, monkeypatch
):
    events, save_async = [], orbax.save_async

    def note(path, *given, **named):
        saving = save_async(path, *given, **named)
        events.append(f"begun {path.name[-2:]}")
        wait = saving.result
        return SimpleNamespace(
            result=lambda: events.append(f"done {path.name[-2:]}") or wait()
        )

    monkeypatch.setattr(orbax, "save_async", note)
    play(config)
    expected = [
        f"{what} {step}" for step in ("04", "08", "11") for what in ("begun", "done")
    ]
    assert events == [*expected, "done 11"]  # which Ray does


def test_another_recipe_and_damage_are_named(play, config, restore):
    """With what to do."""
    play(config)
    assert restore(eval_interval=5, max_steps=99).step == 11
    newest = Path(config.run_path / "step_00000011")
    words = (
        f"{newest} is from another recipe.*: learning_rate was 0.01, is 0.1; seed was"
    )
    with pytest.raises(ValueError, match=words):
        restore(learning_rate=0.1, seed=1)
    for data in newest.rglob("d/*"):
        half = data.read_bytes()[: data.stat().st_size // 2]
        data.unlink()  # and not in place: a process that still maps it would die
        data.write_bytes(half)
    for _ in range(2):
        with pytest.raises(Exception, match=str(newest)):
            restore()
        shutil.rmtree(newest)
        newest.mkdir()  # and nothing in it
    newest.rmdir()
    shutil.copytree(
        config.run_path / "step_00000004", config.run_path / "step_previous"
    )
    assert restore().step == 8


def test_other_tokens_are_named(play, config, restore, write_bins):
    """By what is in their files; the same contents, made again, are the same tokens."""
    play(config, tokens=token_files.digest(config))
    write_bins(config)
    assert restore(tokens=token_files.digest(config)).step == 11
    write_bins(config, val_tokens=402)
    with pytest.raises(ValueError, match="val.bin was '401 tokens.*', is '402 tokens"):
        restore(tokens=token_files.digest(config))


def test_a_model_trained_by_any_kernel_runs_here(
    tutorial, config, tmp_path, monkeypatch
):
    """On a window of any length, also if its blocks were one in a loop.

    On each worker, whose own devices aren't the first ones of all.
    """
    (mine,) = jax.local_devices()
    others = SimpleNamespace(client=mine.client)
    monkeypatch.setattr(jax, "devices", lambda: [others, mine])
    state = tutorial.create_state(config)
    for changes in (
        {"attention": "cudnn"},
        {"attention": "splash", "scan_layers": True},
    ):
        path = tmp_path / changes["attention"]
        about = {"config": asdict(replace(config, **changes)), "tokens": None}
        orbax.save(path, tutorial.named(state), custom_metadata=about)
        model = loading.load_model(
            ray.train.Checkpoint(path), tutorial.create_model, tutorial.named
        )
        tokens = np.ones((1, 3), np.int32)
        np.testing.assert_array_equal(model(tokens), state.model(tokens))


@pytest.mark.parametrize("shape, by_one", [((2, 1, 1), True), ((1, 2, 1), False)])
def test_one_of_several_replicas_reads(shape, by_one):
    mesh = jax.sharding.AbstractMesh(shape, ("data", "fsdp", "tensor"))
    context = loading.by_one_replica(mesh)
    assert context.array.loading.use_load_and_broadcast == by_one


def test_of_a_bucket_only_whole_checkpoints_count(play, config, restore, monkeypatch):
    """Those with the files of all workers, whatever Ray has on record.

    The node's other workers wait until one of them has downloaded it.
    """
    play(replace(config, max_steps=5))
    for name, count in zip(saved(config), (1, 2)):
        packed = config.run_path / f"{name}_{count}_0123abcd"
        shutil.make_archive(f"{packed}/0", "tar", config.run_path / name)
        shutil.rmtree(config.run_path / name)
    there = []
    copy = buckets._copy(config.run_path) / "step_00000004_1_0123abcd"

    def barrier() -> None:
        there.append((copy / "state").exists())

    monkeypatch.setattr(buckets.collective, "barrier", barrier)
    assert restore(buckets.newest).step == 4 and there == [True]
    with pytest.raises(ValueError, match="seed was"):
        restore(buckets.newest, seed=1)
    packed = config.run_path / "step_00000004_1_0123abcd/0.tar"
    packed.write_text("damaged")
    with pytest.raises(Exception, match="truncated|file could not be opened"):
        restore(buckets.newest)
    packed.unlink()
    assert restore(buckets.newest) is None

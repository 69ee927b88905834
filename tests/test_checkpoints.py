"""What the loop logs, saves, reports, and restores, as Ray Train's local mode runs it."""

import errno
import os
import shutil
import tarfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
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
    whole,
)
from etils import epath
from orbax.checkpoint import v1 as orbax
from pyarrow import fs

from trainkit import (
    checkpoint_reader,
    config_files,
    dry_run,
    launch,
    run_lock,
    s3,
    token_files,
)


@pytest.fixture
def config(small, write_bins):
    """Intervals that don't divide one another, nor the number of steps."""
    config = small(
        **{"n_layer": 1, "device_batch_size": 2, "max_steps": 11},
        **{"log_interval": 3, "eval_interval": 4, "eval_windows": 12},
    )
    config.run_path.mkdir(parents=True)  # as Ray does
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

    def run(config, act=lambda line: None, tokens=None, send=None, **more):
        reports.clear()
        settings = {"config": asdict(config), "tokens": tokens, **more}
        try:
            with after_each_line(act):
                as_worker(lambda: tutorial.train_loop_per_worker(settings, send))
        finally:  # wait for the last save, which a worker's end would end
            for _, how in reports[-1:]:
                how["checkpoint_upload_fn"](how["checkpoint"], "")
        return [(how["checkpoint_dir_name"][:13], metrics) for metrics, how in reports]

    return run


@pytest.fixture
def restore(tutorial, config, reports):
    """A function that starts with changes, as the loop does; its state."""

    def restore(**changes):
        changed = replace(config, **changes)
        given = changed, tutorial.create_mesh(changed)
        return as_worker(lambda: tutorial.start_state(*given))

    return restore


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


def test_some_checkpoints_are_saved_without_an_evaluation_and_some_stay(play, config):
    """Of the latter, Ray, which deletes what it has on record, is told nothing."""
    steps = {"save_interval": 2, "keep_every": 8, "max_steps": 16}
    reports = play(replace(config, **steps))
    assert [int(name[5:]) for name in saved(config)] == [*range(2, 17, 2)]
    told = {int(name[5:]): metrics["val_loss"] for name, metrics in reports}
    assert [*told] == [2, 4, 6, 10, 12, 14, 16]
    assert [step for step, loss in told.items() if loss == 1e9] == [2, 6, 10, 14]
    assert [x["step"] for x in log_of(config) if "val_loss" in x] == [4, 8, 12, 16]


def test_a_branch_begins_with_all_that_a_checkpoint_has(play, config, capfd):
    """Its losses are those of the run itself, bit for bit, unless its recipe is another."""
    play(config)
    start = str(whole(config)[0])  # of step 4

    def numbers_of(config) -> list[tuple]:
        return [(x["step"], x["loss"], x["grad_norm"]) for x in log_of(config)]

    for name, changes, said in (
        ("same", {}, "nothing differs"),
        ("other", {"learning_rate": 0.1}, "learning_rate was 0.01, is 0.1"),
    ):
        branch = replace(config, run_name=name, branch_from=start, **changes)
        branch.run_path.mkdir()
        about = {"from": start, "differs": [said] if changes else []}
        play(branch, branch=about)
        assert saved(branch) == ["step_00000008", "step_00000011"]
        found = capfd.readouterr().out
        assert f"{name} is at step 4, a branch of {start}: {said}; code" in found
        assert numbers_of(branch)[0][0] == 6
        assert (numbers_of(branch) == numbers_of(config)[2:]) == (name == "same")
    Path(start).rename(config.run_path / "gone")
    play(replace(branch, max_steps=13), branch=about)  # its own come first
    assert saved(branch)[-1] == "step_00000013"


def test_a_run_that_diverges_ends_and_saves_nothing_bad(
    tutorial, play, config, monkeypatch
):
    """What was being saved before is whole. Once the note is deleted, the run goes on."""
    with monkeypatch.context() as patch:
        train_step = tutorial.train_step

        def diverge(state, windows, config):
            state, metrics = train_step(state, windows, config)
            if state.step == 5:
                metrics["loss"] = metrics["loss"] * np.nan
            return state, metrics

        patch.setattr(tutorial, "train_step", diverge)
        play(config)
    assert saved(config) == ["step_00000004"]
    assert [line["step"] for line in log_of(config)] == [3, 4]
    run_lock._lock.release()  # as the end of its process does
    with pytest.raises(FloatingPointError, match="run diverged at step 5: .*loss nan"):
        run_lock.wait_for_workers(config)
    (config.run_path / "diverged.txt").unlink()
    run_lock.wait_for_workers(config)
    play(config)
    assert saved(config)[-1] == "step_00000011"


@pytest.mark.parametrize("turn", range(3))
def test_a_disk_that_is_full_at_any_save_loses_nothing(play, config, tmp_path, turn):
    """Wherever it cuts a checkpoint off; once there is room, the run goes on."""
    config = replace(config, max_steps=9)
    harmed = replace(config, storage_path=str(tmp_path / "disk"))
    play(config)
    names = saved(config)
    files = Path(whole(config)[turn]).rglob("*")
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


def test_what_is_saved_is_what_was_there(
    tutorial, config, reports, restore, monkeypatch
):
    """Though training goes on with donated buffers, which NumPy shares on a CPU."""
    assert restore().step == 0 and not reports
    about = {"config": asdict(config), "tokens": None}
    trained = tutorial.create_state(config)
    expected = [np.array(x) for x in jax.tree.leaves(trained)]
    given = config.run_path, tutorial.named(trained), 0, {}, about
    saving = as_worker(lambda: tutorial.save(*given))
    for _ in range(3):
        windows = np.zeros((4, 17), np.uint16)
        trained, _ = tutorial.train_step(trained, windows, config)
    saving.result()
    by_one, asked = checkpoint_reader.by_one_replica, []
    note = lambda mesh: asked.append(mesh) or by_one(mesh)  # noqa: E731
    monkeypatch.setattr(checkpoint_reader, "by_one_replica", note)
    state = restore()
    assert asked == [tutorial.create_mesh(config)]
    assert jax.tree.structure(state) == jax.tree.structure(trained)
    for found, array in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.sharding.mesh == tutorial.create_mesh(config)


def test_ray_records_a_checkpoint_once_it_is_written(
    tutorial, reports, monkeypatch, tmp_path
):
    """Or its record could name one that isn't whole."""
    saving = Future()
    monkeypatch.setattr(orbax, "save_async", lambda *given, **named: saving)
    as_worker(lambda: tutorial.save(tmp_path, {}, 8, {}))
    ((_, how),) = reports
    with ThreadPoolExecutor() as pool:
        recorded = pool.submit(how["checkpoint_upload_fn"], how["checkpoint"], "")
        with pytest.raises(TimeoutError):
            recorded.result(0.2)
        saving.set_result(None)
        assert recorded.result() == how["checkpoint"]


def test_the_loop_waits_for_each_save_before_the_next_and_for_the_last(
    play, config, monkeypatch
):
    events, save_async = [], orbax.save_async

    def note(path, *given, **named):
        saving = save_async(path, *given, **named)
        events.append(f"begun {path.name[11:13]}")
        wait = saving.result
        return SimpleNamespace(
            result=lambda: events.append(f"done {path.name[11:13]}") or wait()
        )

    monkeypatch.setattr(orbax, "save_async", note)
    play(config)
    expected = [
        f"{what} {step}" for step in ("04", "08", "11") for what in ("begun", "done")
    ]
    assert events == [*expected, "done 11"]  # which Ray does


def test_the_loop_of_step_2_is_guarded_and_waits(
    tutorial, tmp_path, monkeypatch, reports
):
    """From its start to its end, anew in each step, and while it waits for each save."""
    events, save = [], tutorial.save

    def note(folder, arrays, step, metrics):
        save(folder, arrays, step, metrics).result()
        events.append(f"save {step}")
        return SimpleNamespace(result=lambda: events.append(f"wait {step}"))

    def log(step, loss):
        events.append(step)

    monkeypatch.setattr(tutorial, "save", note)
    monkeypatch.setattr(tutorial, "optimizer", optax.sgd(0.2), raising=False)

    def dump_traceback_later(seconds, exit):
        assert (seconds, exit) == (600, True)
        events.append("guard")

    guard = SimpleNamespace(
        dump_traceback_later=dump_traceback_later,
        cancel_dump_traceback_later=lambda: events.append("end"),
    )
    monkeypatch.setattr(tutorial, "faulthandler", guard)
    for steps in (9, 10):
        settings = {"folder": str(tmp_path), "steps": steps}
        as_worker(partial(tutorial.fit_line_and_survive, settings, log))
    guarded = [x for step in range(1, 8) for x in ("guard", step)]
    saves = ["guard", 8, "save 8", "guard", 9, "wait 8", "save 9"]
    again = ["guard", 10, "save 10", "guard", "wait 10", "end"]
    assert events == [*guarded, *saves, "guard", "wait 9", "end", *again]


@pytest.fixture
def on_another_node(monkeypatch):
    """A function that makes this process its node's first worker, and which the first one of
    all tells what it has found.
    """

    def join(found: str) -> None:
        places = {"get_world_rank": 2, "get_local_rank": 0, "get_world_size": 4}
        context = SimpleNamespace(**{k: lambda x=x: x for k, x in places.items()})
        monkeypatch.setattr(ray.train, "get_context", lambda: context)
        stubs = {"broadcast_from_rank_zero": lambda mine: found, "barrier": list}
        for name, stub in stubs.items():
            monkeypatch.setattr(ray.train.collective, name, stub)

    return join


def test_the_first_worker_chooses_for_all(tutorial, tmp_path, on_another_node):
    """Others, which may see a checkpoint a moment later, don't look."""
    (tmp_path / "step_00000016").mkdir()
    on_another_node("step_00000008")
    assert tutorial.newest(tmp_path) == tmp_path / "step_00000008"
    on_another_node(None)
    assert tutorial.newest(tmp_path) is None


def test_each_node_has_a_copy_of_what_is_in_the_bucket(
    config, reports, on_another_node
):
    """From when it is restored until the next save, and of that checkpoint alone."""
    name = "step_00000008_4_0123abcd"
    files = config.run_path / "files"
    files.mkdir(parents=True)
    for part in "02":
        (files / part).touch()
        shutil.make_archive(f"{config.run_path}/{name}/{part}", "tar", files, part)
    other = s3._copy(config.run_path) / "step_00000004_4_0123abcd"
    other.mkdir(parents=True)
    on_another_node(name)
    copy = s3.newest(config.run_path)
    assert {path.name for path in copy.iterdir()} == {"0", "2"} and not other.exists()
    s3.save(config.run_path, {"x": np.ones(3)}, 16, {})
    assert not copy.exists()
    ((_, how),) = reports
    (config.run_path / how["checkpoint_dir_name"]).mkdir()  # a bucket needs none
    how["checkpoint_upload_fn"](None, how["checkpoint_dir_name"])


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="Python < 3.11.4")
def test_a_tar_file_writes_nothing_elsewhere(tmp_path):
    (tmp_path / "outside").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed/0.tar", "w") as packed:
        packed.add(tmp_path / "outside", "../outside")
    with pytest.raises(tarfile.FilterError):
        s3.unpack(fs.LocalFileSystem(), str(tmp_path / "packed"), tmp_path / "a")


def test_another_recipe_other_tokens_and_damage_are_named(
    play, config, restore, write_bins
):
    """With what to do. The same contents of token files, made again, are the same tokens."""
    play(config, tokens=token_files.digest(config))
    assert restore(eval_interval=5, max_steps=99).step == 11
    newest = Path(whole(config)[-1])
    launch.settings(replace(config, eval_interval=5, max_steps=99))
    words = f"{config.run_path} is from another recipe.*: learning_rate was 0.01, is 0.1; seed"
    with pytest.raises(ValueError, match=words):
        launch.settings(replace(config, learning_rate=0.1, seed=1))
    launch.settings(write_bins(config))
    write_bins(config, val_tokens=402)
    with pytest.raises(ValueError, match="val.bin was '401 tokens.*, is '402 tokens"):
        launch.settings(config)
    for data in newest.rglob("d/*"):
        half = data.read_bytes()[: data.stat().st_size // 2]
        data.unlink()  # and not in place: a process that still maps it would die
        data.write_bytes(half)
    with pytest.raises(Exception, match=str(newest)):
        restore()
    shutil.rmtree(newest)
    shutil.copytree(whole(config)[0], config.run_path / "step_previous")
    assert restore().step == 8


def test_only_the_commit_file_makes_a_checkpoint_whole(tutorial, tmp_path):
    """Also of those that Orbax has renamed, as earlier versions did. What is unfinished at an
    earlier step, where nothing will finish it, is deleted, and nothing else is.
    """
    arrays = {"x": np.arange(3.0)}
    orbax.save(tmp_path / "step_00000008", arrays)  # Orbax's own way is to rename

    def found() -> str:
        path = as_worker(lambda: tutorial.newest(epath.Path(tmp_path)))
        np.testing.assert_array_equal(tutorial.restore(path, arrays)["x"], arrays["x"])
        return path.name

    for name in (
        *("step_00000004", "step_00000004_0123abcd", "step_00000008_0123abcd"),
        *("step_00000012_0123abcd", "step_00000004.mine", "step_previous"),
    ):
        (tmp_path / name).mkdir()
    half = tmp_path / "step_00000016.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "step_00000008", half)
    before = {path.name for path in tmp_path.iterdir()}
    assert found() == "step_00000008"
    gone = before - {path.name for path in tmp_path.iterdir()}
    assert gone == {"step_00000004", "step_00000004_0123abcd"}
    half.rename(tmp_path / "step_00000016_0123abcd")
    assert found() == "step_00000016_0123abcd"


def test_storage_that_fails_is_not_empty_storage(tutorial, tmp_path, monkeypatch):
    """A run would start over, and a whole checkpoint be deleted."""
    folder = epath.Path(tmp_path / "a [b]")  # which is no pattern
    for step in (8, 16):
        (folder / f"step_{step:08d}").mkdir(parents=True)
        (folder / f"step_{step:08d}/commit_success.txt").touch()
    search = partial(tutorial.newest, folder)
    assert as_worker(search).name == "step_00000016"
    listdir = os.listdir
    for name in ("a [b]", "step_00000008"):

        def fail(path, name=name):
            if str(path).endswith(name):
                raise OSError(errno.EIO, "Input/output error")
            return listdir(path)

        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input"):
            patch.setattr(os, "listdir", fail)
            as_worker(search)
    assert as_worker(search).name == "step_00000016"
    assert (folder / "step_00000008").exists()


def test_no_two_saves_write_to_one_folder(tutorial, tmp_path, reports):
    """Of one step, by attempts and launches that know nothing of one another."""
    arrays = {"x": np.arange(3.0)}
    for _ in range(2):
        as_worker(lambda: tutorial.save(tmp_path, arrays, 8, {}).result())
    assert len({*tmp_path.glob("step_00000008_????????/commit_success.txt")}) == 2


def test_two_arrays_of_one_name_are_refused(tutorial):
    """Before the first save, which would lose one."""
    with pytest.raises(AssertionError, match="one name of .'x.0'"):
        tutorial.named({"x": {"0": 1}, "x.0": 2})


def test_a_model_trained_by_any_kernel_runs_here(
    tutorial, config, tmp_path, monkeypatch
):
    """On a window of any length, also if its blocks were one in a loop, or its configuration
    had a key that is no more. On each worker, whose own devices aren't the first ones of all.
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
        saved = asdict(replace(config, **changes)) | {"removed": 3}
        about = {"config": saved, "tokens": None}
        orbax.save(path, tutorial.named(state), custom_metadata=about)
        model = checkpoint_reader.load_model(
            ray.train.Checkpoint(path), tutorial.create_model, tutorial.named
        )
        tokens = np.ones((1, 3), np.int32)
        np.testing.assert_array_equal(model(tokens), state.model(tokens))


def test_a_recorded_checkpoint_has_an_object_of_its_own(
    tutorial, tmp_path, monkeypatch
):
    """In gs://, no folder has one by itself, and Ray's deletion fails without."""
    told, files = [], fs._MockFileSystem()
    monkeypatch.setattr(ray.train, "report", lambda metrics, **how: told.append(how))
    arrays = {"x": jax.numpy.ones(2)}
    as_worker(lambda: tutorial.save(epath.Path(tmp_path), arrays, 8, {}).result())
    checkpoint = ray.train.Checkpoint("runs/run/step", files)
    assert told[0]["checkpoint_upload_fn"](checkpoint, "step") == checkpoint
    assert files.get_file_info(checkpoint.path).type == fs.FileType.Directory


def test_a_model_takes_all_of_a_checkpoint_or_nothing(
    tutorial, play, config, monkeypatch, tmp_path
):
    """Edited since, it would generate from a part of the weights, in silence."""
    play(replace(config, max_steps=1))
    checkpoint = ray.train.Checkpoint(whole(config)[0])
    create_model = tutorial.create_model

    def without_bias(config):
        model = create_model(config)
        del model.h[0].mlp.c_fc.bias
        return model

    for create, words in (
        (
            lambda c: create_model(replace(c, n_layer=2)),
            r"model.h.1.attn.c_proj.bias None, expected float32 \(32,\)",
        ),
        (without_bias, r"model.h.0.mlp.c_fc.bias float32 \(128,\), expected None"),
        (
            lambda c: create_model(replace(c, vocab_size=700)),
            r"model.wte.embedding float32 \(640, 32\), expected float32 \(768, 32\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"other arrays .*step_00000001.*{words}"):
            checkpoint_reader.load_model(checkpoint, create, tutorial.named)

    (whole(config)[0] / "commit_success.txt").rename(tmp_path / "commit")
    with pytest.raises(ValueError, match="expected a whole checkpoint"):
        checkpoint_reader.load_model(checkpoint, create_model, tutorial.named)
    (tmp_path / "commit").rename(f"{checkpoint.path}/commit_success.txt")

    # A launch of it, too, and one with another optimizer, before workers start.
    parts = tutorial.create_state, tutorial.abstract_state, tutorial.loss_fn
    shapes = partial(dry_run.check_sharding, config, 1, *parts)
    checkpoint_reader.check_start(config, shapes())
    wider = replace(config, n_embd=64)  # of which recipe.compare names the key
    checkpoint_reader.check_start(wider, {})
    with monkeypatch.context() as patch:
        adamw = partial(optax.adamw, mu_dtype="bfloat16")
        patch.setattr(optax, "adamw", adamw)
        words = r"step_0.* has opt_state.*mu.* float32 \(.*, expected bfloat16 \("
        with pytest.raises(ValueError, match=words):
            checkpoint_reader.check_start(config, shapes())
    monkeypatch.setattr(tutorial, "create_optimizer", lambda c: optax.sgd(0.1))
    with pytest.raises(ValueError, match="step_0.* has opt_state.count.* None"):
        checkpoint_reader.check_start(config, shapes())
    new = replace(config, run_name="new")
    checkpoint_reader.check_start(new, shapes())
    branch = replace(new, branch_from=str(whole(config)[0]))
    with pytest.raises(ValueError, match=" has opt_state.* None"):
        checkpoint_reader.check_start(branch, shapes())
    deeper = lambda c: create_model(replace(c, n_layer=2))  # noqa: E731
    monkeypatch.setattr(tutorial, "create_model", deeper)
    weights = replace(new, init_from=branch.branch_from)
    with pytest.raises(ValueError, match="model.h.1.* None, expected"):
        checkpoint_reader.check_start(weights, shapes())


def test_weights_of_a_run_start_another(play, config, restore, tmp_path, tutorial):
    """At step 0, with any batch and recipe, in the shape that they have."""
    play(replace(config, tokenizer="builtin"))
    path = whole(config)[-1]
    file = tmp_path / "more.yaml"
    file.write_text(f"init_from: {path}\ntokenizer: builtin\nbatch_size: 6")
    found = config_files.load_config(file, tmp_path, run_name="more")
    shape = [getattr(found, key) for key in ("vocab_size", "block_size", "n_layer")]
    assert shape == [521, 16, 1] and found.batch_size == 6
    changes = {"run_name": "more", "batch_size": 6, "init_from": found.init_from}
    (config.run_path.parent / "more").mkdir()
    state = restore(**changes)
    moments = jax.tree.leaves(state.opt_state.inner_state)
    assert state.step == 0 and not any(map(np.any, moments))
    trained = tutorial.named(restore().model)
    for name, x in tutorial.named(state.model).items():
        np.testing.assert_array_equal(x, trained[name])
    with pytest.raises(ValueError, match="other arrays than .*step_00000011"):
        restore(**changes, n_embd=64)
    for text, words in (
        ("tokenizer: gpt2", "init_from: .*was trained with the tokenizer"),
        ("tokenizer: builtin\nn_layer: 2", "n_layer is 2, and init_from.* has 1"),
    ):
        file.write_text(f"init_from: {path}\n{text}")
        with pytest.raises(ValueError, match=words):
            config_files.load_config(file, tmp_path)
    own = replace(config, **changes, tokenizer="builtin", max_steps=1)
    play(own)
    with pytest.raises(ValueError, match="another recipe.*: seed was 1337, is 2"):
        play(replace(own, max_steps=2, seed=2))
    shutil.rmtree(path)
    file.write_text(f"init_from: {path}\ntokenizer: builtin")
    with pytest.raises(ValueError, match="init_from: expected a whole checkpoint"):
        config_files.load_config(file, tmp_path)
    # A run that has checkpoints of its own goes on.
    same = {"run_name": "more", "storage_path": own.storage_path}
    assert config_files.load_config(file, tmp_path, **same).n_layer == 1


@pytest.mark.parametrize("shape, by_one", [((2, 1, 1), True), ((1, 2, 1), False)])
def test_one_of_several_replicas_reads(shape, by_one):
    mesh = jax.sharding.AbstractMesh(shape, ("data", "fsdp", "tensor"))
    context = checkpoint_reader.by_one_replica(mesh)
    assert context.array.loading.use_load_and_broadcast == by_one


def test_a_run_in_a_bucket_needs_no_weights_once_it_has_checkpoints(
    config, monkeypatch
):
    """What it started with may be gone."""
    run = replace(config, storage_path="s3://bucket/runs", init_from="/gone")
    for own, expected in ((None, True), ({"config": {}}, False)):
        monkeypatch.setattr(s3, "about", lambda folder, own=own: own)
        assert checkpoint_reader.takes_weights(run) == expected
    branch = replace(run, branch_from="/parent")  # which has the weights
    monkeypatch.setattr(s3, "about", lambda folder: None)
    assert not checkpoint_reader.takes_weights(branch)


def test_of_a_bucket_only_whole_checkpoints_count(
    tutorial, play, config, restore, monkeypatch
):
    """Those with the files of all workers, whatever Ray has on record.

    The node's other workers wait until one of them has downloaded it.
    """
    play(replace(config, max_steps=5))
    for folder, count in zip(whole(config), (1, 2)):
        packed = config.run_path / f"{folder.name[:13]}_{count}_0123abcd"
        shutil.make_archive(f"{packed}/0", "tar", folder)
        folder.rmtree()
    dead = config.run_path / "step_00000003_2_0123abcd"
    dead.mkdir()
    (dead / "0.tar").touch()
    monkeypatch.setattr(tutorial, "newest", s3.newest)
    there = []
    copy = s3._copy(config.run_path) / "step_00000004_1_0123abcd"

    def barrier() -> None:
        there.append((copy / "state").exists())

    monkeypatch.setattr(s3.collective, "barrier", barrier)
    assert restore().step == 4 and there == [True] and not dead.exists()
    assert s3.about(config.run_path)["config"]["seed"] == config.seed
    packed = config.run_path / "step_00000004_1_0123abcd/0.tar"
    packed.write_text("damaged")
    with pytest.raises(Exception, match="truncated|file could not be opened"):
        restore()
    packed.unlink()
    assert restore().step == 0

"""Real JaxTrainer runs of two workers, and every way to die: the run ends undisturbed."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import nbformat
import numpy as np
import pytest
import ray.train
from accidents import (
    as_worker,
    assert_equal_runs,
    assert_one_worker_continues,
    evaluate,
    in_the_background,
    kill,
    last_step,
    log_of,
    saved,
    starts_of,
    train_loop_of,
    wait_for,
    whole,
)
from conftest import ROOT
from notebook_module import NOTEBOOK, load_notebook
from orbax.checkpoint import v1 as orbax
from samples import block_of_guide, run_from_guide, windows_for

from trainkit import documents, run_lock

RECORD = "checkpoint_manager_snapshot.json"


@pytest.mark.slow
def test_two_workers_train_evaluate_and_save(tutorial, cluster, reference, tmp_path):
    """The best checkpoint is loaded by the guide's lines."""
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
    assert result.checkpoint.path == str(whole(config)[-1])

    # The model in the best is the one that was evaluated.
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/my-run").symlink_to(config.run_path)
    names = run_from_guide("earlier = ", vars(tutorial) | {"storage": tmp_path})
    model = names["model"]
    assert evaluate(tutorial, config, model) == pytest.approx(losses[best[0]], abs=1e-5)
    assert_one_worker_continues(tutorial, config)


DRIVER = """
import sys, time
from pathlib import Path
sys.path[:0] = ["tests", "ci"]
from accidents import after_each_line
from conftest import TrainingConfig, load_notebook, start_ray
start_ray("{}")
tutorial = load_notebook()

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
def test_a_second_launch_and_a_driver_that_dies(
    tutorial, cluster, reference, tmp_path, monkeypatch
):
    """While a run trains, it is launched a second time, which is refused. Its driver dies while
    a checkpoint is written, which frees the workers, and Ray's record is lost. Launched once
    more, it ends as if nothing had happened, bit for bit.
    """
    config = replace(reference, run_name="accidents")
    holder, go_on = config.run_path / "locked-by.txt", tmp_path / "go on"

    def writing() -> bool:
        assert process.poll() is None
        begun = sorted(path.name[:13] for path in config.run_path.glob("step_*"))
        return saved(config) and begun[-1] > saved(config)[-1]

    monkeypatch.setattr(run_lock, "PATIENCE", 1)
    address = ray.get_runtime_context().gcs_address
    trainer = tutorial.make_trainer(config, tutorial.train_loop_per_worker)
    second = partial(trainer.train_loop_per_worker, trainer.train_loop_config)
    driver = DRIVER.format(address, str(go_on), asdict(config))
    with subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT) as process:
        try:
            wait_for(lambda: last_step(config), what="the first launch")
            first = holder.read_text()
            with pytest.raises(RuntimeError, match=re.escape(f"in use by {first}")):
                as_worker(second)
            go_on.touch()
            wait_for(lambda: last_step(config) > 1, what="that it goes on")
            assert holder.read_text() == first
            wait_for(writing, pause=0.01, what="a checkpoint half done")
        finally:
            process.kill()
    log = log_of(config)
    assert 8 < log[-1]["step"] < config.max_steps
    total = ray.cluster_resources()["CPU"]
    wait_for(lambda: ray.available_resources().get("CPU") == total, what="its end")
    (config.run_path / RECORD).unlink()
    tutorial.make_trainer(config, tutorial.train_loop_per_worker).fit()
    assert log_of(config)[:8] == log[:8]  # to the digits of tokens_per_s: not again
    assert_equal_runs(config, reference)


@pytest.mark.extra
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize(
    "signals",
    [[signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL], [signal.SIGSTOP]],
)
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


@pytest.mark.extra
def test_a_branch_of_a_checkpoint_that_stays(tutorial, cluster, reference):
    """Ray doesn't record it. With nothing changed, a branch is the run itself, bit for bit."""

    def fit(config) -> list[tuple]:
        tutorial.fit(tutorial.make_trainer(config, tutorial.train_loop_per_worker))
        return [(x["step"], x["loss"], x.get("val_loss")) for x in log_of(config)]

    parent = replace(reference, run_name="parent", save_interval=4, keep_every=20)
    expected = fit(parent)
    assert_equal_runs(parent, reference)
    assert saved(parent) == ["step_00000020", "step_00000032", "step_00000040"]
    start = whole(parent)[0]
    assert start.name not in (parent.run_path / RECORD).read_text()
    branch = replace(reference, run_name="same", branch_from=str(start))
    assert fit(branch) == expected[20:]
    branch = replace(branch, run_name="other", learning_rate=1e-3)
    found = fit(branch)
    assert [x[0] for x in found] == list(range(21, 41)) and found != expected[20:]
    shutil.rmtree(start)
    assert fit(replace(branch, max_steps=44))[:20] == found
    about = orbax.metadata(whole(branch)[-1]).custom_metadata["branch"]
    assert about["differs"] == ["learning_rate was 0.01, is 0.001"]


@pytest.mark.extra
def test_training_on_a_stream_of_documents(tutorial, cluster, small):
    """By the guide's two blocks: documents are tokenized while two workers train on them."""
    config = small(vocab_size=50_257, block_size=64, batch_size=8)
    names = vars(tutorial) | {"config": config, "dataset": documents.builtin}
    run_from_guide("def train_on_stream(", names)
    found = run_from_guide("streamed = replace(", names)["result"].return_value
    assert found["step"] == 20 and found["loss"] < 10.8  # ln 50,257


@pytest.fixture
def with_grain(tmp_path, monkeypatch):
    """The notebook with the guide's edits for batches of one's own."""
    guide = (ROOT / "docs/guide.md").read_text()
    (block,) = re.findall(r"```python\n(import grain\n.*?)```", guide, re.DOTALL)
    plain, settings = block_of_guide("recipe.compare(").splitlines()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "launch.settings(" in cell.source]
    settings = settings.removeprefix("train_loop_config = ")
    for old, new in (
        ("launch.settings(config)", settings),
        ("    return", f"    {plain}\n    return"),
    ):
        assert cell.source.count(old) == 1
        cell.source = cell.source.replace(old, new)
    cell.source = f"from trainkit import recipe\n\n{cell.source}"
    notebook.cells.append(nbformat.v4.new_code_cell(block))
    nbformat.write(notebook, tmp_path / "mine.ipynb")
    monkeypatch.setitem(sys.modules, "tutorial", sys.modules["tutorial"])
    return load_notebook(tmp_path / "mine.ipynb")


@pytest.mark.extra
def test_batches_of_one_s_own_after_a_kill(cluster, reference, with_grain, tmp_path):
    """Each window once an epoch, and the losses of a run to which nothing has happened."""
    from array_record.python.array_record_module import ArrayRecordWriter

    config = replace(reference, data_dir=f"{tmp_path}/data", run_name="own")
    Path(config.data_dir).mkdir()
    windows = {"train": windows_for(config, 30).reshape(-1, config.block_size + 1)}
    windows["val"] = windows["train"][:8]
    for split, records in windows.items():
        path = f"{config.data_dir}/{split}-0.array_record"
        writer = ArrayRecordWriter(path, "group_size:1")
        for record in records:
            writer.write(record.tobytes())
        writer.close()
    read = with_grain.read_batches(config, jax.sharding.get_mesh(), range(60))
    steps = np.concatenate([*map(np.asarray, read)]).reshape(2, 120, -1)
    for epoch in steps:
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, windows["train"]))
    assert (steps[0] != steps[1]).any()

    with_grain.make_trainer(config, with_grain.train_loop_per_worker).fit()
    killed = replace(config, run_name="killed")
    with in_the_background(
        with_grain.make_trainer(killed, train_loop_of(with_grain)).fit
    ) as result:
        wait_for(lambda: last_step(killed) >= 19, what="the step")
        kill(killed, 1)
        result()
    assert len(starts_of(killed)) == 2
    assert_equal_runs(killed, config)

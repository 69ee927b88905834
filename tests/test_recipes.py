"""The guide's recipes for daily work, as they stand there, with the libraries they name."""

import os
import re
import signal
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from accidents import in_the_background, last_step, log_of, wait_for
from conftest import ROOT
from notebook_module import code_cells
from samples import block_of_guide, run_from_guide
from tensorboardX.proto import event_pb2


@pytest.mark.extra
def test_a_sweep(tutorial, cluster, small, write_bins):
    """Two runs side by side, of which one loses a worker. Launched again, they are done."""
    base = write_bins(small(n_layer=1, max_steps=30, run_name="sweep"))
    names = vars(tutorial) | {"config_path": "", "load_config": lambda *_, **more: base}
    block = block_of_guide("tune.Tuner(").replace("trials=1", "trials=2")
    rates = 3e-4, 1e-3, 3e-3
    first, second, third = (replace(base, run_name=f"sweep-{x}") for x in rates)
    with in_the_background(lambda: exec(block, names)) as finish:
        wait_for(lambda: last_step(first) >= 13, pause=0.005, what="step 13")
        assert first.run_path.exists() and second.run_path.exists()
        assert not third.run_path.exists()
        holder = (first.run_path / "locked-by.txt").read_text()
        os.kill(int(holder.split()[1]), signal.SIGKILL)
        finish()
    table = run_from_guide("get_dataframe()", names)["table"]
    assert sorted(table["config/learning_rate"]) == [*rates]
    logs = [log_of(config) for config in (first, second, third)]
    for log in logs:
        assert [line["step"] for line in log] == [*range(1, 31)]
    assert sorted(table["val_loss"]) == sorted(log[-1]["val_loss"] for log in logs)
    exec(block, names)
    again = run_from_guide("get_dataframe()", names)["table"]
    assert sorted(again["val_loss"]) == sorted(table["val_loss"])
    assert [log_of(config) for config in (first, second, third)] == logs


def tracker(name: str, place: str) -> str:
    """The guide's function around the loop, with the lines for another tracker."""
    guide, block = (ROOT / "docs/guide.md").read_text(), block_of_guide(" wandb")
    rows = re.findall(rf"^\| {name} \| `(.*?)` \| `(.*?)` \|$", guide, re.M)
    ((opened, sent),) = rows
    block = re.sub(r"wandb\.init\(.*\)", opened, block)
    block = re.sub(r"run\.log\(.*\)", sent, block)
    module = opened.split(".")[0]
    return block.replace("import wandb", f"import {module}").replace("/shared", place)


def scalars(path: Path) -> list[tuple[str, int, float]]:
    """The tags, steps, and values in a file of TensorBoard's."""
    data, found = path.read_bytes(), []
    while data:  # a length in 8 bytes, 4 of a checksum, an event, 4 of another one
        (size,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        found += [(x.tag, event.step, x.simple_value) for x in event.summary.value]
        data = data[16 + size :]
    return found


@pytest.mark.extra
@pytest.mark.parametrize("name", ["MLflow", "TensorBoard"])
def test_other_trackers(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch, name
):
    """MLflow, whose pins differ from ours, only where somebody has installed it."""
    if name == "MLflow":
        mlflow = pytest.importorskip("mlflow")
    config = write_bins(small(n_layer=1, max_steps=10, run_name="tracked"))
    names = vars(tutorial) | {}
    exec(tracker(name, str(tmp_path)), names)
    trainer = tutorial.make_trainer(config, names["track"])
    place = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlflow"}
    place |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
    trainer.run_config.worker_runtime_env["env_vars"] |= place
    tutorial.fit(trainer)
    if name == "MLflow":
        for variable, value in place.items():
            monkeypatch.setenv(variable, value)
        client = mlflow.MlflowClient()
        (run,) = client.search_runs(["0"])
        assert (run.info.run_name, run.info.status) == ("tracked", "FINISHED")
        history = client.get_metric_history(run.info.run_id, "loss")
        found = [("loss", x.step, x.value) for x in history]
    else:
        (path,) = (tmp_path / "tensorboard/tracked").iterdir()
        found = [x for x in scalars(path) if x[0] == "loss"]
    assert [step for _, step, _ in found] == [*range(1, 11)]
    losses = [line["loss"] for line in log_of(config)]
    assert [loss for *_, loss in found] == pytest.approx(losses)


@pytest.mark.extra
def test_a_profile_and_the_programs(
    tutorial, cluster, small, write_bins, tmp_path, monkeypatch
):
    """In the notebook's loop, with the guide's lines and variables, of one worker's steps."""
    config = write_bins(small(n_layer=1, max_steps=30, run_name="profiled"))
    cells = (cell.source for cell in code_cells())
    (loop,) = [x for x in cells if "def train_loop_per_worker" in x]
    lines = block_of_guide("start_trace").replace("/shared", str(tmp_path))
    loop, count = re.subn(
        r"^ +line = log\.add\(.*\n", rf"\g<0>{lines}", loop, flags=re.M
    )
    assert count == 1
    names = vars(tutorial) | {"run": config}
    exec(loop, names)
    for variable in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    exec(block_of_guide("xla_dump_to").replace("/tmp", str(tmp_path)), names)
    run_from_guide('"NCCL_DEBUG"', names)
    assert last_step(config) == 30
    (profile,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert profile.read_bytes().count(b"train_step") > 5
    dumped = [path.name for path in (tmp_path / "hlo").iterdir()]
    assert any("jit_train_step" in x and "before_opt" in x for x in dumped)
    assert any("jit_train_step" in x and "after_opt" in x for x in dumped)

"""The guide's recipes for daily work, as they stand there, with the libraries they name."""

import re
import struct
from pathlib import Path

import pytest
from accidents import log_of
from conftest import ROOT
from samples import block_of_guide
from tensorboardX.proto import event_pb2


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

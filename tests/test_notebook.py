"""The whole notebook, as its users run it, its form, and the page made from it."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import render_readme
from conftest import ROOT, stop_ray
from notebook_module import code_cells
from ray.train import ScalingConfig
from samples import python

NUMBER = r"\d[\d,.]*(?:e-\d+)?"


def run_notebook(folder: Path, *more_cells) -> list:
    """The code cells after `pytest --nbmake`, as ci/smoke.sh runs it, in `folder`.

    With 40 steps of one layer, without a dashboard, and with the tests' options of XLA, which
    compile faster; ci/smoke.sh has none of these.
    """
    stop_ray()  # the processor is for the notebook's cluster
    folder.mkdir()
    notebook = nbformat.read(ROOT / "README.ipynb", as_version=4)
    (init,) = [cell for cell in notebook.cells if "ray.init(" in cell.source]
    init.source = init.source.replace("init(", "init(include_dashboard=False, ")
    notebook.cells += more_cells
    nbformat.write(notebook, folder / "README.ipynb")
    for name in ("configs", "trainkit"):
        shutil.copytree(ROOT / name, folder / name)
    smoke = folder / "configs/smoke.yaml"
    text = smoke.read_text()
    for key, value in {"max_steps": 40, "eval_interval": 35, "n_layer": 1}.items():
        text = re.sub(f"{key}: .*", f"{key}: {value}", text)
    smoke.write_text(text)
    command = "--nbmake --overwrite --nbmake-timeout=900 README.ipynb".split()
    pytest_itself = Path(sys.executable).with_name("pytest")
    python(pytest_itself, *command, cwd=folder, GPT2_CONFIG="configs/smoke.yaml")
    return code_cells(folder / "README.ipynb")


@pytest.fixture(scope="module")
def smoke_folder(tmp_path_factory):
    """A folder for the notebook; a space in its name does no harm."""
    return tmp_path_factory.mktemp("smoke") / "my folder"


@pytest.fixture(scope="module")
def executed(smoke_folder):
    """The code cells of the executed notebook."""
    return run_notebook(smoke_folder)


def printed(cells) -> str:
    """All that cells printed or showed as text."""
    outputs = [output for cell in cells for output in cell.outputs]
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return "\n".join(shown)


def training_of(cells) -> str:
    """What the training cell printed."""
    return printed([c for c in cells if "fit(make_trainer(run," in c.source])


@pytest.mark.slow
def test_notebook_trains(executed):
    text = training_of(executed)
    losses = [float(x) for x in re.findall(r"\| loss ([\d.]+)", text)]
    validation = [float(x) for x in re.findall(r"val_loss ([\d.]+)", text)]
    assert 5 < losses[0] < math.log(2_048) and losses[-1] < losses[0] - 0.3
    assert len(validation) == 2 and max(validation) < losses[0]
    outputs = [output for cell in executed for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"
    # No line twice in what a reader sees, and a bar that says how far the run is
    steps = re.findall(r"step \d+ \| tokens \S+", text)
    assert len(steps) == len(set(steps)) == 3
    assert re.search(r"smoke-[\d-]+: +\d+%\|.*/40", text)


@pytest.mark.slow
def test_page_shows_what_the_cells_show(executed, smoke_folder):
    """Line by line, whatever the digits, as `ci/render_readme.py --run` left it.

    Of cells whose text differs between machines, only that they show something.
    """
    shown = json.loads(render_readme.OUTPUTS.read_text())["cells"]
    assert [cell.id for cell in executed] == [*shown]
    for cell in executed:
        texts = shown[cell.id]["text"], render_readme.text_of(cell, smoke_folder)
        # A line has a speed if there were steps of training alone since the one before.
        texts = (re.sub(r" \| tokens_per_s [\d,]+", "", text) for text in texts)
        page, ours = (re.sub(NUMBER, "0", text).splitlines() for text in texts)
        if cell.id in ("init", "prepare", "first-windows", "generate"):
            assert page and ours, cell.id
        else:  # the kill's come in any order, the worker's own and what Ray says of them
            same = cell.id == "drill" and {*page} == {*ours}
            assert page == ours or same, cell.id


@pytest.mark.slow
def test_others_say_little(executed):
    """Nothing of what they send and open."""
    outputs = [output for cell in executed for output in cell.outputs]
    said = "".join(o.text for o in outputs if o.get("name") == "stderr")
    assert not re.findall("file package|CheckpointHandler", said)


def edited(name: str, *edits: tuple[str, str]):
    """A cell of the notebook, with edits, to run once more."""
    (cell,) = [cell for cell in code_cells() if cell.id == name]
    for old, new in edits:
        assert old in cell.source
        cell.source = cell.source.replace(old, new)
    cell.id = f"{name}-{len(str(edits))}"
    return cell


TEXTS = """
    texts = ([f"%s {i}" for i in range(n, n + 2_000)] for n in (0, 10_000))
    return [ray.data.from_items([{"text": text} for text in part]) for part in texts]"""


@pytest.mark.extra
def test_what_is_edited_is_what_runs(tmp_path):
    """In one kernel: all cells twice, and then an edited cell and the one that uses it."""
    line = "load_config(config_path, storage)"
    short = "load_config(config_path, storage, n_embd=32, max_steps=20)"
    again = cells_of_a_job()
    for cell in again:
        cell.id, cell.source = f"{cell.id}-again", cell.source.replace(line, short)
    body = "\n    files = " + edited("my-text").source.partition("\n    files = ")[2]
    own = line.replace(")", ", dataset='my_text', data_dir=f'{storage}/%s')")
    edits = [
        edited("my-text", (body, TEXTS % "red")),
        edited("config", (line, own % "red")),
        edited("prepare"),
        edited("my-text", (body, TEXTS % "green")),
        edited("config", (line, own % "green")),
        edited("prepare", ("tokenize)", "tokenize) ")),
        edited(
            "loop", ("    step, saving", "    print('another loop')\n    step, saving")
        ),
        edited("loss", ("return ops", "return 100 + ops")),
        edited("fit", (line, short)),
    ]
    cells = run_notebook(tmp_path / "again", *again, *edits)
    text = training_of(cells[-len(again) - len(edits) : -len(edits)])
    assert "step 20 | tokens 10,240 |" in text and "is new" in text
    text = training_of(cells[-1:])
    assert "is new" in text and "another loop" in text
    assert re.search(r"\| loss 10\d\.\d \| val_loss 10\d\.\d", text)
    assert len([*(tmp_path / "again").glob("storage/runs/smoke-*/metrics.jsonl")]) == 3
    sizes = [
        (tmp_path / f"again/storage/{x}/val.bin").read_bytes() for x in ("red", "green")
    ]
    assert sizes[0] != sizes[1]


def cells_of_a_job() -> list:
    """The guide's job leaves out the asides."""
    return [c for c in code_cells() if "aside" not in c.metadata.get("tags", [])]


def test_the_cells_of_a_job_lack_no_name():
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-"]
    source = "\n".join(cell.source for cell in cells_of_a_job())
    subprocess.run(check, input=source, text=True, check=True)


@pytest.mark.parametrize(
    "workers, changes, fsdp",
    [
        (2, {}, 2),
        ([2, 4], {}, 1),  # of 2, 3, or 4 devices
        (1, {}, 1),
        (6, {}, 2),  # which divides 32, as 6 doesn't
        (4, {"tensor_parallel": 2, "fsdp": 2}, 2),
    ],
)
def test_a_run_continues_on_another_mesh_if_there_is_one(
    tutorial, small, capsys, workers, changes, fsdp
):
    """Each time that the cell runs, for 32 steps more."""
    run = small(scaling={"num_workers": workers}, batch_size=12, **changes)
    names = vars(tutorial) | {"run": run, "config_path": "", "storage": ""}
    names["load_config"] = lambda path, storage, **given: replace(run, **given)
    names["make_trainer"] = lambda config, loop: config

    def fit(config):
        for number in tutorial.launch._numbers_of_devices(ScalingConfig(**run.scaling)):
            replace(config, eval_windows=12).layout(number)
        return SimpleNamespace(metrics={"step": config.max_steps})

    names |= {"fit": fit, "result": fit(run)}
    (cell,) = [cell for cell in code_cells() if cell.id == "continue"]
    for times in (1, 2):
        exec(cell.source, names)
        assert names["more"].max_steps == run.max_steps + 32 * times
        assert names["more"].fsdp == fsdp and names["more"].run_name == run.run_name
        assert ("stays as it is" in capsys.readouterr().out) == (fsdp == run.fsdp)


def test_a_page_shows_what_its_own_code_has_shown():
    """Neither what other code did, nor what a person's kernel left in the notebook."""
    notebook = nbformat.read(ROOT / "README.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.source += "\n"
    with pytest.raises(SystemExit, match=f"'{cell.id}' isn't that of the last run"):
        render_readme.with_outputs(notebook)
    cell.outputs = [nbformat.v4.new_output("stream", text="of a person")]
    with pytest.raises(SystemExit, match=f"'{cell.id}' has outputs; clear them"):
        render_readme.to_markdown(notebook)


def test_readme_is_in_step_and_a_stale_one_is_noticed(tmp_path):
    for name in ("ci", "docs", "examples", "trainkit"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.ipynb", tmp_path)
    page, render = tmp_path / "README.md", tmp_path / "ci/render_readme.py"
    ours = (ROOT / "README.md").read_text()
    page.write_text(ours.replace("JaxTrainer", "Other", 1))
    stale = r"(?s)\n-[^\n]*Other.*\n\+[^\n]*JaxTrainer"
    with pytest.raises(AssertionError, match=stale):
        python(render, "--check")
    python(render)
    assert page.read_text() == ours
    file = "examples/survive.py"
    assert (tmp_path / file).read_text() == (ROOT / file).read_text()

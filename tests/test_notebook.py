"""The whole notebook, as its users run it, its form, and the page made from it."""

import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import ray.train
import reading_time
import render_readme
from conftest import WITH_PYTORCH, stop_ray
from notebook_module import code_cells

import trainkit.huggingface

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/guide.md", "CONTRIBUTING.md"]
OWN = {
    "configs/books.yaml",
    "configs/mesh.yaml",
    "configs/mine.yaml",
}  # files that a reader makes
NUMBER = r"\d[\d,.]*(?:e-\d+)?"


def text_of(cells) -> str:
    """What the cells printed and showed."""
    outputs = [output for cell in cells for output in cell.outputs]
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return "\n".join(shown)


def run_again(notebook, line: str, changed: str) -> None:
    """Let the cells run twice in one kernel, the second time with one line changed.

    But the asides, which train for themselves, run once.
    """
    again = copy.deepcopy(notebook.cells)
    again = [cell for cell in again if "aside" not in cell.metadata.get("tags", [])]
    assert sum(line in cell.source for cell in again) == 1
    for cell in again:
        cell.id += "-again"
        cell.source = cell.source.replace(line, changed)
    notebook.cells += again


def run_notebook(folder: Path, again: str | None = None) -> None:
    """Run the notebook in `folder` by `pytest --nbmake`, as CI does.

    Args:
        again: how to load the configuration when the cells run a second time.
    """
    stop_ray()  # the processor is for the notebook's cluster
    notebook = nbformat.read(ROOT / "README.ipynb", as_version=4)
    if again:
        run_again(notebook, "load_config(config_path)", again)
    nbformat.write(notebook, folder / "README.ipynb")
    for name in ("configs", "trainkit"):
        shutil.copytree(ROOT / name, folder / name)
    environment = os.environ | {"RAY_ADDRESS": "local"}
    environment["GPT2_CONFIG"] = "configs/smoke.yaml"
    environment.pop("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", None)  # as its users have it
    command = "-m pytest --nbmake --overwrite --nbmake-timeout=900 README.ipynb"
    result = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert result.returncode == 0, result.stdout[-5000:]


@pytest.fixture(scope="module")
def smoke_folder(tmp_path_factory):
    """A folder in which the notebook has run; a space in its name does no harm."""
    folder = tmp_path_factory.mktemp("smoke") / "my folder"
    folder.mkdir()
    run_notebook(folder)
    return folder


@pytest.fixture(scope="module")
def executed(smoke_folder):
    """The code cells of the executed notebook."""
    return code_cells(smoke_folder / "README.ipynb")


def training_of(cells) -> str:
    """What the training cell printed."""
    (cell,) = (c for c in cells if c.source.startswith("result = make_trainer(config)"))
    return text_of([cell])


@pytest.mark.slow
def test_notebook_trains(executed):
    text = training_of(executed)
    losses = [float(x) for x in re.findall(r"\| loss ([\d.]+)", text)]
    validation = [float(x) for x in re.findall(r"val_loss ([\d.]+)", text)]
    assert 10 < losses[0] < 11.5 and losses[-1] < 7.5
    assert (
        len(validation) == 4
        and validation[-1] < validation[0] < 10
        and validation[-1] < 7.5
    )
    assert re.search(r"/storage/runs/smoke-\w+\nNone$", text_of(executed), re.M)
    images = [
        o for cell in executed for o in cell.outputs if "image/png" in o.get("data", {})
    ]
    assert images, "no plot"


@pytest.mark.slow
def test_page_shows_what_the_cells_show(executed, smoke_folder):
    """Line by line, whatever the digits, as `ci/render_readme.py --run` left it.

    Of cells that show text, which differs from one machine or version of Python to another,
    only that they show something.
    """
    shown = json.loads(render_readme.OUTPUTS.read_text())["cells"]
    assert [cell.id for cell in executed] == list(shown)
    for cell in executed:
        found = render_readme.text_of(cell, smoke_folder)
        texts = shown[cell.id]["text"], found
        page, ours = (re.sub(NUMBER, "0", text).splitlines() for text in texts)
        if cell.id in ("windows-demo", "prepare", "generate", "plans"):
            assert bool(page) == bool(ours), cell.id
        else:
            assert page == ours, cell.id


@pytest.mark.slow
def test_run_keeps_what_it_computes(executed, smoke_folder):
    """Its recipe, tokens, windows, and program; and no launch has it any more."""
    (kept,) = smoke_folder.glob("storage/runs/smoke-*/identity.json")
    found = json.loads(kept.read_text())
    assert found["recipe"]["n_embd"] == 128 and len(found["windows"]) == 3
    assert found["tokens"].keys() == {"train", "val"} and len(found["program"]) > 10_000
    assert not (kept.parent / "launch.txt").exists()


@pytest.mark.slow
def test_notebook_is_quiet(executed):
    """No line twice in what a reader sees, and a bar that says how far the run is."""
    text = training_of(executed)
    steps = re.findall(r"step \d+ \| tokens \S+", text)
    assert len(steps) == len(set(steps)) == 20
    assert re.search(r"smoke-\w+: +\d+%\|.*/40", text)


@pytest.mark.slow
def test_one_cell_is_run_again_in_one_kernel(tmp_path):
    """A launch sees what its program has become, with `%%time` above the cell, too."""
    stop_ray()
    cells = {c.id: c for c in code_cells() if "aside" not in c.metadata.get("tags", [])}
    names = list(cells)[: list(cells).index("trainer") + 1]
    before = [cells[name].source for name in names if name not in ("learn", "request")]
    line = "load_config(config_path)"
    tiny = "load_config(config_path, n_layer=1, n_embd=32, max_steps=2)"
    assert sum(line in source for source in before) == 1
    before = [source.replace(line, tiny) for source in before]
    fit = "try:\n    make_trainer(config).fit()\n    print('went on')\n"
    fit += "except ValueError as error:\n    print(error)"
    loss, step = cells["loss"].source, cells["step"].source
    edits = {
        "a comment": loss.replace("    return ", "    # the mean\n    return ", 1),
        "the loss": loss.replace("    return ", "    return 1.01 * ", 1),
        "the loss as it was": loss,
        "the step": "%%time\n" + step.replace("(state.step)", "(state.step + 1)", 1),
    }
    assert len({*edits.values()}) == 4
    sources = [*before, fit, *(part for text in edits.values() for part in (text, fit))]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    for name in ("configs", "trainkit"):
        shutil.copytree(ROOT / name, tmp_path / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT2_CONFIG", "configs/smoke.yaml")
        resources = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    said = dict(
        zip(
            ["first", *edits],
            map(text_of, ([c] for c in notebook.cells if c.source == fit)),
        )
    )
    for what, text in said.items():
        refused = "another program" in text and "accept_changed_program: true" in text
        assert refused == (what in ("the loss", "the step")), (what, text)
        assert refused or text.endswith("went on\n"), (what, text)
    assert "another eval_step" not in said["a comment"]


@pytest.mark.extra
def test_change_a_line_and_run_again(tmp_path):
    """In the same kernel: another model trains from its first step, and is exported."""
    run_notebook(
        tmp_path, "load_config(config_path, n_layer=1, n_embd=32, max_steps=20)"
    )
    cells = code_cells(tmp_path / "README.ipynb")
    again = [cell for cell in cells if cell.id.endswith("-again")]
    once = [cell for cell in cells if not cell.id.endswith("-again")]
    text = training_of(again)
    assert re.search(r"^.*step 2 \| tokens 1,024 \|", text, re.M)
    assert "Continuing from" not in text
    first, second = (
        [re.findall(pattern, text_of(part)) for part in (once, again)]
        for pattern in (r"([\d,]+) parameters in", r"storage/runs/(smoke-\w+)")
    )
    assert first[0] and first[1] and first[0] != first[1]
    assert second[0] and second[1] and not set(second[0]) & set(second[1])


@pytest.mark.slow
def test_exported_model_answers_where_our_code_is_not(tutorial, smoke_folder, tmp_path):
    """The model that the notebook trained, through transformers alone."""
    (saved,) = smoke_folder.glob("storage/runs/smoke-*/step_00000040")
    model = tutorial.load_model(ray.train.Checkpoint(str(saved)))
    exported = trainkit.huggingface.export(model, tmp_path / "exported")
    script = f"""
import sys
from transformers import pipeline
question = "The value of the expression"
answer = pipeline("text-generation", {str(exported)!r})(question, max_new_tokens=8)
text = answer[0]["generated_text"]
assert text.startswith(question) and len(text) > len(question), repr(text)
assert not {{"jax", "flax", "ray", "trainkit"}} & set(sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=WITH_PYTORCH | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def test_readme_is_in_step():
    rendered = render_readme.render(ROOT / "README.ipynb")
    assert (ROOT / "README.md").read_text() == rendered


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_pages_name_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:configs|ci|trainkit|tests)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists() or path in OWN, path


def test_check_notices_a_stale_readme(tmp_path):
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.ipynb", tmp_path)
    stale = (ROOT / "README.md").read_text().replace("JaxTrainer", "TorchTrainer", 1)
    (tmp_path / "README.md").write_text(stale)
    command = [sys.executable, str(tmp_path / "ci/render_readme.py")]
    check = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert check.returncode == 1
    assert re.search(r"^-.*TorchTrainer", check.stdout, re.M)
    assert re.search(r"^\+.*JaxTrainer", check.stdout, re.M)
    subprocess.run(command, check=True)
    assert subprocess.run([*command, "--check"]).returncode == 0


def test_rendering_finds_the_environment_or_says_how_to_make_it(tmp_path):
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.ipynb", tmp_path)
    command = [sys.executable, "-I", "-S", str(tmp_path / "ci/render_readme.py")]
    bare = subprocess.run(command, capture_output=True, text=True)
    assert bare.returncode == 1 and "Traceback" not in bare.stderr
    assert "No module named 'nbformat'" in bare.stderr
    assert "`bash ci/smoke.sh`" in bare.stderr
    (tmp_path / ".venv").symlink_to(sys.prefix)
    subprocess.run(command, check=True)
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_notebook_is_stored_without_outputs():
    for cell in code_cells():
        assert not cell.outputs and cell.execution_count is None


def test_public_names_of_the_design(tutorial):
    for name in (
        "TrainingConfig load_config prepare_dataset make_token_dataset GPT2 create_model "
        "create_optimizer loss_fn train_step eval_step train_loop_per_worker make_trainer "
        "load_model"
    ).split():
        assert getattr(tutorial, name).__doc__, name


def cell_with(*strings: str) -> str:
    """The source of the one code cell that has them all."""
    sources = [cell.source for cell in code_cells()]
    (found,) = (x for x in sources if all(string in x for string in strings))
    return found


def test_the_story_is_short():
    """Read in 35 minutes, with GPT-2 launched before two thirds of them."""
    steps, share = reading_time.count()
    assert sum(steps.values()) <= reading_time.LONGEST
    assert share <= reading_time.LATEST
    long = {cell_with("class GPT2("), cell_with("def train_loop_per_worker(")}
    for source in (cell.source for cell in code_cells()):
        assert len(source.splitlines()) <= (48 if source in long else 34), source
        ast.parse(source)


def test_headings_fold_and_links_lead_out_in_jupyter():
    """A heading begins its cell; Jupyter's anchors for headings aren't GitHub's."""
    for cell in nbformat.read(ROOT / "README.ipynb", as_version=4).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"^```.*?^```", "", cell.source, flags=re.M | re.S)
            assert not re.search(r"\n#+ ", text), cell.id
            assert "](#" not in text, cell.id


def test_a_trainer_runs_in_the_first_quarter_of_the_page():
    page = (ROOT / "README.md").read_text()
    assert page.index(".fit()") < len(page) / 4


@pytest.mark.slow
def test_every_fourth_cell_shows_something(executed):
    in_a_row = 0
    for cell in executed:
        in_a_row = 0 if cell.outputs else in_a_row + 1
        assert in_a_row < 4, cell.source


def test_what_ray_does_stands_in_the_notebook():
    """And not in a file that the reader would have to open."""
    loop = cell_with("def train_loop_per_worker(")
    for call in (
        "ray.train.get_checkpoint()",
        "ray.train.report(",
        "checkpoint_upload",
    ):
        assert call in loop, call
    cell_with("def read_batches(", "make_token_dataset(", ".iter_batches(")
    cell_with("use_tpu=True", 'topology="4x4"', 'accelerator_type="TPU-V6E"')


MODULES = sorted((ROOT / "trainkit").glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_page_links_to_the_module(path):
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    assert re.search(rf"\]\((\.\./)?trainkit/{path.name}(#\S+)?\)", pages)

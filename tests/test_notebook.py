"""The whole notebook, as its users run it, and the page made from it."""

import ast
import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import render_readme
from conftest import WITH_PYTORCH, stop_ray
from notebook_module import code_cells

ROOT = Path(__file__).resolve().parent.parent
OWN = {"configs/books.yaml", "configs/mesh.yaml"}  # files that a reader makes
NUMBER = r"\d[\d,.]*(?:e-\d+)?"


def text_of(cells) -> str:
    """What the cells printed and showed."""
    outputs = [output for cell in cells for output in cell.outputs]
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return "\n".join(shown)


def run_again(notebook, line: str, changed: str) -> None:
    """Let the cells run twice in one kernel, the second time with one line changed.

    But the drill, whose configuration is its own, runs once.
    """
    again = copy.deepcopy(notebook.cells)
    again = [cell for cell in again if "drill" not in cell.metadata.get("tags", [])]
    assert sum(line in cell.source for cell in again) == 1
    for cell in again:
        cell.id += "-again"
        cell.source = cell.source.replace(line, changed)
    notebook.cells += again


@pytest.fixture(scope="module")
def smoke_folder(tmp_path_factory):
    """A folder in which `pytest --nbmake` has run the notebook, and run it again."""
    stop_ray()  # the processor is for the notebook's cluster
    folder = tmp_path_factory.mktemp("smoke")
    notebook = nbformat.read(ROOT / "README.ipynb", as_version=4)
    changed = "load_config(config_path, n_layer=1, n_embd=32, max_steps=20)"
    run_again(notebook, "load_config(config_path)", changed)
    nbformat.write(notebook, folder / "README.ipynb")
    shutil.copytree(ROOT / "configs", folder / "configs")
    environment = os.environ | {"RAY_ADDRESS": "local"}
    environment["GPT2_CONFIG"] = "configs/smoke.yaml"
    command = [
        "pytest",
        "--nbmake",
        "--overwrite",
        "--nbmake-timeout=900",
        "README.ipynb",
    ]
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return folder


@pytest.fixture(scope="module")
def executed(smoke_folder):
    """The code cells of the executed notebook."""
    cells = code_cells(smoke_folder / "README.ipynb")
    return [cell for cell in cells if not cell.id.endswith("-again")]


@pytest.fixture(scope="module")
def executed_again(smoke_folder):
    """The same cells, from the second time, with a smaller model."""
    cells = code_cells(smoke_folder / "README.ipynb")
    return [cell for cell in cells if cell.id.endswith("-again")]


def training_of(cells) -> str:
    """What the training cell printed."""
    return text_of(c for c in cells if "result = trainer.fit()" in c.source)


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
    assert re.search(r"error: +None", text_of(executed))
    images = [
        o for cell in executed for o in cell.outputs if "image/png" in o.get("data", {})
    ]
    assert images, "no plot"


@pytest.mark.slow
def test_notebook_shows_what_the_page_promises(executed):
    text = text_of(executed)
    for pattern in (
        r"1 node\(s\), \d+ CPUs, no accelerator",
        r"6,837,888 parameters in configs/smoke.yaml",
        r"first loss 10\.\d+; ln\(50,257\) is 10\.82",
        r"y = 3.00 x \+ 1.00, from 128 points",
        r"devices of each worker: \[1, 1\]",
        r"perplexity \d+\.\d",
        r"The value of the expression",
        r"model.safetensors",
    ):
        assert re.search(pattern, text), pattern


@pytest.mark.slow
def test_expected_output_has_the_form_of_the_real_one(executed):
    """Line by line, whatever the digits."""
    shown = re.sub(NUMBER, "0", text_of(executed))
    blocks = re.findall(
        r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 7
    for line in lines:
        assert re.sub(NUMBER, "0", line) in shown, line


@pytest.mark.slow
def test_notebook_is_quiet(executed):
    """No line twice in what a reader sees, and a bar that says how far the run is."""
    text = training_of(executed)
    steps = re.findall(r"step \d+ \| tokens \S+", text)
    assert len(steps) == len(set(steps)) == 20
    assert re.search(r"smoke-\w+: +\d+%\|.*/40", text)


@pytest.mark.slow
def test_change_a_line_and_run_again(executed, executed_again):
    """In the same kernel: another model trains from its first step, and is exported."""
    text = training_of(executed_again)
    assert re.search(r"^.*step 2 \| tokens 1,024 \|", text, re.M)
    assert "Going on from" not in text
    first, second = (
        [re.findall(pattern, text_of(cells)) for cells in (executed, executed_again)]
        for pattern in (r"([\d,]+) parameters in", r"storage/runs/(smoke-\w+)")
    )
    assert first[0] and first[1] and first[0] != first[1]
    assert second[0] and second[1] and not set(second[0]) & set(second[1])


@pytest.mark.slow
def test_exported_model_answers_where_our_code_is_not(smoke_folder, tmp_path):
    """The model that the notebook trained, through transformers alone."""
    exported, *others = smoke_folder.glob("storage/data/huggingface/smoke-*")
    assert len(others) == 1  # two models, since a line was changed
    script = f"""
import sys
from transformers import pipeline
question = "The value of the expression"
answer = pipeline("text-generation", {str(exported)!r})(question, max_new_tokens=8)
text = answer[0]["generated_text"]
assert text.startswith(question) and len(text) > len(question), repr(text)
assert not {{"jax", "flax", "ray", "tutorial"}} & set(sys.modules)
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


def test_relative_links_and_images_exist():
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"\]\((?!https?://|#)([^)]+)\)", text)
    assert "images/loss.png" in paths
    for path in paths + re.findall(r"`((?:configs|ci)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists() or path in OWN, path


def test_check_notices_a_stale_readme(tmp_path):
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
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
        "create_optimizer loss_fn train_step eval_step train_loop_per_worker generate "
        "export_to_huggingface"
    ).split():
        assert getattr(tutorial, name).__doc__ or name == "create_optimizer", name


def test_cells_are_short():
    lengths = [len(cell.source.splitlines()) for cell in code_cells()]
    assert sorted(lengths)[len(lengths) // 2] <= 25, "median"
    for cell in code_cells():
        ast.parse(cell.source)

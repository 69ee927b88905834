"""What is exported, in EleutherAI's lm-evaluation-harness, as in the guide."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT

import trainkit.huggingface
import trainkit.tokenizers

GUIDE = (ROOT / "docs/guide.md").read_text()
TASK = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""
STARTS = ["A class", "The value of", "An exception is", "Python", "In a module"]
ENDINGS = ["is defined", "raised here", "an object of its own", "names"]


def likeliest(model, tokenizer, start: str) -> int:
    """The ending whose tokens have the largest probability, by our own logits."""
    encode, sums = tokenizer.encode_ordinary, []
    for ending in ENDINGS:
        context, ids = encode(start), encode(f"{start} {ending}")
        logits = jax.nn.log_softmax(model(np.array([ids[:-1]]))[0])
        rows = range(len(context) - 1, len(ids) - 1)
        sums.append(sum(float(logits[row, ids[row + 1]]) for row in rows))
    return int(np.argmax(sums))


def install(folder: Path) -> dict[str, str]:
    """The environment of a Python that has what the guide installs, in `folder`."""
    (wanted,) = re.findall(r'pip install "(lm-eval\S+)"', GUIDE)
    command = ["uv", "pip", "install", "--python", sys.executable]
    plan = subprocess.run(
        [*command, "--dry-run", wanted], capture_output=True, text=True, check=True
    )
    lacking = re.findall(r"^ \+ (\S+==\S+)$", plan.stderr, re.MULTILINE)
    if lacking:
        subprocess.run(
            [*command, "--no-deps", "--target", folder, *lacking], check=True
        )
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


def score(model, tokenizer, exported: Path, folder: Path) -> float:
    """The accuracy of the exported model, on endings of which `model` chose three of five."""
    file = folder / "endings.jsonl"
    with file.open("w") as lines:
        for number, start in enumerate(STARTS):
            choice = likeliest(model, tokenizer, start)
            label = (choice + (number > 2)) % len(ENDINGS)
            line = {"start": start, "endings": ENDINGS, "label": label}
            lines.write(json.dumps(line) + "\n")
    (folder / "endings.yaml").write_text(TASK.format(file=file))
    (command,) = re.findall(r"^(lm_eval .*?)\n```", GUIDE, re.MULTILINE | re.DOTALL)
    for theirs, ours in (
        ("hellaswag", f"endings --include_path {folder}"),
        ("storage/huggingface/RUN_NAME", str(exported)),
        ("cuda", "cpu"),
        ("lm_eval", f"{sys.executable} -m lm_eval --output_path {folder}/scores"),
    ):
        assert theirs in command
        command = command.replace(theirs, ours, 1)
    environment = install(folder / "harness")
    subprocess.run(command, shell=True, env=environment, check=True)
    (scores,) = (folder / "scores").rglob("*.json")
    return json.loads(scores.read_text())["results"]["endings"]["acc,none"]


@pytest.mark.extra
def test_an_exported_model_is_scored(tutorial, small, tmp_path):
    model = tutorial.create_model(small(vocab_size=50_257, block_size=64))
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    tokenizer = trainkit.tokenizers.load("gpt2")
    assert score(model, tokenizer, folder, tmp_path) == pytest.approx(3 / 5)

"""The exported model in EleutherAI's lm-evaluation-harness, as the guide shows it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiktoken

import trainkit.huggingface

ROOT = Path(__file__).resolve().parent.parent
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


def likeliest(model, start: str) -> int:
    """The ending whose tokens have the largest probability, by our own logits."""
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    sums = []
    for ending in ENDINGS:
        context, ids = encode(start), encode(f"{start} {ending}")
        logits = jax.nn.log_softmax(model(np.array([ids[:-1]]))[0])
        rows = range(len(context) - 1, len(ids) - 1)
        sums.append(sum(float(logits[row, ids[row + 1]]) for row in rows))
    return int(np.argmax(sums))


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> dict[str, str]:
    """The environment of a Python that has what the guide installs, in a folder of its own."""
    text = (ROOT / "docs/guide.md").read_text()
    (wanted,) = re.findall(r'pip install "(lm-eval\S+)"', text)
    folder = tmp_path_factory.mktemp("harness")
    install = ["uv", "pip", "install", "--python", sys.executable]
    plan = subprocess.run(
        [*install, "--dry-run", wanted], capture_output=True, text=True, check=True
    )
    lacking = re.findall(r"^ \+ (\S+==\S+)$", plan.stderr, re.MULTILINE)
    if lacking:
        subprocess.run(
            [*install, "--no-deps", "--target", folder, *lacking], check=True
        )
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


@pytest.mark.extra
def test_an_exported_model_is_scored(tutorial, small, tmp_path, harness):
    """On endings of which the model itself chose three, and two that it did not."""
    model = tutorial.create_model(small(vocab_size=50_257, block_size=64))
    folder = trainkit.huggingface.export(model, tmp_path / "exported")
    file = tmp_path / "endings.jsonl"
    with file.open("w") as lines:
        for number, start in enumerate(STARTS):
            label = (likeliest(model, start) + (number > 2)) % len(ENDINGS)
            line = {"start": start, "endings": ENDINGS, "label": label}
            lines.write(json.dumps(line) + "\n")
    (tmp_path / "endings.yaml").write_text(TASK.format(file=file))

    guide = (ROOT / "docs/guide.md").read_text()
    (command,) = re.findall(r"^(lm_eval .*?)\n```", guide, re.MULTILINE | re.DOTALL)
    for theirs, ours in (
        ("hellaswag", f"endings --include_path {tmp_path}"),
        ("storage/huggingface/RUN_NAME", str(folder)),
        ("cuda", "cpu"),
        ("lm_eval", f"{sys.executable} -m lm_eval --output_path {tmp_path}/scores"),
    ):
        assert theirs in command
        command = command.replace(theirs, ours, 1)
    subprocess.run(command, shell=True, env=harness, check=True)
    (scores,) = (tmp_path / "scores").rglob("*.json")
    found = json.loads(scores.read_text())["results"]["endings"]["acc,none"]
    assert found == pytest.approx(3 / 5)

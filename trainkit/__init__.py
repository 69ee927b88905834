"""The tools that the notebook README.ipynb calls; each module does what its name says.

checks       which configurations are refused, and why
pretrained   where published weights lie, and which shape they have
config       what decides a run: TrainingConfig, load_config
corpus       documents: from the hub, from files, or built in
tokens       train.bin and val.bin, and the order of their windows
devices      the mesh of all devices, and batches on it
memory       what a step needs of it, and what to do when it runs out
layers       attention kernels, scanned blocks
loss         logits and cross-entropy, in parts
storage      storage that fails for a moment
records      which checkpoints a run has, and whether it may go on
checkpoints  save, restore, refuse
watch        shared storage, divergence, the watchdog
workers      resources, environment, the right GPUs, joining
run_log      metrics.jsonl, TensorBoard, MFU, profile
generate     text, with a cache
weights      published weights in, under Hugging Face's names
huggingface  the trained model out

Imports point one way, from the lower modules of this list to the upper ones. Nothing here
imports the notebook: what needs the model takes it as an argument.
"""

import importlib.metadata
import re
import sys

OLDEST = {"jax": "0.10.2", "flax": "0.12.8", "ray": "2.60.0"}  # that the tests ran with


def check_versions(installed: dict[str, str | None], python: str) -> None:
    """Refuse versions that are known not to work; newer ones than those tested may run.

    Args:
        installed: the versions of the packages of OLDEST, None for one that is missing.
        python: the version of Python.

    Raises:
        ImportError: with what was found, what is needed, and the command that installs it.
    """

    def number(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)[:3]]

    if number(python) < [3, 11]:
        raise ImportError(
            f"Python is {python}, and 3.11 or newer is needed. Make a virtual environment "
            "with a newer one, and choose it as the notebook's kernel."
        )
    wrong = []
    for name, oldest in OLDEST.items():
        found = installed[name]
        if not found or number(found) < number(oldest):
            state = f"is {found}, and" if found else "is missing;"
            wrong += [f"{name} {state} {oldest} or newer is needed"]
    if not wrong:
        jax, flax = number(installed["jax"]), number(installed["flax"])
        pair = (
            f"flax {installed['flax']} doesn't go with jax {installed['jax']}: it needs"
        )
        if flax >= [0, 12, 10] and jax < [0, 11, 1]:
            wrong += [f"{pair} jax 0.11.1 or newer"]
        elif flax < [0, 12, 10] and jax >= [0, 11, 2]:
            wrong += [f"{pair} jax 0.11.1 or older"]
    if wrong:
        raise ImportError(
            "; ".join(wrong)
            + f". Found in {sys.prefix}. Run: pip install -r requirements-gpu.txt (NVIDIA "
            "GPUs), requirements-tpu.txt (Google TPUs), or ci/requirements.txt (neither), "
            "and restart the kernel."
        )


def installed_version(name: str) -> str | None:
    """The version of the package `name`, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if " " in sys.executable:
    raise ImportError(
        "Ray can't start workers with a Python whose path holds a space, found "
        f"{sys.executable!r}. Move it, or the folder with its virtual environment."
    )
if sys.platform not in ("linux", "darwin"):
    raise ImportError(
        f"trainkit runs on Linux and macOS, found {sys.platform!r}. On Windows, use WSL 2."
    )
check_versions(
    {name: installed_version(name) for name in OLDEST}, sys.version.split()[0]
)

"""The tools that the notebook README.ipynb calls; each module does what its name says.

tokenizers    tiktoken's and Hugging Face's, by name
config        what decides a run: TrainingConfig, load_config, and what is refused
fingerprints  what tells files from others, and code from other code
corpus        documents: from the hub, from files, or built in
token_files   train.bin and val.bin, and the order of their windows
devices       the mesh of all devices, and batches on it
gradients     of micro-batches, and over all devices
layers        attention kernels, scanned blocks, the loss in parts
huggingface   published weights in, the trained model out
states        models and states, as shapes and as arrays
checkpoints   save, restore, refuse; which are whole
run_log       metrics.jsonl, TensorBoard, MFU, profile, divergence
workers       resources, environment, the right GPUs, how each starts and is watched
launch        whether a launch may continue: one at a time, the same recipe, code, and tokens
generate      text, with a cache

Imports point one way, from the lower modules of this list to the upper ones; only to start
from published weights does `config` ask `huggingface` for their shape. Nothing here imports
the notebook: what needs the model takes it as an argument.
"""

import importlib.metadata
import os
import platform
import re
import socket
import sys

OLDEST = {"jax": "0.10.2", "flax": "0.12.8", "ray": "2.60.0"}  # that the tests ran with


def set_up_driver() -> None:
    """Prepare this process to start or join a Ray cluster: the notebook's first call.

    Raises:
        ImportError: as `check_versions` says.
        ConnectionError: as `check_address` says.
    """
    check_versions()
    check_address()
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each line appears twice
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = (
        "0.5"  # notice a dead worker sooner
    )


def check_address() -> None:
    """Refuse a RAY_ADDRESS where nothing answers; Ray would try for minutes.

    Raises:
        ConnectionError: with the address, and what to do.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if not (found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", address)):
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=5).close()
    except OSError as error:
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, and no cluster answers there ({error}). Start it, "
            "or unset RAY_ADDRESS to start Ray on this machine."
        ) from error


def check_versions() -> None:
    """Refuse versions that are known not to work; newer ones than those tested may.

    Raises:
        ImportError: with what was found, what is needed, and the command that installs it.
    """

    def number(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)[:3]]

    python = platform.python_version()
    if number(python) < [3, 11]:
        raise ImportError(
            f"Python is {python}, and 3.11 or newer is needed. Make a "
            "virtual environment with a newer one, and choose it as the notebook's kernel."
        )
    found, wrong = {}, []
    for name, oldest in OLDEST.items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong += [f"{name} is missing"]
            continue
        if number(found[name]) < number(oldest):
            wrong += [f"{name} is {found[name]}, and {oldest} or newer is needed"]
    if not wrong:
        jax, flax = number(found["jax"]), number(found["flax"])
        needs = f"flax {found['flax']} needs jax 0.11.1"
        if flax >= [0, 12, 10] and jax < [0, 11, 1]:
            wrong = [f"{needs} or newer, found {found['jax']}"]
        elif flax < [0, 12, 10] and jax >= [0, 11, 2]:
            wrong = [f"{needs} or older, found {found['jax']}"]
    if wrong:
        raise ImportError(
            f"In {sys.prefix}, {'; '.join(wrong)}. Install what was tested, with `pip install "
            "-r` and requirements-gpu.txt (NVIDIA GPUs), requirements-tpu.txt (Google TPUs), "
            "or ci/requirements.txt (neither), and restart the kernel."
        )


if " " in sys.executable:
    raise ImportError(
        "Ray can't start workers with a Python whose path holds a space, found "
        f"{sys.executable!r}. Move it, or the folder with its virtual environment."
    )
if sys.platform not in ("linux", "darwin"):
    raise ImportError(
        f"trainkit runs on Linux and macOS, found {sys.platform!r}. On Windows, use WSL 2."
    )

"""The tools that the notebook README.ipynb calls; each module does what its name says.

tokenizers    tiktoken's and Hugging Face's, by name
config        what decides a run: TrainingConfig, load_config, and what is refused
token_files   train.bin and val.bin, and the order of their windows
corpus        documents: from the hub, from files, or built in
devices       the mesh of all devices, and batches on it
gradients     of micro-batches, and over all devices
layers        attention kernels, scanned blocks, the loss in parts
huggingface   published weights in, the trained model out
states        models and states, as shapes and as arrays
lock          one launch of a run at a time
checkpoints   save, restore; which are whole
workers       resources, environment, the right GPUs, how each starts and is watched
run_log       metrics.jsonl, progress, divergence
launch        whether a run may go on: with the same recipe, program, and tokens
generate      text, with a cache

Imports point one way, from the lower modules of this list to the upper ones; only to start
from published weights does `config` ask `huggingface` for their shape. Nothing here imports
the notebook: what needs the model takes it as an argument.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

OLDEST = {"jax": "0.10.2", "flax": "0.12.8", "ray": "2.60.0"}  # that the tests ran with
NEXT = {"orbax-checkpoint": "1"}  # whose interface is another


def set_up_driver() -> None:
    """Prepare this process to start or join a Ray cluster: call it before Ray is imported.

    Raises:
        ImportError: as `check_versions` says.
        ConnectionError: as `check_address` says.
    """
    check_versions()
    check_address()
    if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
        # Under `uv run`, Ray would start each worker with uv, in an environment without Ray.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        if not can_write_home() and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each line appears twice
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = (
        "0.5"  # notice a dead worker sooner
    )


def can_write_home() -> bool:
    """Whether Ray can keep in the home folder the token that its processes show."""
    with contextlib.suppress(OSError, RuntimeError):
        return os.access(Path.home(), os.W_OK)
    return False


def check_cluster(seconds: float = 60) -> dict[str, float]:
    """The CPUs, GPUs, and TPUs of the cluster, whose processes can run this package.

    Raises:
        RuntimeError: none has run a task in so many seconds; Ray would wait on.
    """
    import ray

    task = ray.remote(num_cpus=0)(lambda: importlib.import_module(__name__).__name__)
    try:
        ray.get(task.remote(), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(
            f"Ray has started no process within {seconds:.0f} s. On the cluster's nodes, "
            "/tmp/ray/session_latest/logs/raylet.err says why; often the Python there lacks "
            "Ray. Restart the kernel after you have mended it."
        ) from error
    found = ray.cluster_resources()
    return {kind: found.get(kind, 0) for kind in ("CPU", "GPU", "TPU")}


def check_address() -> None:
    """Refuse a RAY_ADDRESS where no cluster takes this process; Ray would try for long.

    Raises:
        ConnectionError: with the address, and what to do.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, a dashboard's address, which takes jobs. Set it to "
            "the cluster's own, such as 10.0.0.1:6379, or unset it and use `ray job submit`."
        )
    if not (found := re.fullmatch(r"(ray://)?(\[?([^/\]]+)\]?:(\d+))", address)):
        return
    try:
        socket.create_connection((found[3], int(found[4])), timeout=5).close()
    except OSError as error:
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, and no cluster answers there ({error}). Start it, "
            "or unset RAY_ADDRESS to start Ray on this machine."
        ) from error
    if found[1]:
        return
    ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address"]
    try:
        asked = subprocess.run(
            [*ask, found[2]], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired as error:
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, and what answers there isn't a Ray cluster, or "
            "hangs. Correct the address, or unset RAY_ADDRESS to start Ray on this machine."
        ) from error
    if "AuthenticationError" in asked.stderr:
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, and that cluster asks for a token. Set "
            "RAY_AUTH_MODE to token and RAY_AUTH_TOKEN to what `ray get-auth-token` prints "
            "on its head node, and restart the kernel."
        )


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
    for name, following in NEXT.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if number(version) >= number(following):
                wrong += [f"{name} is {version}, and one before {following} is needed"]
    if {"jax", "flax"} <= found.keys() and not wrong:
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

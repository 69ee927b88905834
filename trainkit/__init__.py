"""The tools that the notebook README.ipynb calls; each module does what its name says.

tokenizers    tiktoken's and Hugging Face's, by name
token_files   train.bin and val.bin, and the order of their windows
huggingface   published weights in, the trained model out
config        what decides a run: TrainingConfig, load_config, and what is refused
corpus        documents: from the hub, from files, or built in
sharding      the mesh, batches and states on it, the mean over micro-batches and devices
layers        attention kernels, scanned blocks, the loss in parts
lock          one launch of a run at a time
checkpoints   save, restore; which are whole
workers       resources, environment, the right GPUs, how each starts and is watched
run_log       metrics.jsonl, progress, divergence
launch        whether a run may go on: with the same recipe, program, and tokens
generate      text, with a cache

Imports point one way, from the lower modules of this list to the upper ones. Nothing here
imports the notebook: what needs the model takes it as an argument.
"""

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import secrets
import socket
import sys
from urllib.parse import urlsplit

# From the oldest that the tests ran with, as JAX is; Orbax 1 has another interface.
NEEDED = {"flax": ">=0.12.8", "orbax-checkpoint": "<1", "ray": ">=2.60"}
INSTALL = (
    "Install what was tested, with `pip install -r` and requirements-gpu.txt (NVIDIA GPUs), "
    "requirements-tpu.txt (Google TPUs), or ci/requirements.txt (neither), and restart the "
    "kernel."
)
# What workers write to their logs, and a notebook needn't show: each start, the stack of C++
# when another worker has died, and what is known and does no harm.
NOISE = (
    r"JAX distributed (service on|shutdown)|JAX detected proxy|Initialized JAX|\[Gloo\] Rank",
    r"Requesting resources|Attempting to start|Reporting training|PreemptionWatcher",
    r"PyTorch was not found|exclude_resources|preemption_sync|_service_agent|GRPC error info",
    r"^:UNKNOWN:Error|^\t(class_name|actor_id|pid|namespace|ip): |^The actor is dead because",
    r"^I\d{4} [\d:.]+ |tpu_version_flag|^Log (file|line)|^Running on machine|^Binary: Built",
    r"\*\*\* (Check|SIGABRT)|PC: @| @ +0x|Python error: Abort|Extension modules: |^, \w+\._",
)


def set_up_driver() -> None:
    """Prepare this process, before JAX and Ray are imported, to start or join a cluster.

    Raises:
        ImportError: Python or a package is missing, or known not to work.
        ConnectionError: nothing answers at RAY_ADDRESS.
    """
    check_versions()
    check_address()
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX claims every device that it sees
    if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
        # Under `uv run`, Ray would start each worker with uv, in an environment without Ray.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        can_keep_token = os.access(os.path.expanduser("~"), os.W_OK)
        if not can_keep_token and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "|".join(NOISE))  # "" shows all
    for name in ("_private.authentication", "_private.runtime_env", "data._internal"):
        logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
    os.environ["RAY_DATA_LOG_LEVEL"] = "WARNING"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each line appears twice
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # to notice a dead worker


def check_versions() -> None:
    """Refuse versions that are known not to work; newer ones than those tested may.

    Raises:
        ImportError: with what was found, what is needed, and the command that installs it.
    """
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version
    except ModuleNotFoundError as error:
        raise ImportError(
            f"In {sys.prefix}, packaging is missing. {INSTALL}"
        ) from error
    found = {"Python": platform.python_version().rstrip("+")}
    for name in (*NEEDED, "jax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    flax, jax = Version(found.get("flax", "0")), ">=0.10.2"
    if flax >= Version("0.12.10"):
        jax = ">=0.11.1"
    elif flax >= Version("0.12.8"):
        jax += ",<0.11.2"
    wrong = [
        f"{name} is {found.get(name, 'missing')}, and {versions} is needed"
        for name, versions in (NEEDED | {"Python": ">=3.11", "jax": jax}).items()
        if name not in found
        or found[name] not in SpecifierSet(versions, prereleases=True)
    ]
    if wrong:
        raise ImportError(f"In {sys.prefix}, {'; '.join(wrong)}. {INSTALL}")


def check_address() -> None:
    """Refuse a RAY_ADDRESS where nothing answers; Ray would try for minutes.

    Raises:
        ConnectionError: with the address, and what to do.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        if parts.port:  # "auto" and "local" have none
            socket.create_connection((parts.hostname, parts.port), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, and no cluster answers there ({error}). Start it, "
            "or unset RAY_ADDRESS to start Ray on this machine."
        ) from error


if re.search(r"[ \t\n&;|<>(){}$`\\\"'*?]", sys.executable):
    raise ImportError(
        "Ray can't start workers with a Python whose path holds a space or a character that a "
        f"shell reads, found {sys.executable}. Move it, or the folder of its environment."
    )
if sys.platform not in ("linux", "darwin"):
    raise ImportError(
        f"trainkit runs on Linux and macOS, found {sys.platform!r}. On Windows, use WSL 2."
    )

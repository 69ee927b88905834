"""Run a file of tests on a node's GPUs, which the head, where this is called, lacks.

python tests/on_gpus.py GPUS FILE
"""

import os
import subprocess
import sys

import ray


def run(file: str) -> int:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "pytest", "nbformat"]
    subprocess.run(install, check=True)
    command = [sys.executable, "-m", "pytest", file]
    variables = os.environ | {"JAX_PLATFORMS": ""}  # whatever is there
    return subprocess.run(command, env=variables).returncode


if __name__ == "__main__":
    gpus, file = sys.argv[1:]
    ray.init(runtime_env={"working_dir": ".", "pip": "python_depset.lock"})
    sys.exit(ray.get(ray.remote(num_gpus=int(gpus))(run).remote(file)))

"""Compile the notebook's train step for GPUs or TPUs that aren't there.

    python benchmarks/compile.py configs/gpt2-124m.yaml 8xh200 [key=value ...]
    python benchmarks/compile.py configs/gpt2-124m-tpu-v6e.yaml v6e:4x4 [key=value ...]
    python benchmarks/compile.py configs/llama-1b-gpu.yaml 8xh200 --model examples/llama.py

For GPUs, whose descriptions are in gpus/, `pip install 'jax[cuda12]'` brings the compiler, and
for TPUs, `pip install libtpu`. Prints, for each device, what the program keeps and takes in
memory, its attention kernels, how often which collectives stand in the program's loops and
outside, and for how long the first state and the step compiled. Nothing runs, and for GPUs
nothing is tuned, so it says nothing about speed.
"""

import argparse
import json
import math
import os
import re
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # which looks for a driver
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # others may compile at the same time

import common
import jax
from jax.experimental import topologies
from ray.train import ScalingConfig
from ruamel.yaml import YAML

import trainkit.config
import trainkit.config_files
import trainkit.launch

KERNELS = r'custom_call_target="(?:__cudnn\$fmha\w*|tpu_custom_call)"'  # of attention


def virtual_devices(name: str, config: trainkit.config.TrainingConfig) -> list:
    """Devices that exist by their description only, such as 8xh200 or v6e:4x4."""
    if ":" in name:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    count, gpu = name.split("x", 1)
    # As on a worker
    settings = trainkit.launch.environment(config, ScalingConfig(use_gpu=True))
    os.environ["XLA_FLAGS"] = settings["XLA_FLAGS"]
    jax.config.update("jax_optimization_level", settings["JAX_OPTIMIZATION_LEVEL"])
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    description = Path(__file__).parent / f"gpus/{gpu}.txtpb"
    nodes = math.ceil(int(count) / 8)
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=description.read_text(),
        topology=f"{nodes}x{int(count) // nodes}x1",
    ).devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("devices", help="8xh200, a topology such as v6e:4x4, and so on")
    parser.add_argument("changes", nargs="*", help="key=value, on top of the file")
    parser.add_argument("--model", type=Path, help="a file to put below RULES")
    parser.add_argument("--text", type=Path, help="where to write the program")
    arguments = parser.parse_intermixed_args()
    pairs = (change.split("=", 1) for change in arguments.changes)
    changes = {key: YAML(typ="safe", pure=True).load(text) for key, text in pairs}
    config = trainkit.config_files.load_config(arguments.config, "storage", **changes)
    tutorial = common.load_notebook(model=arguments.model)
    devices = virtual_devices(arguments.devices, config)
    mesh = tutorial.create_mesh(config, devices)
    state = tutorial.abstract_state(config, mesh)
    windows = jax.ShapeDtypeStruct(
        (config.batch_size, config.block_size + 1),
        config.token_dtype,
        sharding=tutorial.NamedSharding(mesh, tutorial.P(("data", "fsdp"))),
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)
    create = jax.jit(tutorial.create_state, static_argnums=0, out_shardings=shardings)
    times = [time.perf_counter()]
    create.lower(config).compile()
    times.append(time.perf_counter())
    with jax.set_mesh(mesh):
        compiled = tutorial.train_step.lower(state, windows, config).compile()
    times.append(time.perf_counter())
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    if arguments.text:
        arguments.text.write_text(text)
    report = {
        "config": Path(arguments.config).stem,
        **config.layout(len(devices)),
        "state_gib": round(memory.argument_size_in_bytes / 2**30, 2),
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 2),
        "attention_kernels": len(re.findall(KERNELS, text)),
        "collectives": common.collectives(text),
        "seconds_to_compile": {
            "first_state": round(times[1] - times[0], 1),
            "step": round(times[2] - times[1], 1),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""How memory and communication grow with devices and with the model, from compiled programs.

    python benchmarks/scaling.py

Compiles the notebook's train step for 1, 2, 4, and 8 simulated CPU devices, with the devices
in parallel on the data or on the parameters (FSDP), and for each size of GPT-2.
Runs nothing; prints what XLA says of the programs.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from common import load_notebook
from program import collectives, parse
from tpu_compile import compile_step

import trainkit.config
import trainkit.devices

SIZES = {  # layers, heads, width
    "124M": (12, 12, 768),
    "355M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}


def row(tutorial, devices: int, fsdp: int, size: str) -> str:
    layers, heads, width = SIZES[size]
    config = trainkit.config.TrainingConfig(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        batch_size=devices,
        devices_per_worker=devices,
        fsdp=fsdp,
        loss_chunks=8,
        scan_layers=True,
    )
    mesh = trainkit.devices.make_mesh(config, jax.devices()[:devices])
    compiled, _, seconds = compile_step(tutorial, config, mesh)
    memory = compiled.memory_analysis()
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    found = collectives(parse(compiled.as_text()))
    moved = sum(c["bytes"] * c["times"] for c in found)
    return (
        f"| {size} | {devices} | {devices // fsdp} x {fsdp} | {state / 2**30:.2f} GiB "
        f"| {temporary / 2**30:.2f} GiB | {moved / 2**20:,.0f} MiB | {seconds:.0f} s |"
    )


def main() -> None:
    tutorial = load_notebook()
    print(
        "| model | devices | data x fsdp | state | temporary | collectives | compile |"
    )
    print("|---|---|---|---|---|---|---|")
    for devices in (1, 2, 4, 8):
        for fsdp in sorted({1, devices}):
            print(row(tutorial, devices, fsdp, "124M"), flush=True)
    for size in list(SIZES)[1:]:
        print(row(tutorial, 8, 8, size), flush=True)


if __name__ == "__main__":
    main()

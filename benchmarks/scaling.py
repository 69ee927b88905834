"""How memory and communication grow with devices and with the model, from compiled programs.

    python benchmarks/scaling.py

Compiles the notebook's train step for 1, 2, 4, and 8 simulated CPU devices, with the devices
in parallel on the data or on the parameters (FSDP), and for each size of GPT-2.
Runs nothing; prints what XLA says of the programs.
"""

import math
import os
import re
from functools import cache

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
from common import load_notebook
from tpu_compile import COLLECTIVES, compile_step

import trainkit.config
import trainkit.devices

BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u16": 2, "pred": 1}
SIZES = {  # layers, heads, width
    "124M": (12, 12, 768),
    "355M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}


def bytes_of(results: str) -> int:
    """The bytes of the arrays in an HLO type, such as "(f32[2,3], bf16[4])"."""
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", results)
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in filter(None, shape.split(",")))
        for dtype, shape in shapes
    )


def collective_bytes(program: str) -> int:
    """The bytes of all results of collectives in a compiled program, on one device.

    What stands in a loop counts as often as the loop runs.
    """
    blocks = re.findall(r"^(ENTRY )?(%\S+) \(.*?\{$(.*?)^\}", program, re.M | re.S)
    bodies = {name: body for _, name, body in blocks}
    [entry] = [name for is_entry, name, _ in blocks if is_entry]

    @cache
    def moved(name: str) -> int:
        total = 0
        for line in bodies[name].splitlines():
            if found := re.search(rf" = (.*?) (?:{COLLECTIVES})(?:-start)?\(", line):
                total += bytes_of(found[1])
            times = 1
            if " while(" in line:
                times = int(re.search(r'"known_trip_count":\{"n":"(\d+)"', line)[1])
            for called in re.findall(r"(?:calls|to_apply|body)=(%[\w.-]+)", line):
                total += times * moved(called)
        return total

    return moved(entry)


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
    moved = collective_bytes(compiled.as_text())
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

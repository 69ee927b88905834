"""How fast the train step is, in variants, and beside other people's.

    python benchmarks/train_step.py [cpu | gpu | tpu] [--original README.md] [--rounds 2]

Trains GPT-2 124M on one device with random tokens: the notebook's step with changes of its
configuration; the step of the tutorial that this one replaces, if `--original` names its
README.md; and Hugging Face's GPT-2 in PyTorch with the same loss, optimizer, and batch.
Every row has a process of its own in each round. Speed is the median of all steps but the
first two of a process; the time to compile is what the first step takes longer than that.
Peak memory is the device's, and on CPU the whole process's. MFU refers to the data sheet's
peak.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from common import (
    ROOT,
    flops_per_token,
    for_one_device,
    interleave,
    load_notebook,
    memory_in_use,
    original_training,
    peak_flops,
    print_table,
    random_windows,
)
from notebook_module import initial_state

import trainkit.config
import trainkit.sharding

CPU = {
    "platform": "cpu",
    "compute_dtype": "float32",
    "block_size": 256,
    "batch_size": 2,
}
CONFIGS = {"gpu": "gpt2-124m.yaml", "tpu": "gpt2-124m-tpu-v6e.yaml"}
VARIANTS = [  # changes of the configuration; those that it already has are left out
    {"attention": "xla"},
    {"dropout": 0.1},
    {"scan_layers": True},
    {"loss_chunks": 1},
    {"loss_chunks": 8},
    {"micro_batches": 2},  # of a batch that is twice as large
]
STEPS = {"cpu": 6, "gpu": 40, "tpu": 40}  # in each process


def make_config(platform: str, changes: dict):
    """The platform's configuration with `changes`, cut to what one device does at once."""
    if platform == "cpu":
        config = trainkit.config.TrainingConfig(**CPU)
    else:
        config = trainkit.config.load_config(ROOT / "configs" / CONFIGS[platform])
    return for_one_device(config, changes)


def variants(platform: str) -> list[dict]:
    """Those of VARIANTS that change the configuration."""
    config = make_config(platform, {})
    return [v for v in VARIANTS if all(getattr(config, k) != x for k, x in v.items())]


def our_step(tutorial, config) -> Callable:
    """The notebook's step, fed from the device's memory."""
    import jax

    mesh = trainkit.sharding.make_mesh(config, jax.devices()[:1])
    jax.set_mesh(mesh)
    state = initial_state(tutorial, config, mesh)
    windows = jax.device_put(random_windows(config))

    def step():
        nonlocal state
        state, _ = tutorial.train_step(state, windows, config)
        jax.block_until_ready(state)

    return step


def original_step(tutorial, config, path: str) -> Callable:
    """The original's step at the same size; its dropout is 0.1."""
    import jax
    from flax import nnx

    create, train_step = original_training(path, config)
    (model, optimizer, metrics), windows = create(), random_windows(config)
    batch = jax.device_put(
        (windows[:, :-1].astype("int32"), windows[:, 1:].astype("int32"))
    )

    def step():
        loss = train_step(model, optimizer, metrics, batch)
        jax.block_until_ready((loss, nnx.state(model)))

    return step


def pytorch_step(tutorial, config, compiled: bool) -> Callable:
    """Hugging Face's GPT-2 with the notebook's loss and optimizer, in PyTorch."""
    import torch
    import transformers

    import trainkit.huggingface

    device = "cuda" if config.platform == "gpu" else "cpu"
    settings = trainkit.huggingface.their_config(config)
    model = transformers.GPT2LMHeadModel(settings).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        config.learning_rate,
        (config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )
    windows = torch.from_numpy(random_windows(config).astype(np.int64)).to(device)
    bfloat16 = config.compute_dtype == "bfloat16"
    forward = torch.compile(model) if compiled else model

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            logits = forward(windows[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), windows[:, 1:].flatten()
        )
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def device(torchs: bool) -> tuple[str, int]:
    """The device's name, and the most bytes in use so far; on a CPU, the process's."""
    if torchs:
        import torch

        return torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()
    import jax

    return jax.devices()[0].device_kind, memory_in_use(jax.devices()[0])


def measure(platform: str, make_step: Callable, changes: dict, *arguments) -> dict:
    """What one process finds out about one row, or why it cannot."""
    tutorial = load_notebook()
    try:
        config = make_config(platform, changes)
        step = make_step(tutorial, config, *arguments)
        times = [time.perf_counter()]
        for _ in range(STEPS[platform]):
            step()
            times.append(time.perf_counter())
        name, memory = device(make_step is pytorch_step and platform == "gpu")
    except Exception as error:  # an absent package, or too little memory
        return {"error": f"not measured: {str(error).splitlines()[0]:.80}"}
    peak = peak_flops(name)
    return {
        "tokens": config.batch_size * config.block_size,
        "seconds": np.diff(times),
        "memory": memory,
        "peak_tokens_per_s": peak and peak / flops_per_token(tutorial, config),
    }


def speed(runs: list[dict]) -> float:
    """Tokens/s; 0 if they could not be measured."""
    if any("error" in run for run in runs):
        return 0.0
    return runs[0]["tokens"] / np.median([run["seconds"][2:] for run in runs])


def columns(runs: list[dict], ours: float) -> list[str]:
    """The row of the table, after its name."""
    if not (tokens_per_s := speed(runs)):
        return [next(run["error"] for run in runs if "error" in run), *"----"]
    step_s, peak = runs[0]["tokens"] / tokens_per_s, runs[0]["peak_tokens_per_s"]
    memory = median(run["memory"] for run in runs)
    compile_s = median(run["seconds"][0] for run in runs) - step_s
    mfu = f"{tokens_per_s / peak:.1%}" if peak else "-"
    ratio = f"{tokens_per_s / ours:.2f}" if ours else "-"
    return [
        f"{tokens_per_s:,.0f}",
        ratio,
        mfu,
        f"{memory / 2**30:.1f} GiB",
        f"{compile_s:.0f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", nargs="?", default="cpu", choices=list(STEPS))
    parser.add_argument("--original", help="README.md of the original tutorial")
    parser.add_argument("--rounds", type=int, default=2)
    platform, original, rounds = vars(parser.parse_args()).values()
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(platform, platform)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # compile in every round
    rows = {"ours": (our_step, {})}
    for changes in variants(platform):
        ((key, value),) = changes.items()
        rows[f"ours, {key}: {value}"] = our_step, changes
    if original:
        rows["the original tutorial"] = original_step, {}, original
    if platform != "tpu":
        rows["Hugging Face in PyTorch, eager"] = pytorch_step, {}, False
        rows["Hugging Face in PyTorch, compiled"] = pytorch_step, {}, True
    runs = interleave(measure, [(platform, *row) for row in rows.values()], rounds)
    runs = dict(zip(rows, runs))
    base = speed(runs["ours"])
    table = [[name, *columns(runs[name], base)] for name in rows]
    if not original:
        table.append(["the original tutorial", "not measured", *"----"])
    header = "step|tokens/s|ratio to ours|MFU|peak memory|time to compile"
    print_table(header.split("|"), table, ["jax", "flax", "torch", "transformers"])
    fastest = max(
        (name for name in rows if name.startswith("ours")), key=lambda n: speed(runs[n])
    )
    print(f"\nThe fastest of ours: {fastest}")


if __name__ == "__main__":
    main()

"""Which configurations are refused: mistakes that show only when two fields meet.

Each function raises a ValueError that names the fields, what they hold, and what would do.
`config` is a `trainkit.config.TrainingConfig` throughout.
"""

import re

# https://cloud.google.com/tpu/docs/v6e and v5e; other generations are left to Ray.
SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
TPU_TOPOLOGIES = {"TPU-V6E": SLICES_2D, "TPU-V5LITEPOD": SLICES_2D}
SPLASH_BLOCK = 512  # tokens that the TPU's attention kernel takes at once


def check(config) -> None:
    """Refuse what no machine could run."""
    check_fields(config)
    check_attention(config)
    check_topology(config)
    if config.num_workers or config.topology:  # otherwise `workers.complete` knows them
        fewest, most = config.worker_range
        counts = range(fewest, most + 1, config.workers_per_slice)
        check_range(config, list(counts))
        for workers in counts:
            check_mesh(config, workers)


def check_fields(config) -> None:
    """Refuse sizes that don't divide, and fields that contradict each other."""
    divisors = {
        "n_embd": "n_head",
        "n_head": "tensor_parallel",
        "block_size": "loss_chunks",
    }
    for name, divisor in divisors.items():
        size, parts = getattr(config, name), getattr(config, divisor)
        if size % parts:
            raise ValueError(f"{name} ({size}) is no multiple of {divisor} ({parts})")
    fewest, most = config.worker_range
    first, last = config.profile_steps or (0, 1)
    if fewest > most:
        raise ValueError(
            f"num_workers: expected the fewest and then the most, as in [{most}, "
            f"{fewest}]; found [{fewest}, {most}]"
        )
    if first >= last:
        raise ValueError(
            f"profile_steps: expected two steps, the second after the first, as in "
            f"[10, 13]; found [{first}, {last}]"
        )
    if config.remote and not re.fullmatch(r"(s3|gs)://[^/]+.*", config.storage_path):
        raise ValueError(
            f"storage_path ({config.storage_path}): expected a folder, or an object store "
            "as in s3://bucket/runs or gs://bucket/runs"
        )
    if config.profile_steps and config.remote:
        raise ValueError("profile_steps: the profiler can't write to an object store")
    if "://" in config.data_dir:
        raise ValueError("data_dir: expected a folder that all nodes share, not a URL")
    if config.min_learning_rate > config.learning_rate:
        raise ValueError(
            f"min_learning_rate ({config.min_learning_rate}) exceeds learning_rate "
            f"({config.learning_rate})"
        )
    if config.decay_steps <= config.warmup_steps:
        raise ValueError(
            f"decay_steps ({config.decay_steps}) must be larger than warmup_steps "
            f"({config.warmup_steps})"
        )


def check_attention(config) -> None:
    """Refuse a kernel where it doesn't run."""
    needed = {"cudnn": "gpu", "splash": "tpu"}.get(config.attention)
    if needed and config.platform != needed:
        raise ValueError(
            f"attention: {config.attention} needs platform: {needed}, not {config.platform}"
        )
    head = config.n_embd // config.n_head
    fits = config.compute_dtype == "bfloat16" and head % 8 == 0 and head <= 256
    if config.attention == "cudnn" and not fits:
        raise ValueError(
            "attention: cudnn needs compute_dtype: bfloat16 and n_embd / n_head a multiple "
            "of 8, at most 256 (128 on Ampere); found "
            f"{config.compute_dtype} and {head}"
        )
    if config.attention == "splash" and config.block_size % SPLASH_BLOCK:
        raise ValueError(
            f"block_size ({config.block_size}) must be a multiple of {SPLASH_BLOCK} for "
            "attention: splash"
        )


def check_topology(config) -> None:
    """Refuse a TPU slice that isn't made, or that the workers don't fill.

    Ray would wait for it forever.
    """
    is_tpu = config.topology or (config.accelerator_type or "").startswith("TPU")
    if is_tpu and config.platform != "tpu":
        raise ValueError(
            f"topology ({config.topology}) and accelerator_type "
            f"({config.accelerator_type}) need platform: tpu, not {config.platform}"
        )
    if config.platform == "tpu" and not config.topology and config.worker_range[1] > 1:
        raise ValueError(
            f"num_workers ({config.num_workers}): several TPU workers form a slice, so set its "
            "topology and accelerator_type; a TPU host by itself takes num_workers: 1"
        )
    valid = TPU_TOPOLOGIES.get(config.accelerator_type)
    if config.topology and valid and config.topology not in valid:
        raise ValueError(
            f"topology: {config.accelerator_type} has no {config.topology}; "
            f"choose one of {', '.join(valid)}"
        )
    per_slice, chips = config.workers_per_slice, config.devices_per_worker
    if config.topology and valid and config.chips > 8 and chips != 4:
        raise ValueError(
            f"devices_per_worker: a host of a {config.topology} slice has 4 chips, and a "
            f"worker takes all of them; found {chips}"
        )
    uneven = any(workers % per_slice for workers in config.worker_range)
    if uneven or (config.topology and per_slice * chips != config.chips):
        raise ValueError(
            f"num_workers: a {config.topology} slice takes {per_slice} workers with "
            f"{chips} chips each, so set {per_slice} or, for several slices, a "
            f"multiple; found {config.num_workers}"
        )


def shares_evenly(config, workers: int) -> bool:
    """Whether the devices of so many workers form the mesh and divide a batch."""
    data, fsdp, tensor = config.mesh_shape(workers)
    whole = data * fsdp * tensor == workers * config.devices_per_worker
    return whole and config.batch_size % (data * fsdp) == 0


def check_range(config, counts: list[int]) -> None:
    """Refuse an elastic range in which some numbers of workers work, and others don't.

    Ray starts as many as there is room for, and can't be told to leave numbers out.
    """
    fit = [n for n in counts if shares_evenly(config, n)]
    if not fit or len(fit) == len(counts):
        return
    step, stretches = config.workers_per_slice, [[fit[0]]]
    for n in fit[1:]:
        if n - stretches[-1][-1] == step:
            stretches[-1].append(n)
        else:
            stretches.append([n])
    longest = max(stretches, key=lambda s: (len(s), s[-1]))
    raise ValueError(
        f"num_workers: in an elastic run, Ray may start any number from {counts[0]} to "
        f"{counts[-1]}, and {', '.join(str(n) for n in counts if n not in fit)} can't share "
        f"batch_size ({config.batch_size}) with fsdp ({config.fsdp}); "
        f"{', '.join(map(str, fit))} can. Set num_workers: [{longest[0]}, {longest[-1]}], or "
        "a batch_size that all of them divide"
    )


def most_workers(config, workers: int) -> int | None:
    """The most workers, up to `workers`, that share a batch evenly; None if none do."""
    together = config.workers_per_slice
    counts = range(workers // together * together, 0, -together)
    return next((n for n in counts if shares_evenly(config, n)), None)


def check_mesh(config, workers: int) -> None:
    """Refuse a mesh that `workers` cannot form or cannot share a batch on."""
    data, fsdp, tensor = config.mesh_shape(workers)
    devices = workers * config.devices_per_worker
    slices = workers // config.workers_per_slice if config.topology else 1
    if data % slices:
        raise ValueError(
            f"{slices} slices must divide the data axis of the mesh, which is {data}; "
            "set fsdp and tensor_parallel so that they fit into one slice"
        )
    if data * fsdp * tensor != devices:
        raise ValueError(
            f"data_parallel x fsdp x tensor_parallel ({data} x {fsdp} x {tensor}) "
            f"is not num_workers x devices_per_worker ({devices})"
        )
    if over := config.batch_size % (data * fsdp):
        less = config.batch_size - over
        would_do = [str(size) for size in (less, less + data * fsdp) if size]
        fewer = most_workers(config, workers)
        raise ValueError(
            f"batch_size ({config.batch_size}) does not divide evenly over {data * fsdp} "
            f"devices; {' or '.join(would_do)} would"
            + (f", and so would num_workers: {fewer}" if fewer else "")
        )
    if config.n_embd % fsdp or config.padded_vocab_size % tensor:
        raise ValueError(
            f"fsdp ({fsdp}) must divide n_embd ({config.n_embd}), and tensor_parallel "
            f"({tensor}) the embedding table's {config.padded_vocab_size} rows"
        )

"""The workers: what they ask of the cluster, and how each starts and is watched."""

import contextlib
import ctypes
import dataclasses
import faulthandler
import glob
import importlib.util
import os
import re
import sys

import jax
import ray
import ray.data
import ray.train
from ray.util.placement_group import PlacementGroup

from trainkit import sharding
from trainkit.config import TrainingConfig, most_workers

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # ours: JAX's


def default_config() -> str:
    """What GPT2_CONFIG says, or what fits the cluster's TPUs, its GPUs, or two CPU cores."""
    names = {"TPU": "stories-tpu-v6e", "GPU": "stories"}
    fitting = [names[kind] for kind in names if kind in ray.cluster_resources()]
    return os.environ.get("GPT2_CONFIG") or f"configs/{[*fitting, 'smoke'][0]}.yaml"


def with_num_workers(config: TrainingConfig) -> TrainingConfig:
    """`config` with `num_workers`; if it has none, the most that the cluster has room for.

    Some devices stay idle, and a printed line says so, if all of them can't share a batch.

    Raises:
        ValueError: no number of workers forms the mesh and divides a batch.
    """
    if config.num_workers:
        return config
    alone = config.platform == "cpu" or config.platform == "tpu" and not config.topology
    room = max(1 if alone else count_room(config), config.workers_per_slice)
    workers = most_workers(config, room) or room
    if workers < room:
        print(f"{workers} workers of {room} that there is room for share a batch.")
    return dataclasses.replace(config, num_workers=workers)


def count_room(config: TrainingConfig) -> int:
    """How many workers the cluster's nodes have room for; a worker is on one node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if kind := config.accelerator_type:
        nodes = [node for node in nodes if f"accelerator_type:{kind}" in node]
    each = config.resources_per_worker
    return sum(
        min(int(node.get(k, 0) / each[k] + 1e-6) for k in each) for node in nodes
    )


def check_cluster(seconds: float | None = None) -> dict[str, float]:
    """The CPUs, GPUs, and TPUs of the cluster, whose processes can run this package.

    Raises:
        RuntimeError: none has run a task in so many seconds; Ray would wait on. By default,
            that is a minute, or ten where each node installs packages first.
    """
    if seconds is None:
        installs = {"pip", "uv", "conda"} & ray.get_runtime_context().runtime_env.keys()
        seconds = 600 if installs else 60
    task = ray.remote(num_cpus=0)(lambda: importlib.import_module("trainkit").__name__)
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


def check_resources(config: TrainingConfig) -> None:
    """Refuse to start if the cluster lacks what `config` asks for; Ray would wait.

    Raises:
        RuntimeError: with what is missing, and what to change.
    """
    workers, each = config.worker_range[0], config.resources_per_worker
    found, cpus = ray.cluster_resources(), workers * each.get("CPU", 0) + 1
    room = count_room(config)
    if (room < workers or found.get("CPU", 0) < cpus) and not config.autoscaling:
        kind = f" of type {config.accelerator_type}" if config.accelerator_type else ""
        raise RuntimeError(
            f"num_workers: {workers} workers take {each} each{kind}, and Ray Data a CPU. The "
            f"cluster has { {k: found.get(k, 0) for k in each | {'CPU': 1}} }, and nodes with "
            f"room for {room} workers. Set num_workers or devices_per_worker lower, add "
            "machines, or set autoscaling: true if the cluster adds them by itself."
        )


def environment(config: TrainingConfig) -> dict[str, str]:
    """The environment variables that each worker starts with, before it imports JAX."""
    kept = f"{config.storage_path}/jax-cache"  # for restarts
    if config.remote:
        kept = f"{config.data_dir}-jax-cache"
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # perhaps each node's own
    flags = os.environ.get("XLA_FLAGS", "")  # yours
    variables = {
        "JAX_PLATFORMS": PLATFORMS[config.platform],
        "JAX_COMPILATION_CACHE_DIR": cache or kept,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "RAY_DATA_LOG_LEVEL": "ERROR",  # or each dataset says that it shows no bar
    }
    if config.platform == "cpu":
        flags += f" --xla_force_host_platform_device_count={config.devices_per_worker}"
    if config.platform == "gpu":
        if cache:  # processes that share a search for kernels wait for those that don't
            flags = f"--xla_gpu_shard_autotuning=false {flags}"
        # cuBLAS adds biases and GELU while it writes a product; Triton's products leave that
        # to kernels of their own: rosetta/docs/GPU_performance.md of NVIDIA/JAX-Toolbox.
        # And no product is merged with its neighbor, to be cut apart by copies: attention
        # takes k and v apart. XLA of JAX 0.12 would merge them.
        ours = "--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"
        flags = f"{ours} {flags}"
        # Communicate while computing: docs/GPU_performance.md of NVIDIA/JAX-Toolbox,
        # "Optimization level". It says, too, that CUDA graphs are on already.
        variables["JAX_OPTIMIZATION_LEVEL"] = "O1"
        # That of each node, and where GKE keeps its driver.
        variables["LD_LIBRARY_PATH"] = "${LD_LIBRARY_PATH}:/usr/local/nvidia/lib64"
        # cuDNN's attention carries an address, which differs in each process.
        variables["JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"] = "true"
    return variables | ({"XLA_FLAGS": flags.strip()} if flags else {})


def load_cuda_libraries() -> None:
    """Load those of pip's CUDA libraries that JAX leaves to the system to find.

    JAX loads by path what it calls itself. What these libraries call in turn, the system looks
    for by name, and a library of the image, in this node's LD_LIBRARY_PATH, would come before
    pip's. What is loaded already isn't looked for.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations if nvidia else []:
        for name in ("nvJitLink", "cublasLt", "cudnn_graph"):
            for path in glob.glob(f"{glob.escape(folder)}/*/lib/lib{name}.so.*"):
                ctypes.CDLL(path)


def use_assigned_gpus() -> None:
    """Let this process see the GPUs that Ray assigned to it, where Ray doesn't see to it.

    Ray 2.60 assigns every worker its GPUs, but its JAX backend then numbers them from 0,
    as if each worker had a node of its own (`ray/train/v2/jax/config.py`): two workers of
    one node would both take GPU 0. A Ray that numbers them in another way is left alone.
    Call this before anything asks JAX for a device.
    """
    assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    from_zero = ",".join(map(str, range(len(assigned))))
    of_jax = jax.config.values["jax_cuda_visible_devices"]  # among these, or "all"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == from_zero and (
        of_jax in (from_zero, "all")
    ):
        ids = sorted(assigned, key=lambda gpu: (len(gpu), gpu))  # 2 before 10
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


with contextlib.suppress(ImportError):  # a Ray that is built in another way
    from ray.train.v2._internal.execution.callback import ControllerCallback
    from ray.train.v2.api import data_parallel_trainer

    class Cleaner(ControllerCallback):
        """Frees what an earlier start of a run's workers holds, in place of Ray's cleaner.

        Ray 2.60's asks a dashboard every second whether the run's controller lives. That may
        be the dashboard of another cluster, started later on this machine, which doesn't know
        the controller, and then it takes a healthy run's resources away. And it frees nothing
        after a start that failed while JAX's processes connected, so the next start would
        wait for these resources without end (docs/upstream.md).
        """

        def on_controller_start_worker_group(self, **_) -> None:
            """Ray calls this in the controller, before each start."""
            release_placement_groups()

    data_parallel_trainer.PlacementGroupCleanerCallback = Cleaner


def release_placement_groups() -> None:
    """Free what workers hold of this process or, in a driver, of controllers that have died.

    Ray frees it when the driver ends, and a rerun before that would wait for it. Only Ray's
    own table, which has no public form, says which actor made a placement group.
    """
    context = ray.get_runtime_context()
    job, me = (
        bytes.fromhex(name or "")
        for name in (context.get_job_id(), context.get_actor_id())
    )
    nobody = ray.ActorID.nil().binary()  # the driver itself
    with contextlib.suppress(ImportError, AttributeError):  # as above
        from ray.core.generated.gcs_pb2 import PlacementGroupTableData

        table = ray._private.state.state._connect_and_get_accessor()
        for row in table.get_placement_group_table():
            group = PlacementGroupTableData.FromString(row)
            creator = group.creator_actor_id
            orphan = group.creator_actor_dead and creator != nobody
            if group.creator_job_id == job and (orphan or creator == me):
                found = ray.PlacementGroupID(group.placement_group_id)
                ray.util.remove_placement_group(PlacementGroup(found))


def check_generation(config: TrainingConfig, device: jax.Device) -> None:
    """Refuse a GPU that can't compute in bfloat16: one older than NVIDIA's Ampere.

    XLA would compute in float32 there, between conversions, and cuDNN's attention fails.

    Raises:
        RuntimeError: with the GPU's name, and what to change.
    """
    capability = getattr(device, "compute_capability", "")  # "7.5"; AMD's differ
    older = re.fullmatch(r"[1-7]\.\d", capability)
    if older and config.compute_dtype == "bfloat16":
        raise RuntimeError(
            f"compute_dtype: bfloat16 needs a GPU of compute capability 8.0 (Ampere) or newer, "
            f"found {device.device_kind} with {capability}. Set compute_dtype: "
            "float32 and attention: xla, and for 16 GB of memory device_batch_size: 4; or "
            "choose another GPU."
        )


def start_worker(settings: dict) -> tuple[TrainingConfig, jax.sharding.Mesh]:
    """Start as one of the workers: take the right devices, and see the others' devices.

    An elastic run may have fewer workers than it asked for, so their number is Ray's.

    Returns:
        The configuration that `settings` describe, and the mesh of all devices, which is
        also what a PartitionSpec refers to from now on.

    Raises:
        RuntimeError: the workers don't form one JAX program, or have too old a GPU.
    """
    watch(settings["stall_timeout_s"])
    workers = ray.train.get_context().get_world_size()
    config = dataclasses.replace(TrainingConfig(**settings), num_workers=workers)
    if config.platform == "gpu":
        use_assigned_gpus()
        load_cuda_libraries()
    if jax.process_count() != workers:
        raise RuntimeError(f"JAX sees {jax.process_count()} of {workers} workers")
    if config.platform == "gpu":
        check_generation(config, jax.local_devices()[0])
    data = ray.data.DataContext.get_current()
    data.enable_progress_bars = False
    # For its windows. Without this, each worker's dataset asks an autoscaler for more.
    one = ray.data.ExecutionResources.for_limits(cpu=1)
    data.execution_options.resource_limits = one
    mesh = sharding.make_mesh(config)
    jax.set_mesh(mesh)
    return config, mesh


def watch(seconds: float) -> None:
    """End this process unless this is called again within `seconds`; say where it hung.

    A worker that hangs, on a stuck disk or network, makes all the others wait for it
    forever. Once it has ended, Ray starts the group again. `faulthandler` waits in a thread
    of C, so it ends the process even while other code of C holds the interpreter's lock.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

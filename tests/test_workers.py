"""Which devices a worker gets, and what is refused or said at once."""

import faulthandler
import os
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import ray
import ray.train
from accidents import as_worker
from notebook_module import code_cells
from samples import python

import trainkit.launch
import trainkit.run_lock
import trainkit.workers


@pytest.mark.slow
def test_two_workers_of_a_node_take_two_gpus(tutorial, cluster, small, write_bins):
    """Before the first of them asks JAX for a device, which is when CUDA decides.

    The GPUs are CPUs that JAX takes for CUDA's; each worker notes which ones it would see,
    and where its libraries are: nothing of its node's that could hide CUDA's.
    """

    def loop(settings):
        from jax._src import hardware_utils, xla_bridge

        note = config.run_path / f"gpus-{ray.train.get_context().get_world_rank()}"

        def start_cuda():
            names = "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"
            note.write_text(" ".join(os.environ[name] for name in names))
            return xla_bridge.make_cpu_client()

        hardware_utils.has_visible_nvidia_gpu = lambda: True
        xla_bridge.register_backend_factory("cuda", start_cuda, priority=500)
        tutorial.use_assigned_gpus()
        trainkit.workers.start(settings)

    config = write_bins(small(scaling={"num_workers": 2, "use_gpu": True}))
    tutorial.make_trainer(config, loop).fit()
    seen = {note.read_text() for note in config.run_path.glob("gpus-*")}
    assert seen == {f"{gpu} /usr/local/nvidia/lib64" for gpu in range(2)}


def test_driver_leaves_accelerators_to_the_workers():
    """Its first cells limit JAX to CPUs; a JAX that is there already may have them."""
    cells = "\n".join(cell.source for cell in code_cells()[:2])
    asked = python(f"{cells}\nprint(jax.config.jax_platforms)", JAX_PLATFORMS=None)
    assert asked == "cpu\n"
    with pytest.raises(AssertionError, match="jax is imported already: restart"):
        python(f"import jax\n{cells}", JAX_PLATFORMS=None)


DRIVER = """
import os, trainkit
os.environ.update(JAX_PLATFORM_NAME="tpu", RAY_ENABLE_UV_RUN_RUNTIME_ENV="mine")
trainkit.set_up_driver()
import jax
print(jax.default_backend(), os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"])
print([os.environ["grpc_proxy"], os.environ.pop("RAY_ENABLE_UV_RUN_RUNTIME_ENV")])
trainkit.set_up_driver()
print(os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"])
"""


def test_what_else_a_driver_is_kept_from():
    """JAX's other variable, lines that appear twice, proxies, and uv; what is set stays."""
    names = "JAX_PLATFORMS", "RAY_TRAIN_ENABLE_PRINT_PATCH", "grpc_proxy"
    said = python(DRIVER, **dict.fromkeys(names))
    assert said == "cpu 0\n['', 'mine']\n0\n"


@pytest.fixture
def start_as(monkeypatch):
    """A function that starts this process as a worker with that place among others."""
    monkeypatch.setattr(ray.train.collective, "barrier", lambda: None)

    def start(config, tokens=None, rank: int = 1, of_node: int = 1, workers: int = 1):
        places = {"get_world_rank": rank, "get_local_rank": of_node}
        places["get_world_size"] = workers
        context = SimpleNamespace(**{k: lambda x=x: x for k, x in places.items()})
        monkeypatch.setattr(ray.train, "get_context", lambda: context)
        settings = {"config": vars(config), "tokens": tokens}

        def loop() -> ray.data.ExecutionResources:
            trainkit.workers.start(settings)
            return ray.data.DataContext.get_current().execution_options.resource_limits

        return as_worker(loop)

    return start


def test_what_a_worker_does_first(small, start_as, monkeypatch):
    """It is guarded while it waits for the first one, which waits for the run, and then anew.
    It connects to the others before programs compile, some for longer than they would wait.
    Its datasets read no further ahead than they may.
    """
    events = []
    monkeypatch.setattr(
        trainkit.run_lock, "lock", lambda _: events.append("has the run")
    )
    connect = trainkit.workers.multihost_utils, "sync_global_devices"
    monkeypatch.setattr(*connect, lambda _: events.append("connects"))
    monkeypatch.setattr(ray.train.collective, "barrier", lambda: events.append("waits"))
    guard = "dump_traceback_later"
    monkeypatch.setattr(
        *(trainkit.workers.faulthandler, guard),
        lambda seconds, exit: events.append((seconds, exit)),
    )
    limits = start_as(small(stall_timeout_s=7.0))
    patience, guarded = trainkit.run_lock.PATIENCE + 7.0, (7.0, True)
    events_before = [(patience, True), "has the run", "waits"]
    assert events == [*events_before, guarded, "connects"]
    assert limits.object_store_memory == 2**28 and limits.cpu == 1


def test_each_node_compares_its_tokens(small, write_bins, start_as):
    """One worker of it, whatever its rank among all."""
    config, others = write_bins(small()), {"train": "others", "val": "others"}
    start_as(config, others)
    with pytest.raises(ValueError, match="holds .*others"):
        start_as(config, others, of_node=0)


def test_workers_with_several_devices_that_form_no_program(
    small, start_as, monkeypatch
):
    """Each has more of them than there are workers. Or they can't share a batch."""
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(RuntimeError, match="JAX sees 1 of 2 workers"):
        start_as(small(), workers=2)
    with pytest.raises(ValueError, match="batch_size: 4 .* 3 devices"):
        start_as(small())


def test_a_worker_with_several_gpus_sees_all_of_them(tutorial, monkeypatch):
    """Those that Ray has given it."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["2", "5"]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    tutorial.use_assigned_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"


class Asked(Exception):
    """For GPUs."""


LOOPS = {
    "fit_line_per_worker": (),
    "fit_line_and_survive": ({}, None),
    "train_loop_per_worker": ({},),
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_loop_takes_its_gpus_before_anything_else(tutorial, monkeypatch, name):
    """Once JAX is asked for a device, it has all."""

    def ask() -> None:
        raise Asked

    monkeypatch.setattr(tutorial, "use_assigned_gpus", ask)
    monkeypatch.setattr(jax, "devices", None)
    try:
        with pytest.raises(Asked):
            vars(tutorial)[name](*LOOPS[name])
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_dataset_reads_a_little_ahead_and_then_rests(cluster, tmp_path):
    """While the loop trains: its tasks stop, and its scheduler takes no core."""
    steps, count = [], tmp_path / "rows"

    class Count:
        def on_execution_step(self, *about: object) -> None:
            steps.append(time.monotonic())

        before_execution_starts = after_execution_succeeds = on_execution_step
        after_execution_fails = on_execution_step

    def read(row: dict) -> dict:
        with count.open("a") as file:
            file.write(".")
        return {"x": np.zeros(2**18, np.uint16)}  # half a MiB

    def rows_read() -> int:
        return count.stat().st_size

    with ray.data.DataContext.current(ray.data.DataContext.get_current().copy()):
        trainkit.workers.limit_data()
        data = ray.data.DataContext.get_current()
        data.custom_execution_callback_classes.append(Count)
        batches = iter(ray.data.range(10_000).map(read).iter_batches(batch_size=1))
        next(batches)
        before = 0
        while (now := rows_read()) > before:
            before = now
            time.sleep(2)
    assert rows_read() < 2_000  # of 512 in 256 MiB, and what waits elsewhere
    start, began = len(steps), time.monotonic()
    time.sleep(2)
    assert rows_read() == before
    seconds = time.monotonic() - began
    assert 0 < len(steps) - start < seconds / 0.01  # each with a pause of 0.01 s

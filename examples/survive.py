"""A training run in JAX that survives: launched, saved, and restored with Ray.

    python survive.py

Made from the tutorial's cells by ci/render_readme.py. Set `storage` to a folder that all
machines share, choose `scaling`, and put your state, your step, and your data in place of
`create_line`, `line_step`, and `read_points`. The same name continues a run, a finished one if
you raise `steps`. A changed model needs another name.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # of this process only
os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # show what workers print only once

import faulthandler
import logging
import re
import secrets
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray.train
from etils.epath import Path
from filelock import FileLock
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as orbax
from ray.train import FailureConfig, ScalingConfig, collective
from ray.train.v2.jax import JaxConfig, JaxTrainer


anyscale = Path("/mnt/cluster_storage")
storage = anyscale / "gpt2" if anyscale.is_dir() else Path("storage").resolve()


optimizer = optax.sgd(0.2, momentum=0.2)


def create_line() -> dict:
    line = jnp.zeros(2)  # slope and intercept
    return {"line": line, "momentum": optimizer.init(line)}


@jax.jit
def line_step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    """The next state, and the mean squared error of the line before."""

    def mean_squared_error(line):
        return jnp.mean((line[0] * x + line[1] - y) ** 2)

    loss, gradient = jax.value_and_grad(mean_squared_error)(state["line"])
    updates, momentum = optimizer.update(gradient, state["momentum"])
    line = optax.apply_updates(state["line"], updates)
    return {"line": line, "momentum": momentum}, loss


def read_points(step: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's share of the points of a step, whenever that step runs."""
    x = np.random.default_rng(step).uniform(-1, 1, 64).astype(np.float32)
    mine = np.split(x, jax.process_count())[jax.process_index()]
    return mine, 3 * mine + 1


scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
platform = "tpu" if scaling.use_tpu else "cuda" if scaling.use_gpu else "cpu"
variables = {"JAX_PLATFORMS": platform, "grpc_proxy": ""}  # no proxy between workers
if scaling.use_gpu:  # where GKE has the driver; no CUDA libraries but JAX's own
    variables["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib64"


def jax_config(scaling: ScalingConfig) -> JaxConfig:
    return JaxConfig(use_tpu=scaling.use_tpu, use_gpu=not scaling.use_tpu)


def use_assigned_gpus() -> None:
    if gpus := ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def save(folder: Path, arrays: dict, step: int, metrics: dict | None, about=None):
    """Start to save the arrays, on all workers. `about` is kept with them, as JSON.

    Without metrics, Ray doesn't record the checkpoint, and so never deletes it.
    """
    name = f"step_{step:08d}_{secrets.token_hex(4)}"
    path = folder / collective.broadcast_from_rank_zero(name)
    context = orbax.Context()
    context.atomicity.mode = orbax.options.AtomicityMode.COMMIT_FILE
    with context:
        saving = orbax.save_async(path, arrays, custom_metadata=about)
    if metrics is None:
        return saving

    def wait_until_written(checkpoint, name):
        saving.result()
        checkpoint.filesystem.create_dir(checkpoint.path)  # for deletion in gs://
        return checkpoint

    ray.train.report(
        metrics,
        checkpoint=ray.train.Checkpoint(path),
        checkpoint_dir_name=path.name,  # in the run's folder
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,  # in a thread
        checkpoint_upload_fn=wait_until_written,
        delete_local_checkpoint_after_upload=False,  # there is no other copy
    )
    return saving


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint, the same on all workers; None if there is none."""
    name, form = "", r"step_\d{8}(_[0-9a-f]{8})?"
    if ray.train.get_context().get_world_rank() == 0:
        ours = {path for path in folder.iterdir() if re.fullmatch(form, path.name)}
        whole = {path for path in ours if path / "commit_success.txt" in path.iterdir()}
        name = max((path.name for path in whole), default="")
        for dead in (path for path in ours - whole if path.name[:13] < name[:13]):
            dead.rmtree()
    name = collective.broadcast_from_rank_zero(name)
    return folder / name if name else None


def restore(path: Path, like: dict) -> dict:
    """The arrays of a checkpoint, with the shapes and shardings of `like`."""
    return orbax.load(path, like)


def named(tree) -> dict[str, jax.Array]:
    """The arrays of a pytree by name, such as momentum.0.trace."""
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    arrays = jax.tree.leaves_with_path(tree)
    found = {name(path).removesuffix(".value"): x for path, x in arrays}
    assert len(found) == len(arrays), f"two arrays have one name of {[*found]}"
    return found


def unnamed(arrays: dict[str, jax.Array], like):
    """The pytree of the form of `like` that has these arrays."""
    values = [arrays[name] for name in named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def fit_line_and_survive(settings: dict, log) -> None:
    use_assigned_gpus()
    faulthandler.dump_traceback_later(600, exit=True)  # the guard
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
    mesh = Mesh(jax.devices(), "data")
    by_rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    to_array = partial(jax.make_array_from_process_local_data, by_rows)
    create = jax.jit(create_line, out_shardings=whole)

    folder, step, saving = Path(settings["folder"]), 0, None
    if path := newest(folder):
        like = jax.eval_shape(create)  # shapes and shardings, without arrays
        state = unnamed(restore(path, named(like)), like)
        step = int(path.name.split("_")[1])
        if ray.train.get_context().get_world_rank() == 0:
            print(f"continues at step {step}")
    else:
        state = create()
    while step < settings["steps"]:
        state, loss = line_step(state, *map(to_array, read_points(step)))
        step += 1
        log(step, float(loss))  # in a real run, not each step: it waits
        if step % 8 == 0 or step == settings["steps"]:
            if saving:
                saving.result()  # one at a time
            saving = save(folder, named(state), step, {"loss": float(loss)})
        faulthandler.dump_traceback_later(600, exit=True)
    if saving:
        saving.result()
    faulthandler.cancel_dump_traceback_later()


def log(step: int, loss: float) -> None:
    """Print the loss of a step, on the first worker."""
    if ray.train.get_context().get_world_rank() == 0:
        print(f"step {step} | loss {loss:.3g}")


def make_line_trainer(name: str, steps: int, log) -> JaxTrainer:
    return JaxTrainer(
        partial(fit_line_and_survive, log=log),
        train_loop_config={"folder": str(storage / name), "steps": steps},
        scaling_config=scaling,
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(storage),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3, controller_failure_limit=60),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": variables},
        ),
        jax_config=jax_config(scaling),
    )


def fit(trainer: JaxTrainer) -> ray.train.Result:
    """Train, unless another launch has the run. A bucket has no locks."""
    path = f"{trainer.run_config.storage_path}/{trainer.run_config.name}/launch.lock"
    assert ("s3://" in path) == save.__module__.endswith("s3"), f"wrong save: {path}"
    lock = FileLock(path, timeout=150, fallback_to_soft=False)
    with nullcontext() if "://" in path else lock:
        result = trainer.fit()
    if (diverged := Path(path).with_name("diverged.txt")).exists():
        raise FloatingPointError(diverged.read_text())
    return result


if __name__ == "__main__":
    ray.init()
    fit(make_line_trainer("my-run", steps=24, log=log))

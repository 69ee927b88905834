"""Loads what `save` has written: the state by one replica, or the model alone."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
from etils import epath
from flax import nnx
from orbax.checkpoint import v1 as orbax
from ray.train import Checkpoint

from trainkit import huggingface, s3, tokenization
from trainkit.config import SHAPE, TrainingConfig

NAME = re.compile(r"step_\d{8}(_[0-9a-f]{8})?")  # as the notebook's `newest` takes them
_COMMIT = "commit_success.txt"


def is_one(name: str) -> bool:
    """Whether `init_from` names a run's checkpoint, and no published model."""
    path = Path(name)
    return "://" in name or path.name.startswith("step_") or (path / _COMMIT).exists()


def newest(folder: epath.Path) -> epath.Path | None:
    """The newest whole checkpoint in a run's folder, as one process sees it."""
    try:
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return None
    whole = [x for x in found if _COMMIT in {file.name for file in x.iterdir()}]
    return max(whole, key=lambda path: path.name, default=None)


def start_of(config: TrainingConfig) -> epath.PathLike | None:
    """The checkpoint that a run starts with. None if it is new, and in s3://."""
    if config.run_name is None or config.storage_path.startswith("s3://"):
        return None
    return newest(config.run_path) or config.branch_from


def takes_weights(config: TrainingConfig) -> bool:
    """Whether a run starts with those of `init_from`, and with no checkpoint."""
    if not config.init_from or config.branch_from:
        return False
    return config.run_name is None or not about_newest(config.run_path)


def about_newest(folder: epath.Path) -> dict | None:
    """What was saved beside the arrays of a run's newest checkpoint, if it has one."""
    if os.fspath(folder).startswith("s3://"):
        return s3.about(folder)
    path = newest(folder)
    return about("run_name", str(path)) if path else None


def about(key: str, folder: str) -> dict:
    """What was saved beside the arrays: what `launch.settings` gave the run.

    Raises:
        ValueError: there is no whole checkpoint of a run. It begins with `key`.
    """
    path = epath.Path(folder)
    if folder.startswith("s3://") or not (path / _COMMIT).exists():
        raise ValueError(
            f"{key}: expected a whole checkpoint, with {_COMMIT}, in a folder or gs://, "
            f"found none: {folder}"
        )
    found = orbax.metadata(folder).custom_metadata or {}
    if "config" not in found:
        raise ValueError(
            f"{key}: {folder} has no configuration: it isn't of such a run"
        )
    return found


def shape(folder: str, tokenizer: str) -> dict[str, int]:
    """The shape of the model in a checkpoint, as configuration keys, for `init_from`.

    Raises:
        ValueError: there is no whole checkpoint of a run, or it has another tokenizer.
    """
    saved = about("init_from", folder)["config"]
    if saved["tokenizer"] != tokenizer:
        theirs, ours = map(tokenization.identity, (saved["tokenizer"], tokenizer))
        if theirs != ours:
            raise ValueError(
                f"init_from: {folder} was trained with the tokenizer {theirs}, and "
                f"tokenizer is {ours}"
            )
    return {key: saved[key] for key in SHAPE if key in saved}


def load_weights(
    config: TrainingConfig, model: nnx.Module, named: Callable
) -> nnx.Module:
    """`model` with the weights of `config.init_from`, on the devices where its own are.

    Raises:
        ValueError: they are another model's.
    """
    folder = str(config.init_from)
    if not is_one(folder):
        return huggingface.load_weights(config, model)
    arrays = named(model)
    mesh = next(iter(arrays.values())).sharding.mesh
    return _load(folder, model, named, lambda x: x.sharding, by_one_replica(mesh))


def by_one_replica(mesh: jax.sharding.Mesh) -> orbax.Context:
    """For a `with` block, in which one replica reads what is loaded and sends it to the others.

    Otherwise, each process reads all that is whole on its devices. Orbax sends by adding up
    the arrays of one replica and zeros of the others, so -0.0 becomes 0.0.
    """
    context = orbax.Context()
    # Orbax takes the replicas along the mesh's first axis.
    context.array.loading.use_load_and_broadcast = mesh.shape["data"] > 1
    return context


def load_model(
    checkpoint: Checkpoint, create_model: Callable, named: Callable
) -> nnx.Module:
    """The model in a checkpoint, wherever that is, on this process's first device.

    Args:
        create_model: makes a model of a configuration; the checkpoint has the configuration.
        named: the notebook's function, by whose names the arrays were saved.

    Raises:
        ValueError: the checkpoint isn't whole, or has other arrays than the model.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    files, folder = checkpoint.filesystem, checkpoint.path
    kind = files.type_name if files else "local"
    with tempfile.TemporaryDirectory() as unpacked:
        if kind == "s3":
            s3.unpack(files, folder, Path(unpacked))
            folder = unpacked
            values = orbax.metadata(folder).custom_metadata["config"]
        else:
            folder = f"gs://{folder}" if kind == "gcs" else folder
            values = about("checkpoint", folder)["config"]
        # Runs anywhere, on windows of any length.
        values |= {"attention": "xla", "scan_layers": False}
        fields = {field.name for field in dataclasses.fields(TrainingConfig)}
        config = TrainingConfig(**{k: v for k, v in values.items() if k in fields})
        model = jax.eval_shape(partial(create_model, config))
        return _load(folder, model, named, lambda x: device, orbax.Context())


def _load(folder, model, named, sharding_of, context) -> nnx.Module:
    """The model in a checkpoint, without the optimizer's state."""
    abstract = {
        f"model.{name}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))
        for name, x in named(model).items()
    }
    _compare(folder, abstract, "model.")
    context.pytree.loading.partial_load = True
    with context:
        arrays = orbax.load(folder, abstract)
    return jax.tree.unflatten(jax.tree.structure(model), [arrays[n] for n in abstract])


def check_start(
    config: TrainingConfig, arrays: dict[str, jax.ShapeDtypeStruct]
) -> None:
    """Refuse a state that a run's start can't take from its checkpoint as a whole.

    If keys of the shape differ, `recipe.compare` names them, which says more.

    Args:
        arrays: the state's, by name.

    Raises:
        ValueError: which arrays only the checkpoint has, or only the state.
    """
    if path := start_of(config):
        saved = about("branch_from, run_name", str(path))["config"]
        if all(saved.get(x, {}) == getattr(config, x) for x in SHAPE):
            _compare(str(path), arrays)
    elif takes_weights(config) and is_one(str(config.init_from)):
        weights = {name: x for name, x in arrays.items() if name.startswith("model.")}
        _compare(str(config.init_from), weights, "model.")


def _compare(folder: str, arrays: Mapping, part: str = "") -> None:
    """Refuse arrays that would take only some of those in a checkpoint that begin so.

    Orbax would also convert numbers of another dtype.
    """
    stored = orbax.metadata(folder).metadata
    saved = {name: x for name, x in stored.items() if name.startswith(part)}
    if others := huggingface.differences(_forms(saved), _forms(arrays)):
        raise ValueError(
            f"create_model, create_optimizer: they make other arrays than {folder}, which "
            f"has {others}"
        )


def _forms(arrays: Mapping) -> dict[str, str]:
    return {name: f"{x.dtype} {x.shape}" for name, x in arrays.items()}

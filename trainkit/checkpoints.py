"""Loads what `save` has written: the state by one replica, or the model alone."""

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from flax import nnx
from orbax.checkpoint import v1 as orbax
from ray.train import Checkpoint

from trainkit import s3
from trainkit.config import TrainingConfig


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
        ValueError: the model has other arrays than the checkpoint's.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    files, folder = checkpoint.filesystem, checkpoint.path
    kind = files.type_name if files else "local"
    with tempfile.TemporaryDirectory() as unpacked:
        if kind == "s3":
            s3.unpack(files, folder, Path(unpacked))
        folder = {"s3": unpacked, "gcs": f"gs://{folder}"}.get(kind, folder)
        saved = orbax.metadata(folder)
        values = saved.custom_metadata["config"]
        # Runs anywhere, on windows of any length.
        values |= {"attention": "xla", "scan_layers": False}
        fields = {field.name for field in dataclasses.fields(TrainingConfig)}
        config = TrainingConfig(**{k: v for k, v in values.items() if k in fields})
        model = jax.eval_shape(partial(create_model, config))
        abstract = {
            f"model.{name}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
            for name, x in named(model).items()
        }
        _compare(folder, {n: x.shape for n, x in saved.metadata.items()}, abstract)
        context = orbax.Context()
        context.pytree.loading.partial_load = True  # without the optimizer's state
        with context:
            arrays = orbax.load(folder, abstract)
    return jax.tree.unflatten(jax.tree.structure(model), [arrays[n] for n in abstract])


def _compare(folder: str, saved: dict[str, tuple], model: dict) -> None:
    """Refuse a model that would take a part of a checkpoint's weights."""
    saved = {name: x for name, x in saved.items() if name.startswith("model.")}
    here = {name: x.shape for name, x in model.items()}
    if saved != here:
        differ = {
            "only in the checkpoint": sorted(saved.keys() - here.keys()),
            "only in the model": sorted(here.keys() - saved.keys()),
            "of another shape": [
                f"{name} {saved[name]}, here {here[name]}"
                for name in sorted(saved.keys() & here.keys())
                if saved[name] != here[name]
            ],
        }
        raise ValueError(
            f"create_model: it makes another model than that of {folder}: "
            + "; ".join(f"{what}: {names}" for what, names in differ.items() if names)
        )

"""Reads a configuration's file, and adds what it leaves to others.

A published model brings the shape, a tokenizer its size, and the notebook the places.
"""

import builtins
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pydantic
from etils import epath
from ray.train import ScalingConfig
from ruamel.yaml import YAML

from trainkit import checkpoint_reader, huggingface, paths, tokenization
from trainkit.config import SHAPE, RecipeConfig, TrainingConfig


def load_config(path: str | Path, root: str | Path, **changes) -> TrainingConfig:
    """The configuration in the YAML file `path`, with `changes` on top of it.

    `init_from` brings the shape of the model, and `tokenizer` its `vocab_size`. In a person's
    kernel, a run without a `run_name` gets one of the file's name, the date, and the time. A
    job or a script that is tried again would get another name, and start over, so there it
    stays None, with which nothing can be launched.

    Args:
        root: where runs and tokens are kept, unless `data_dir` and `storage_path` say else.

    Raises:
        ValueError: a key is unknown or has a value that doesn't fit.
        ruamel.yaml.error.YAMLError: the file is no YAML, or gives a key twice.
    """
    with open(path) as file:
        given = YAML(typ="safe", pure=True).load(file) or {}
    values = given | changes
    dataset = values.get("dataset", RecipeConfig.dataset)
    tokenizer = paths.path_or_name(values.get("tokenizer", RecipeConfig.tokenizer))
    if tokenizer != RecipeConfig.tokenizer:
        dataset = f"{dataset}-{Path(tokenizer).name.removesuffix('.json')}"
        if not values.get("init_from") and "vocab_size" not in values:
            values["vocab_size"] = tokenization.load(tokenizer).n_vocab
    places: dict[str, Any] = {
        "data_dir": f"{root}/data/{dataset}",
        "storage_path": f"{root}/runs",
    }
    in_kernel = hasattr(builtins, "__IPYTHON__")
    if in_kernel and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # Ray's, in a job
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # to the microsecond
        places["run_name"] = f"{Path(path).stem}-{now}"
    if values.get("init_from"):
        name = paths.path_or_name(values["init_from"])
        is_run = checkpoint_reader.is_one(name)
        find_shape = checkpoint_reader.shape if is_run else huggingface.published_shape
        shape = _shape_of_run(name, places | values) or find_shape(name, tokenizer)
        for key in shape.keys() & values.keys():
            if values[key] != shape[key]:
                raise ValueError(
                    f"{path}: {key} is {values[key]}, and init_from, {name}, has "
                    f"{shape[key]}. Leave {key} out"
                )
        values |= shape
    try:
        config = TrainingConfig(**(places | values))
    except pydantic.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
    ScalingConfig(**config.scaling)  # Ray's errors come before tokens are made
    return config


def _shape_of_run(init_from: str, values: dict) -> dict[str, Any]:
    """That of the run's own checkpoints, which don't need what they started from."""
    if not values.get("run_name"):
        return {}
    storage = epath.Path(paths.absolute(values["storage_path"]))
    own = checkpoint_reader.about_newest(storage / values["run_name"])
    saved = own["config"] if own else {}
    if saved.get("init_from") != init_from:
        return {}
    return {key: saved[key] for key in SHAPE if key in saved}

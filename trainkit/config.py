"""What decides a run: `TrainingConfig`, and `load_config`, which reads it from YAML.

The defaults are GPT-2 small with nanoGPT's recipe:
https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py.
"""

import builtins
import dataclasses
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from etils import epath
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from ruamel.yaml import YAML

from trainkit import tokenizers


def _absolute(place: str) -> str:
    """A path that means the same to workers, which run in folders of their own.

    Raises:
        ValueError: it names a variable that isn't set here.
    """
    place = os.path.expandvars(place.removeprefix("file://"))
    if "$" in place:
        raise ValueError(f"{place} names a variable that isn't set")
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def _path_or_name(name: str) -> str:
    """What is here by a name with a slash, as an absolute path; others are names of a hub."""
    is_path = "/" in name and os.path.exists(os.path.expanduser(name))
    return _absolute(name) if is_path else name


Fraction = Annotated[float, Field(ge=0, lt=1)]
Folder = Annotated[str, AfterValidator(_absolute)]
PathOrName = Annotated[str, AfterValidator(_path_or_name)]
_STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_STRICT)
class RecipeConfig:
    """What decides the result: the data, the model, the optimizer, and the seed."""

    dataset: str = "openwebtext"  # the name of a function in the notebook's step 3
    tokenizer: PathOrName = "gpt2"  # of tiktoken, of Hugging Face, or "builtin"
    vocab_size: PositiveInt = 50_257  # of another tokenizer: as many as it has
    block_size: PositiveInt = 1_024  # tokens that the model sees at once
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_embd: PositiveInt = 768
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # parameters: float32
    init_from: PathOrName | None = None  # a Hugging Face GPT-2, which brings the shape

    batch_size: PositiveInt = 480  # windows an optimizer step, over all devices
    learning_rate: PositiveFloat = 6e-4  # the highest; it falls to a tenth
    warmup_steps: PositiveInt = 2_000
    decay_steps: PositiveInt = 600_000
    weight_decay: pydantic.NonNegativeFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    grad_clip: PositiveFloat = 1.0  # global norm
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1337


@dataclass(frozen=True, config=_STRICT)
class TrainingConfig(RecipeConfig):
    """The recipe, and what can change without a new run."""

    attention: Literal["xla", "cudnn", "splash"] = "xla"  # cudnn: GPUs; splash: TPUs
    loss_chunks: PositiveInt = 1  # parts of a window; only one's logits exist at once
    scan_layers: bool = False  # one compiled block in a loop: for many layers

    machines: str = "gpu"  # the name of an entry of SCALING in the notebook's step 1
    device_batch_size: PositiveInt = 32  # windows that a device takes at once, at most
    fsdp: PositiveInt = 1  # mesh axes; the data axis takes what these two leave
    tensor_parallel: PositiveInt = 1

    max_steps: PositiveInt = 600_000
    log_interval: PositiveInt = 100  # steps
    eval_interval: PositiveInt = 1_000  # steps; a checkpoint follows each evaluation
    notice_interval: PositiveInt = 10  # steps; whether a machine will be taken away
    eval_steps: PositiveInt = 9  # batches of val.bin; 9 x 480 windows are nearly all
    max_failures: Annotated[int, Field(ge=-1)] = 3  # restarts; -1 is without end
    stall_timeout_s: PositiveFloat = 1_800.0  # a step that takes longer ends its worker

    run_name: str | None = None  # None: see load_config
    data_dir: Annotated[Folder, Field(pattern="^/")] = "data"  # all nodes share it
    storage_path: Folder = "runs"  # may be remote, such as s3://my-bucket/runs

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: a multiple of 128, which is easy to divide."""
        return math.ceil(self.vocab_size / 128) * 128

    @property
    def token_dtype(self) -> str:
        """The type of a token in files and windows: uint16 if all ids fit."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @property
    def recipe(self) -> dict[str, str | int | float | None]:
        """What decides the result, as plain data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(RecipeConfig)}

    @property
    def run_path(self) -> epath.Path:
        """The run's own folder, local or remote: its log and its checkpoints."""
        return epath.Path(self.storage_path) / self.run_name

    def micro_batches(self, shards: int) -> int:
        """The equal parts, as few as fit, of what each of so many shards has of a batch."""
        windows = self.batch_size // shards
        fewest = math.ceil(windows / self.device_batch_size)
        return next(n for n in range(fewest, windows + 1) if windows % n == 0)

    def split(self, devices: int) -> dict[str, int | str]:
        """How so many devices share a batch.

        Raises:
            ValueError: they form no mesh, or can't share a batch evenly.
        """
        model = self.fsdp * self.tensor_parallel
        shards = devices // self.tensor_parallel
        if devices % model or self.batch_size % shards:
            raise ValueError(
                f"{devices} devices: expected a multiple of fsdp x tensor_parallel ({model}), "
                f"and {shards} to divide batch_size ({self.batch_size})"
            )
        parts = self.micro_batches(shards)
        windows = self.batch_size // shards
        return {
            "devices": devices,
            "mesh": f"{devices // model} x {self.fsdp} x {self.tensor_parallel}",
            "batch": self.batch_size,
            "per device": windows,
            "micro-batches": f"{parts} x {windows // parts}",
        }


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
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected keys, found a {type(given).__name__}")
    values = given | changes
    dataset = values.get("dataset", RecipeConfig.dataset)
    tokenizer = _path_or_name(values.get("tokenizer", RecipeConfig.tokenizer))
    if tokenizer != RecipeConfig.tokenizer:
        dataset = f"{dataset}-{Path(tokenizer).name.removesuffix('.json')}"
        if not values.get("init_from"):
            values.setdefault("vocab_size", tokenizers.load(tokenizer).n_vocab)
    if values.get("init_from"):
        from trainkit import huggingface  # which imports this module

        name = _path_or_name(values["init_from"])
        shape = huggingface.published_shape(name, tokenizer)
        for key in shape.keys() & values.keys():
            if values[key] != shape[key]:
                raise ValueError(
                    f"{path}: {key} is {values[key]}, and init_from, {name}, has "
                    f"{shape[key]}. Leave {key} out"
                )
        values |= shape
    places = {"data_dir": f"{root}/data/{dataset}", "storage_path": f"{root}/runs"}
    in_kernel = hasattr(builtins, "__IPYTHON__")
    if in_kernel and "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # Ray's, in a job
        now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # to the microsecond
        places["run_name"] = f"{Path(path).stem}-{now}"
    try:
        return TrainingConfig(**(places | values))
    except pydantic.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None

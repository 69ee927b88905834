"""What decides a run: `TrainingConfig`, which config_files.py reads from a file.

The defaults are GPT-2 small with nanoGPT's recipe:
https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py.
"""

import dataclasses
import json
import math
from typing import Annotated, Literal

import pydantic
from etils import epath
from pydantic import AfterValidator, Field, JsonValue, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from trainkit import paths

_READ: dict[str, set[str]] = {}  # the keys that were read, of each mapping as JSON


class _Frozen(dict):
    """A mapping that nobody changes, so that a configuration is a static argument of jit.

    It knows which of its keys were read, for `launch.check`, or those of an equal one were:
    what JAX has traced, it doesn't trace again.
    """

    def __init__(self, values=()):
        super().__init__(values)
        self.read = _READ.setdefault(json.dumps(self, sort_keys=True), set())

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        return self[key] if key in self else default

    def __iter__(self):  # so that `**` reads by __getitem__
        return super().__iter__()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def _freeze_scaling(scaling: dict) -> _Frozen:
    """With a range as a tuple, which Ray wants, and YAML and JSON don't have."""
    for key in ("use_gpu", "use_tpu"):
        if not isinstance(scaling.get(key, False), bool):
            raise ValueError(f"{key}: expected true or false, found {scaling[key]!r}")
    number = scaling.get("num_workers")
    is_range = {"num_workers": tuple(number)} if isinstance(number, list) else {}
    return _Frozen(scaling | is_range)


Fraction = Annotated[float, Field(ge=0, lt=1)]
Folder = Annotated[str, AfterValidator(paths.absolute)]
PathOrName = Annotated[str, AfterValidator(paths.path_or_name)]
_STRICT = pydantic.ConfigDict(
    extra="forbid", allow_inf_nan=False, validate_default=True
)


# Keys that decide which arrays a model has, and their shapes.
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "model")


@dataclass(frozen=True, config=_STRICT)
class RecipeConfig:
    """What decides the result: the data, the model, the optimizer, and the seed."""

    dataset: str = "openwebtext"  # a function's name, which the notebook's step 3 lists
    tokenizer: PathOrName = "gpt2"  # see tokenization.load
    vocab_size: PositiveInt = 50_257  # of another tokenizer: as many as it has
    block_size: PositiveInt = 1_024  # tokens that the model sees at once
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_embd: PositiveInt = 768
    dropout: Fraction = 0.0  # of embeddings and of what each layer adds, in training
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # parameters: float32
    # A Hugging Face model, or a checkpoint of a run, which brings weights and the shape.
    init_from: PathOrName | None = None
    # Keys of your own, which a checkpoint keeps as JSON.
    model: Annotated[dict[str, JsonValue], AfterValidator(_Frozen)] = _Frozen()

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

    scaling: Annotated[dict, AfterValidator(_freeze_scaling)] = _Frozen()  # Ray's words
    device_batch_size: PositiveInt = 32  # windows that a device takes at once, at most
    fsdp: PositiveInt = 1  # mesh axes; the data axis takes what these two leave
    tensor_parallel: PositiveInt = 1

    max_steps: PositiveInt = 600_000
    log_interval: PositiveInt = 100  # steps
    eval_interval: PositiveInt = 1_000  # steps; a checkpoint follows each evaluation
    save_interval: PositiveInt | None = None  # steps, between those of evaluations
    keep_every: Annotated[int, Field(ge=0)] = 0  # steps whose checkpoints stay; 0: none
    notice_interval: PositiveInt = 10  # steps; whether a machine will be taken away
    eval_windows: PositiveInt = 4_320  # the first ones of val.bin; here, nearly all
    max_failures: Annotated[int, Field(ge=-1)] = 3  # restarts; -1 is without end
    controller_failure_limit: Annotated[int, Field(ge=-1)] = 60  # failed starts
    stall_timeout_s: PositiveFloat = 1_800.0  # a step that takes longer ends its worker

    branch_from: Folder | None = None  # a new run starts with its whole state
    # See load_config. Orbax takes the last three characters for a pattern, without a word.
    run_name: Annotated[str, Field(pattern=r"^[^/\[*?]+$")] | None = None
    data_dir: Annotated[Folder, Field(pattern="^/")] = "data"  # all nodes share it
    # May be remote, such as gs://my-bucket/runs.
    storage_path: Annotated[Folder, Field(pattern=r"^[^\[*?]+$")] = "runs"

    @pydantic.model_validator(mode="after")
    def _check_intervals(self) -> "TrainingConfig":
        often = self.save_interval or self.eval_interval
        if self.keep_every % often and self.keep_every % self.eval_interval:
            raise ValueError(
                f"keep_every: {self.keep_every} is no multiple of save_interval or "
                f"eval_interval ({often}, {self.eval_interval}), when checkpoints are saved"
            )
        return self

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

    def micro_batches(self, windows: int) -> int:
        """The equal parts, as few as fit, of the windows that a device has of a batch."""
        fewest = math.ceil(windows / self.device_batch_size)
        return next(n for n in range(fewest, windows + 1) if windows % n == 0)

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows a step, and so a checkpoint."""
        return step % self.eval_interval == 0 or step == self.max_steps

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows a step."""
        often = self.save_interval or self.eval_interval
        return step % often == 0 or self.evaluates(step)

    def keeps(self, step: int) -> bool:
        """Whether that checkpoint stays, and Ray, which deletes what it records, gets none.

        It records a run's last one, to return it.
        """
        every = self.keep_every
        return every > 0 and step % every == 0 and step != self.max_steps

    def layout(self, devices: int) -> dict[str, int | str]:
        """How so many devices share a batch.

        Raises:
            ValueError: they form no mesh, or can't share a batch evenly.
        """
        model = self.fsdp * self.tensor_parallel
        shards = devices // self.tensor_parallel
        if devices % model:
            raise ValueError(
                f"{devices} devices: expected a multiple of fsdp x tensor_parallel ({model})"
            )
        for key in ("batch_size", "eval_windows"):
            if (windows := getattr(self, key)) % shards:
                raise ValueError(
                    f"{key}: {windows} can't be shared by {devices} devices: expected a "
                    f"multiple of {shards}"
                )
        windows = self.batch_size // shards
        parts = self.micro_batches(windows)
        return {
            "devices": devices,
            "mesh": f"{devices // model} x {self.fsdp} x {self.tensor_parallel}",
            "batch": self.batch_size,
            "per device": windows,
            "micro-batches": f"{parts} x {windows // parts}",
        }

"""What decides a run: `TrainingConfig`, and `load_config`, which reads it from YAML.

Pydantic checks each value, so a misspelled key or a wrong type fails when the file is read,
and not later on a worker; `mistakes` are what shows only when two fields meet. The defaults
are GPT-2 small with nanoGPT's recipe:
https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import yaml
from etils import epath
from pydantic import AfterValidator, ConfigDict, Field, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from trainkit import tokenizers


def expanded(place: str) -> str:
    """A path with the home folder for ~, and with the values of $VARIABLES."""
    return os.path.expandvars(os.path.expanduser(place))


def absolute(place: str) -> str:
    """Workers run in folders of their own, where a relative path would mislead them."""
    place = expanded(place)
    if (unset := re.search(r"\$(\w+|\{\w+\})", place)) and not os.path.exists(place):
        raise ValueError(f"{unset[0]} isn't set")
    return place if "://" in place else os.path.abspath(place)


def found_here(name: str, ours: str) -> str:
    """A file or a folder by its absolute path; another name is one on a hub, or `ours`."""
    here = name != ours and os.path.exists(expanded(name))
    return absolute(name) if here else expanded(name)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Place = Annotated[Text, AfterValidator(expanded)]
Folder = Annotated[Text, AfterValidator(absolute)]
Tokenizer = Annotated[Text, AfterValidator(partial(found_here, ours=tokenizers.GPT2))]
Weights = Annotated[Text, AfterValidator(partial(found_here, ours="scratch"))]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Range = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
Topology = Annotated[str, Field(pattern=r"^[1-9]\d*(x[1-9]\d*)+$")]
STRICT = ConfigDict(extra="forbid", strict=True)
# https://cloud.google.com/tpu/docs/v6e and v5e; other generations are left to Ray.
SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
TPU_TOPOLOGIES = {"TPU-V6E": SLICES_2D, "TPU-V5LITEPOD": SLICES_2D}
# Orbax takes *?[] for patterns and \ for /; of other addresses, libraries differ.
STORAGE = (
    r"(?!.*[*?[\]\\])((s3|gs)://(?!/|.*([#%]|//|[^!-~]|/\.\.?(/|$))).+|(?!.*://).*)"
)
LOCATED = ("tokenizer", "init_from")  # which may be paths, and become absolute
SPLASH_BLOCK = 512  # tokens that the TPU's attention kernel takes at once
DIVISORS = [  # a number of parts, and what it divides evenly
    ("n_head", "n_embd"),
    ("loss_chunks", "block_size"),
    ("fsdp", "n_embd"),
    ("tensor_parallel", "n_head"),
    ("tensor_parallel", "padded_vocab_size"),
]


@dataclass(frozen=True, config=STRICT)
class ShapeConfig:
    """The shape of the model. The defaults are GPT-2 small, 124M parameters."""

    # Of tiktoken, or of Hugging Face: a file, a folder, or a name on the hub.
    tokenizer: Tokenizer = tokenizers.GPT2
    vocab_size: PositiveInt = 50_257  # of another tokenizer: as many as it has
    block_size: PositiveInt = 1_024  # tokens that the model sees at once
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_embd: PositiveInt = 768
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"  # parameters: float32

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: a multiple of 128, which is easy to divide."""
        return math.ceil(self.vocab_size / 128) * 128

    @property
    def residual_std(self) -> float:
        """The standard deviation of new weights whose result the residual stream adds up.

        Radford et al. 2019, section 2.3.
        """
        return 0.02 / math.sqrt(2 * self.n_layer)

    @property
    def token_dtype(self) -> str:
        """The type of a token in files and windows: uint16 if all ids fit."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True, config=STRICT)
class ModelConfig(ShapeConfig):
    """The shape, and how it is computed, which changes numbers by rounding only."""

    attention: Literal["xla", "cudnn", "splash"] = "xla"  # cudnn: GPUs; splash: TPUs
    loss_chunks: PositiveInt = 1  # parts of a window; only one's logits exist at once
    scan_layers: bool = False  # one compiled block in a loop: for many layers


@dataclass(frozen=True, config=STRICT)
class RecipeConfig(ShapeConfig):
    """What decides the result: the shape, the data, the optimizer, and the seed."""

    dataset: Place = "Skylion007/openwebtext"  # hub name, files ("my/*.txt"), a URL of
    # files ("s3://my-bucket/*.parquet"), or "builtin"
    dataset_config: Text | None = None  # of a dataset of the hub that has several
    text_column: Text = "text"  # of the files or the dataset, unless they are .txt
    max_documents: PositiveInt | None = None  # the first so many of a split; None: all
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.0005  # of the documents
    init_from: Weights = "scratch"  # or a Hugging Face GPT-2: hub name or folder
    batch_size: PositiveInt = 480  # windows an optimizer step, over all devices
    learning_rate: Positive = 6e-4
    min_learning_rate: Positive = 6e-5
    warmup_steps: PositiveInt = 2_000
    decay_steps: PositiveInt = 600_000
    weight_decay: NotNegative = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    grad_clip: Positive = 1.0  # global norm
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1337


@dataclass(frozen=True, config=STRICT)
class MachineConfig:
    """The workers, and how the model is spread over their devices.

    Other values here change how fast the result comes, and the result by no more than
    rounding.
    """

    platform: Literal["cpu", "gpu", "tpu"] = "gpu"
    num_workers: PositiveInt | Range | None = None  # processes; None: as many as the
    # cluster's GPUs or TPU hosts allow, or 1 on CPUs; elastic if a range: [2, 4]
    devices_per_worker: PositiveInt = 1  # GPUs, TPU chips, or simulated CPU devices
    cpus_per_worker: Positive = 1.0
    topology: Topology | None = None  # TPU slice, such as "4x4"
    accelerator_type: str | None = None  # TPU generation, such as "TPU-V6E"
    autoscaling: bool = False  # True: the cluster adds missing machines by itself
    device_batch_size: PositiveInt = 32  # windows that a device takes at once, at most
    fsdp: PositiveInt = 1  # mesh axes; the data axis takes what these two leave
    tensor_parallel: PositiveInt = 1

    @property
    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers; without `num_workers`, one, or a slice's."""
        n = self.num_workers or self.workers_per_slice
        return n if isinstance(n, tuple) else (n, n)

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """What a worker needs, in the names that Ray gives resources."""
        if self.platform == "tpu":
            return {"TPU": self.devices_per_worker}
        gpus = {"GPU": self.devices_per_worker} if self.platform == "gpu" else {}
        return {"CPU": self.cpus_per_worker} | gpus

    @property
    def workers_per_slice(self) -> int:
        """Workers come and go by this many: one by one, or by whole TPU slices."""
        return max(1, self.chips // self.devices_per_worker) if self.topology else 1

    @property
    def chips(self) -> int:
        """Chips of a TPU slice."""
        return math.prod(int(size) for size in self.topology.split("x"))

    def mesh_shape(self, workers: int) -> tuple[int, int, int]:
        """Devices along the data, fsdp, and tensor axes."""
        others = self.fsdp * self.tensor_parallel
        data = workers * self.devices_per_worker // others
        return data, self.fsdp, self.tensor_parallel


@dataclass(frozen=True, config=STRICT)
class TrainingConfig(RecipeConfig, ModelConfig, MachineConfig):
    """Everything that decides a run: the classes above, the loop, and the places."""

    max_steps: PositiveInt = 600_000
    log_interval: PositiveInt = 100  # steps
    eval_interval: PositiveInt = 1_000  # steps; each evaluation saves a checkpoint
    checkpoint_interval: PositiveInt | None = None  # steps; to save in between, too
    eval_steps: PositiveInt = 9  # batches of val.bin; 9 x 480 windows are nearly all
    max_failures: Annotated[int, Field(ge=-1)] = 3  # restarts; -1 is without end
    stall_timeout_s: Seconds = 1_800.0  # a step that takes longer ends its worker
    accept_changed_program: bool = False  # True: continue what another program began
    run_name: Name = "gpt2"  # which Ray, Orbax, and object stores take as it is
    data_dir: Folder = "data"  # on storage that all nodes share, as the next one
    storage_path: Folder = "runs"  # may be remote, such as s3://my-bucket/runs

    @property
    def device_windows(self) -> int:
        """The windows of a batch that each device gets, of the most workers."""
        data, fsdp, _ = self.mesh_shape(self.worker_range[1])
        if not data:
            raise ValueError(f"num_workers: one can't form a mesh with fsdp {fsdp}")
        return self.batch_size // (data * fsdp)

    @property
    def micro_batches(self) -> int:
        """The equal parts that these go through in: as few as `device_batch_size` allows."""
        windows = self.device_windows
        parts = range(math.ceil(windows / self.device_batch_size), windows + 1)
        return next(n for n in parts if windows % n == 0)

    @property
    def split(self) -> dict[str, int | str]:
        """How the devices of the most workers share a batch."""
        workers, parts = self.worker_range[1], self.micro_batches
        mesh, windows = self.mesh_shape(workers), self.device_windows
        return {
            "workers": workers,
            "devices": math.prod(mesh),
            "mesh": " x ".join(map(str, mesh)),
            "batch": self.batch_size,
            "per device": windows,
            "micro-batches": f"{parts} x {windows // parts}",
        }

    @property
    def run_path(self) -> epath.Path:
        """The run's own folder, local or remote: its log and its checkpoints."""
        return epath.Path(self.storage_path) / self.run_name

    @property
    def remote(self) -> bool:
        """Whether storage is an object store, such as s3://, and no file system."""
        return "://" in self.storage_path

    def __post_init__(self):
        for key, expected in mistakes(self):
            raise ValueError(f"{key} ({getattr(self, key)}): expected {expected}")


def mistakes(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Fields that contradict others, and what was expected; the later rely on the earlier."""
    for parts, size in DIVISORS:
        if (whole := getattr(config, size)) % getattr(config, parts):
            yield parts, f"a divisor of {size} ({whole})"
    if config.min_learning_rate > config.learning_rate:
        yield "min_learning_rate", f"at most learning_rate ({config.learning_rate})"
    if config.decay_steps <= config.warmup_steps:
        yield "decay_steps", f"more than warmup_steps ({config.warmup_steps})"
    if "://" in config.data_dir:
        yield "data_dir", "a folder that all nodes share"
    if not re.fullmatch(STORAGE, config.storage_path, re.DOTALL):
        places = "a folder, s3://bucket/runs, or gs://bucket/runs, without * ? [ ] \\"
        bucket = (
            "in a bucket, ASCII without spaces, #, %, and parts that are empty, . or .."
        )
        yield "storage_path", f"{places}; {bucket}"
    kernel, head = config.attention, config.n_embd // config.n_head
    platform = {"cudnn": "gpu", "splash": "tpu"}.get(kernel, config.platform)
    if platform != config.platform:
        yield "attention", f"xla, or platform {platform}, and not {config.platform}"
    if kernel == "cudnn" and config.compute_dtype != "bfloat16":
        yield "compute_dtype", "bfloat16, or attention: xla"
    if kernel == "cudnn" and (head % 8 or head > 256):  # 128 on Ampere
        yield "n_head", f"n_embd / n_head ({head}) a multiple of 8 up to 256 for cudnn"
    if kernel == "splash" and config.block_size % SPLASH_BLOCK:
        yield "block_size", f"a multiple of {SPLASH_BLOCK}, or attention: xla"
    yield from slice_mistakes(config)
    if config.num_workers or config.topology:  # or the cluster decides, later
        yield from range_mistakes(config)


def slice_mistakes(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """A TPU slice that isn't made, or that the workers don't fill; Ray would wait for it."""
    topology, kind = config.topology, config.accelerator_type
    workers, chips = config.workers_per_slice, config.devices_per_worker
    if config.platform != "tpu" and (topology or (kind or "").startswith("TPU")):
        yield "platform", f"tpu with topology ({topology}), accelerator_type ({kind})"
    if not topology:
        if config.platform == "tpu" and config.worker_range[1] > 1:
            yield "num_workers", "1, or the topology and accelerator_type of a slice"
        return
    made = TPU_TOPOLOGIES.get(kind)
    if made and topology not in made:
        yield "topology", f"one of {kind}: {', '.join(made)}"
    if made and config.chips > 8 and chips != 4:
        yield "devices_per_worker", f"4, all chips of a host of a {topology} slice"
    if workers * chips != config.chips:
        yield "devices_per_worker", f"a divisor of the {config.chips} chips of a slice"
    if any(n % workers for n in config.worker_range):
        yield "num_workers", f"a multiple of {workers}, which a {topology} slice takes"


def range_mistakes(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Numbers of workers that can't share a batch; of a range, Ray may start any."""
    fewest, most = config.worker_range
    if fewest > most:
        yield "num_workers", f"the fewest, and then the most: [{most}, {fewest}]"
    counts = range(fewest, most + 1, config.workers_per_slice)
    wrong = {n: mistake for n in counts if (mistake := mesh_mistake(config, n))}
    if wrong and (fit := [n for n in counts if n not in wrong]):
        each = "each, since Ray may start any, to share batch_size "
        each += f"({config.batch_size}) evenly; {', '.join(map(str, fit))} do"
        yield "num_workers", each
    yield from wrong.values()


def mesh_mistake(config: TrainingConfig, workers: int) -> tuple[str, str] | None:
    """Why the devices of so many workers form no mesh, or can't divide a batch.

    A slice holds whole rows of the mesh, so that between slices only gradients travel.
    """
    data, fsdp, tensor = config.mesh_shape(workers)
    devices = config.chips if config.topology else workers * config.devices_per_worker
    if devices % (fsdp * tensor):
        return "fsdp", f"to divide {devices} devices with tensor_parallel ({tensor})"
    if rest := config.batch_size % (shares := data * fsdp):
        less = config.batch_size - rest
        sizes = " or ".join(str(size) for size in (less, less + shares) if size)
        return "batch_size", f"to divide evenly over {shares} devices; {sizes} would do"
    return None


def most_workers(config: TrainingConfig, workers: int) -> int | None:
    """The most workers, up to `workers`, that share a batch evenly; None if none do."""
    together = config.workers_per_slice
    counts = range(workers // together * together, 0, -together)
    return next((n for n in counts if not mesh_mistake(config, n)), None)


def storage_root() -> epath.Path:
    """Where runs and data are kept, unless a configuration says otherwise.

    Anyscale mounts /mnt/cluster_storage on every node. Elsewhere it is the folder `storage`
    beside the notebook or, if nothing can be written there, `gpt2` in the home folder.
    """
    shared = epath.Path("/mnt/cluster_storage")
    if shared.is_dir():
        return shared / "gpt2"
    beside = epath.Path("storage").resolve()
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return beside
    return epath.Path("~/gpt2").expanduser()


def load_config(path: str | Path, **changes) -> TrainingConfig:
    """The configuration in the YAML file `path`, with `changes` on top of it.

    The name of the run ends in a fingerprint of the recipe, unless the file gives one: the
    same recipe continues the same run, another one starts a new run. `init_from` brings
    the shape of the model, and `tokenizer` its `vocab_size`.

    Raises:
        ValueError: a key is unknown, is given twice, has the wrong type, or contradicts
            another.
        yaml.YAMLError: the file is no YAML.
    """
    values = read_yaml(path) | changes
    try:
        recipe = recipe_of(values)
        name, source = recipe.tokenizer, recipe.init_from
        if source != "scratch":
            from trainkit import huggingface  # slow, and needed here only

            shape = huggingface.published_shape(source)
            if values | shape != shape | values:
                raise ValueError(f"init_from: {source} has {shape}; leave out others")
            huggingface.check_tokenizer(source, name)
            values |= shape
        if name != tokenizers.GPT2:
            least = tokenizers.load(name).n_vocab
            if (size := values.setdefault("vocab_size", least)) < least:
                tokens = f"{least} or more, as tokenizer {name} has; leave it out"
                raise ValueError(f"vocab_size ({size}): expected {tokens}")
        return TrainingConfig(**default_places(path, recipe_of(values)) | values)
    except ValueError as error:
        text = explain(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path}: {text}") from None


def read_yaml(path: str | Path) -> dict:
    """The keys and values of a YAML file.

    Raises:
        ValueError, yaml.YAMLError: with the file, the line, and what is wrong there.
    """
    with open(path, "rb") as file:  # so that errors name it
        loader = yaml.SafeLoader(file)
        if (node := loader.get_single_node()) is None:
            return {}
    values, seen = loader.construct_document(node), set()
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found {values!r:.60}")
    for key, _ in node.value:
        if key.value in seen:
            where = f"{path}, line {key.start_mark.line + 1}"
            raise ValueError(f"{where}: {key.value} is given a second time; remove one")
        seen.add(key.value)
    return {str(key): value for key, value in values.items()}


def recipe_of(values: dict) -> RecipeConfig:
    """What decides the result, of the values of a configuration."""
    keys = {field.name for field in dataclasses.fields(RecipeConfig)}
    return RecipeConfig(**{key: values[key] for key in keys & values.keys()})


def default_places(path: str | Path, recipe: RecipeConfig) -> dict[str, str]:
    """The run's name and folders, where the YAML file `path` gives none.

    What lies beside the notebook counts by its place there, so another copy of the folder
    continues the same run.
    """
    fields, values = dataclasses.fields(recipe), vars(recipe)
    differs = {f.name: values[f.name] for f in fields if values[f.name] != f.default}
    here = f"{os.getcwd()}/"
    differs |= {k: differs[k].removeprefix(here) for k in LOCATED if k in differs}
    text = json.dumps(differs, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:6]
    stem = unicodedata.normalize("NFKD", Path(path).stem).encode("ascii", "ignore")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem.decode())[:100].strip("-._") or "run"
    kept = ("dataset_config", "max_documents", "text_column", "val_fraction")
    dataset = [re.sub(r"[\W_]+", "-", recipe.dataset).strip("-") or "text"]
    dataset += [str(differs[key]) for key in kept if key in differs]
    if "tokenizer" in differs:
        dataset.append(Path(recipe.tokenizer).stem)
    return {
        "run_name": f"{name}-{fingerprint}",
        "data_dir": str(storage_root() / "data" / "-".join(dataset)),
        "storage_path": str(storage_root() / "runs"),
    }


def explain(error: ValidationError) -> str:
    """What pydantic refuses, in a line: each key, its value, and what would do."""
    said, known = [], [field.name for field in dataclasses.fields(TrainingConfig)]
    for part in error.errors():
        key, text = "".join(part["loc"][:1]), part["msg"].removeprefix("Value error, ")
        if part["type"] == "unexpected_keyword_argument":
            close = difflib.get_close_matches(key, known) or known
            text = f"no such key; there are {', '.join(close)}"
        if part["type"] == "float_type" and isinstance(part["input"], str):
            text += "; YAML takes 1.0e-3 for one, and 1e-3 for text"
        said += [f"{key} ({part['input']!r}): {text}" if key else text]
    return "; ".join(said)

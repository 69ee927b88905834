"""What decides a run: `TrainingConfig`, and `load_config`, which reads it from YAML.

Pydantic checks every value, so a misspelled key or a wrong type fails when the file is
read, and not later on a worker. The functions named `check_` refuse what shows only when two
fields meet: each raises a ValueError that names them, what they hold, and what would do. The
defaults are GPT-2 small with nanoGPT's recipe:
https://github.com/karpathy/nanoGPT/blob/master/config/train_gpt2.py.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import unicodedata
from pathlib import Path
from typing import Annotated, Literal

import yaml
from etils import epath
from pydantic import ConfigDict, Field, PositiveInt, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from trainkit import tokenizers

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Range = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]
Topology = Annotated[str, Field(pattern=r"^[1-9]\d*(x[1-9]\d*)+$")]
STRICT = ConfigDict(extra="forbid", strict=True)
# https://cloud.google.com/tpu/docs/v6e and v5e; other generations are left to Ray.
SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
TPU_TOPOLOGIES = {"TPU-V6E": SLICES_2D, "TPU-V5LITEPOD": SLICES_2D}
LAYOUT = 2  # of checkpoints, and of random draws: the runs of an older one can't go on
SPLASH_BLOCK = 512  # tokens that the TPU's attention kernel takes at once


@dataclass(frozen=True, config=STRICT)
class ShapeConfig:
    """The shape of the model. The defaults are GPT-2 small, 124M parameters."""

    # Of tiktoken, or of Hugging Face: a file, a folder, or a name on the hub.
    tokenizer: Text = tokenizers.GPT2
    vocab_size: PositiveInt = 50_257  # of another tokenizer: as many as it has
    block_size: PositiveInt = 1_024  # tokens that the model sees at once
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_embd: PositiveInt = 768
    dropout: Fraction = 0.0
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
    """The shape, and how it is computed, which changes numbers by rounding only.

    (With dropout, `scan_layers` also decides what is drawn.)
    """

    attention: Literal["xla", "cudnn", "splash"] = "xla"  # cudnn: GPUs; splash: TPUs
    loss_chunks: PositiveInt = 1  # parts of a window; only one's logits exist at once
    scan_layers: bool = False  # one compiled block in a loop: for many layers


@dataclass(frozen=True, config=STRICT)
class RecipeConfig(ShapeConfig):
    """What decides the result: the shape, the data, the optimizer, and the seed."""

    dataset: Text = "Skylion007/openwebtext"  # hub name, files ("my/*.txt"), a URL of
    # files ("s3://my-bucket/*.parquet"), or "builtin"
    dataset_config: Text | None = None  # of a dataset of the hub that has several
    text_column: Text = "text"  # of the files or the dataset, unless they are .txt
    max_documents: PositiveInt | None = None  # the first so many of a split; None: all
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.0005  # of the documents
    init_from: Text = "scratch"  # or a Hugging Face GPT-2: hub name or folder
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
    layout: Literal[LAYOUT] = LAYOUT  # a run keeps that of the version that began it


@dataclass(frozen=True, config=STRICT)
class MachineConfig:
    """The workers, and how the model is spread over their devices.

    Other values here change how fast the result comes, and the result by no more than
    rounding. (With dropout, the number of micro-batches also decides what is drawn.)
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
    data_parallel: int = -1  # mesh axes; -1 takes the devices that the others leave
    fsdp: PositiveInt = 1
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
        devices = workers * self.devices_per_worker
        data = devices // others if self.data_parallel == -1 else self.data_parallel
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
    profile_steps: Range | None = None  # [10, 13] traces steps 11 to 13
    run_name: Text = "gpt2"
    data_dir: Text = "data"  # on storage that all nodes share, as the next one
    storage_path: Text = "runs"  # may be remote, such as s3://my-bucket/runs

    @property
    def device_windows(self) -> int:
        """The windows of a batch that each device gets, of the most workers."""
        data, fsdp, _ = self.mesh_shape(self.worker_range[1])
        if not data:
            raise ValueError(f"num_workers: one can't form a mesh with fsdp {fsdp}")
        return self.batch_size // (data * fsdp)

    @property
    def micro_batches(self) -> int:
        """The parts that these go through in: as few as `device_batch_size` allows."""
        return count_parts(self.device_windows, self.device_batch_size)

    @property
    def run_path(self) -> epath.Path:
        """The run's own folder, local or remote: its log and its checkpoints."""
        return epath.Path(self.storage_path) / self.run_name

    @property
    def remote(self) -> bool:
        """Whether storage is an object store, such as s3://, and no file system."""
        return "://" in self.storage_path

    @model_validator(mode="after")
    def check(self) -> "TrainingConfig":
        """Refuse what no machine could run."""
        check_fields(self)
        check_attention(self)
        check_topology(self)
        if (
            self.num_workers or self.topology
        ):  # or the cluster decides, when it is there
            fewest, most = self.worker_range
            counts = range(fewest, most + 1, self.workers_per_slice)
            check_range(self, counts)
            for workers in counts:
                check_mesh(self, workers)
        return self


def count_parts(windows: int, most: int) -> int:
    """The fewest equal parts of so many windows that have at most `most` each."""
    parts = range(math.ceil(windows / most), windows + 1)
    return next(k for k in parts if windows % k == 0)


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
    source = values.get("init_from", "scratch")
    if not isinstance(source, str):
        source = "scratch"  # and pydantic says so below
    if source not in ("scratch", ""):
        source = absolute(source) if Path(source).is_dir() else source
        from trainkit import huggingface  # slow, and needed here only

        shape = huggingface.published_shape(source)
        if values | shape != shape | values:
            raise ValueError(
                f"{path}: {source} has {shape}; leave out what contradicts it"
            )
        values |= {"init_from": source} | shape
    name = values.get("tokenizer", tokenizers.GPT2)
    if isinstance(name, str) and name not in (tokenizers.GPT2, ""):
        place = expanded(name)
        values["tokenizer"] = name = absolute(place) if os.path.exists(place) else place
        size = tokenizers.load(name).n_vocab
        values.setdefault("vocab_size", size)
        if values["vocab_size"] < size:
            raise ValueError(
                f"{path}: vocab_size is {values['vocab_size']}, and tokenizer {name} has "
                f"{size} tokens; leave vocab_size out, or set {size} or more"
            )
    if source not in ("scratch", "") and isinstance(name, str):
        huggingface.check_tokenizer(source, name)
    try:
        for key in ("data_dir", "storage_path"):
            if isinstance(values.get(key), str) and values[key]:
                values[key] = absolute(values[key])
        if isinstance(values.get("dataset"), str):  # which may be a name on the hub
            values["dataset"] = expanded(values["dataset"])
        places = default_places(path, TrainingConfig(**values))
        return TrainingConfig(**(places | values))
    except (TypeError, ValidationError) as error:
        raise ValueError(f"{path} is not a valid configuration.\n{error}") from None


def read_yaml(path: str | Path) -> dict:
    """The keys and values of a YAML file.

    Raises:
        ValueError, yaml.YAMLError: with the file, the line, and what is wrong there.
    """
    try:
        with open(path, encoding="utf-8") as file:  # so that errors name it
            loader = yaml.SafeLoader(file)
            node = loader.get_single_node()
    except FileNotFoundError as error:
        others = ", ".join(sorted(map(str, Path(path).parent.glob("*.yaml")))) or "none"
        raise FileNotFoundError(
            f"{path}: expected a configuration, found no such file (GPT2_CONFIG chooses it, "
            f"or the call of load_config). There are: {others}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file: {error}") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        found = f"{node.value!r:.60}" if isinstance(node.value, str) else "a list"
        raise ValueError(f"{path}: expected `key: value` lines, found {found}")
    lines = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise ValueError(
                f"{path}, line {line}: {name} is given a second time, after line "
                f"{lines[name]}; keep one of the two"
            )
        lines[name] = line
    return loader.construct_document(node)


def transcribed(name: str) -> str:
    """A name in the characters that `run_name` may have."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain)[:100].strip("-._") or "run"


def default_places(path: str | Path, config: TrainingConfig) -> dict[str, str]:
    """The run's name and folders, where the YAML file `path` gives none."""
    fields, values = dataclasses.fields(RecipeConfig), vars(config)
    recipe = {f.name: values[f.name] for f in fields if values[f.name] != f.default}
    recipe["layout"] = LAYOUT
    text = json.dumps(recipe, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:6]
    dataset = re.sub(r"[^A-Za-z0-9]+", "-", config.dataset).strip("-")
    if config.dataset_config:
        dataset += f"-{config.dataset_config}"
    if config.max_documents:
        dataset += f"-{config.max_documents}"
    if config.text_column != RecipeConfig.text_column:
        dataset += f"-{config.text_column}"
    if config.tokenizer != tokenizers.GPT2:
        dataset += f"-{Path(config.tokenizer).stem}"
    return {
        "run_name": f"{transcribed(Path(path).stem)}-{fingerprint}",
        "data_dir": str(storage_root() / "data" / dataset),
        "storage_path": str(storage_root() / "runs"),
    }


def absolute(place: str) -> str:
    """Workers run in folders of their own, where a relative path would mislead them."""
    return place if "://" in place else os.path.abspath(expanded(place))


def expanded(place: str) -> str:
    """A path with the home folder for ~, and with the values of $VARIABLES."""
    return os.path.expandvars(os.path.expanduser(place))


def check_fields(config) -> None:
    """Refuse sizes that don't divide, and fields that contradict each other."""
    sizes = [("n_embd", "n_head"), ("n_head", "tensor_parallel")]
    for name, divisor in [*sizes, ("block_size", "loss_chunks")]:
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
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", config.run_name):
        raise ValueError(
            f"run_name ({config.run_name!r}): expected at most 128 of A-Z, a-z, 0-9, '.', "
            "'_', and '-', the first a letter or a digit; Ray, Orbax, or object stores fail "
            "with other names"
        )
    if set(config.storage_path) & {*"*?[]"}:
        raise ValueError(
            f"storage_path ({config.storage_path}): expected none of * ? [ ], which Orbax "
            "takes for a pattern; choose another folder"
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


def check_range(config, counts: range) -> None:
    """Refuse an elastic range in which some numbers of workers work, and others don't.

    Ray starts as many as there is room for, and can't be told to leave numbers out.
    """
    fit = [n for n in counts if shares_evenly(config, n)]
    others = [n for n in counts if n not in fit]
    if not fit or not others:
        return
    ranges = [(a, b) for a in fit for b in fit if not any(a <= n <= b for n in others)]
    longest = max(ranges, key=lambda pair: (pair[1] - pair[0], pair))
    raise ValueError(
        f"num_workers: in an elastic run, Ray may start any number from {counts[0]} to "
        f"{counts[-1]}, and {', '.join(map(str, others))} can't share batch_size "
        f"({config.batch_size}) with fsdp ({config.fsdp}); {', '.join(map(str, fit))} can. "
        f"Set num_workers: {list(longest)}, or a batch_size that all of them divide"
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

"""Whether a run may go on: a run is its recipe, its program, and its tokens.

The program is what JAX makes of `create_state` and `train_step`, in StableHLO, and not their
source: an edit counts if it changes an operation or a constant, however it comes about. It is
made for one CPU without kernels, chunks, or scans, so that other machines continue the run; and
in a new process, since JAX would remember here what a function called before a cell ran again.
"""

import base64
import dataclasses
import functools
import json
import os
import re
import socket
import zlib
from collections.abc import Callable
from itertools import islice, zip_longest

import jax
import ray

from trainkit import checkpoints, lock, run_log, token_files, tokenizers, workers
from trainkit.config import LOCATED, RecipeConfig, TrainingConfig

ONE_CPU = {
    **{"platform": "cpu", "num_workers": 1, "devices_per_worker": 1, "topology": None},
    **{"accelerator_type": None, "fsdp": 1, "tensor_parallel": 1},
    **{"attention": "xla", "loss_chunks": 1, "scan_layers": False},
}
MEMORY = (
    "A device has too little memory for this step. Set device_batch_size lower, loss_chunks "
    "higher, fsdp higher, or scan_layers: true, in this order; docs/guide.md tells more."
)


def guard(trainer, config: TrainingConfig, *programs: Callable):
    """`trainer`, whose `fit` refuses to mix two runs, or two launches of one.

    Args:
        programs: the notebook's `create_state`, `train_step`, and `eval_step`.

    `fit` raises what `lock.hold`, `run_log.refuse_diverged`, and `compare` do.
    """
    loop, fit = trainer.train_loop_per_worker, trainer.fit

    def guarded_fit():
        workers.check_resources(config)
        with lock.hold(config) as mark:
            run_log.refuse_diverged(config)
            environment = trainer.run_config.worker_runtime_env.get("env_vars", {})
            now = describe(config, programs, environment)
            compare(config, now)
            workers.release_placement_groups()
            (config.run_path / checkpoints.RECORD).unlink(missing_ok=True)
            trainer.train_loop_per_worker = guarded(loop, mark, now["tokens"])
            result = fit()
            run_log.refuse_diverged(config)  # or it would look like the end
            return result

    trainer.fit = guarded_fit
    return trainer


def guarded(loop: Callable[[dict], None], mark: str, tokens: dict) -> Callable:
    """`loop`, on workers that see the folder and the tokens that the launch sees."""

    @functools.wraps(loop)
    def guarded_loop(settings: dict) -> None:
        config = TrainingConfig(**settings)
        workers.watch(config.stall_timeout_s)
        lock.joined[str(config.run_path)] = mark
        checkpoints.retry(lock.confirm, config, unless=(RuntimeError,))
        found = dict.fromkeys(tokens, "nothing") | token_files.digest(config)
        if other := differences(tokens, found):
            raise ValueError(
                f"data_dir: on {socket.gethostname()}, {config.data_dir} has other tokens "
                f"than where the run was launched: {'; '.join(other)}. Choose storage that "
                "all nodes share, or copy the files to each."
            )
        try:
            loop(settings)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                error.add_note(MEMORY)
            elif re.search("Gloo|NCCL", str(error)):  # another worker has died
                error.with_traceback(None)  # for this one's place says nothing
            raise

    return guarded_loop


def describe(config, programs: tuple, environment: dict) -> dict:
    """What makes a run; `environment`: the workers', which may set flags of JAX."""
    variables = {"env_vars": environment | {"JAX_PLATFORMS": "cpu"}}
    options = {"num_cpus": 0, "max_calls": 1, "runtime_env": variables}
    translated = ray.remote(**options)(translate).remote(config, *programs)
    recipe = {f.name: getattr(config, f.name) for f in dataclasses.fields(RecipeConfig)}
    recipe["what the tokenizer does"] = tokenizers.identity(config.tokenizer)
    now = {"recipe": recipe, "tokens": token_files.digest(config), "windows": {}}
    now["evaluation"] = {"eval_steps": config.eval_steps}
    if "train" in now["tokens"]:  # or the run streams its text
        second = token_files.count_windows(config, "train") // config.batch_size + 1
        for n in (0, second, config.max_steps - 1):  # `second`: of the second epoch
            indices = token_files.windows_of(config, "train", range(n, n + 1))
            hashed = zlib.crc32(indices.tobytes())
            now["windows"][f"step {n}"] = f"{indices[0, :4]} ... {hashed:08x}"
    return now | ray.get(translated)


def translate(config, create_state, train_step, eval_step) -> dict:
    """The program, and a hash of what may differ beside it. For a new process."""
    size = config.batch_size
    one = dataclasses.replace(config, **ONE_CPU, device_batch_size=size)
    batch = jax.ShapeDtypeStruct((size, config.block_size + 1), config.token_dtype)
    text = functools.partial(text_of, workers.PLATFORMS[config.platform])
    try:
        state = jax.eval_shape(lambda: create_state(one))
        program = text(lambda: create_state(one))
        program += text(lambda *x: train_step(*x, one), state, batch)
        evaluation = text(lambda *x: eval_step(*x, one), state.params, batch)
    except TypeError as error:  # JAX's own can't travel to the driver
        raise TypeError(str(error)).with_traceback(error.__traceback__) from None
    return {
        "jax": jax.__version__,
        "program": base64.b85encode(zlib.compress(program.encode())).decode(),
        "beside": {"eval_step": zlib.crc32(evaluation.encode())},
    }


def text_of(platform: str, function: Callable, *shapes) -> str:
    """`function` in StableHLO, without names, and with a hash of each long constant."""
    traced = jax.jit(function).trace(*shapes)
    try:
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    except (ValueError, NotImplementedError):  # it calls a kernel that no CPU has
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    text = re.sub(r'"0x\w+"', lambda found: str(zlib.crc32(found[0].encode())), text)
    names = dict.fromkeys(re.findall(r"(?:module|private) @(\w+)", text))
    numbers = {name: f"@f{n}" for n, name in enumerate(names)}
    return re.sub(r"@(\w+)", lambda found: numbers.get(found[1], found[0]), text)


def compare(config: TrainingConfig, now: dict) -> None:
    """Refuse to continue another run, and keep in its folder what this one is.

    Raises:
        ValueError: with what differs, and what to do.
    """
    now = json.loads(json.dumps(now))  # as what is known was: tuples are lists
    path, begun = config.run_path / "identity.json", checkpoints.list_folders(config)
    known = checkpoints.read_json(path) if begun else now
    if not known and (settings := checkpoints.newest_settings(config)):
        known = {"recipe": settings}
    known = now | {"jax": "unknown"} | known
    recipe = differences(portable(known["recipe"]), portable(now["recipe"]))
    tokens, program, beside, evaluation = (
        differences(known[key], now[key])
        for key in ("tokens", "windows", "beside", "evaluation")
    )
    if known["jax"] == now["jax"]:
        program += first_lines(known["program"], now["program"])
    else:
        beside = [f"JAX was {known['jax']}, so its program can't be compared"]
    if program and config.accept_changed_program:
        beside.append("its program was another")
        program = []
    found = {"recipe": recipe, "tokens": tokens, "program": program}
    if other := [name for name in found if found[name]]:
        raise ValueError(
            f"run_name: {config.run_path} holds a run with another {', '.join(other)}:\n"
            + "\n".join([*recipe, *tokens, *program])
            + "\nChoose another run_name to start a new run, or undo the change. To continue "
            "with another program, set accept_changed_program: true."
        )
    for each in [*beside, *evaluation]:
        print(f"{config.run_path} continues, though {each}.")
    saved = checkpoints.list_saved(config)
    if saved and checkpoints.step_of(saved[0]) >= config.max_steps:
        print(f"max_steps: {saved[0]} is there already. Set it higher to train on.")
    checkpoints.write_whole(path, json.dumps(now))


def portable(recipe: dict) -> dict:
    """A recipe with files' names only: storage may be mounted elsewhere, and jobs move."""
    places = {key: str(recipe.get(key, "")) for key in LOCATED}
    names = {k: os.path.basename(v) for k, v in places.items() if os.path.isabs(v)}
    return recipe | names


def first_lines(before: str, now: str) -> list[str]:
    """Where two programs, as `translate` packs them, first differ: parts of some lines."""
    packed = map(base64.b85decode, (before, now))
    sides = [zlib.decompress(each).decode().split("\n") for each in packed]
    others = (pair for pair in zip_longest(*sides, fillvalue="") if len({*pair}) > 1)
    found = []
    for pair in islice(others, 3):
        start = max(len(os.path.commonprefix(pair)) - 60, 0)
        old, new = (line[start : start + 120] for line in pair)
        found += [f"- {old}", f"+ {new}"]
    return found


def differences(before: dict, now: dict) -> list[str]:
    """What differs among the keys of both."""
    return [
        f"{key} was {before[key]!r}, and is {value!r}"
        for key, value in now.items()
        if key in before and before[key] != value
    ]

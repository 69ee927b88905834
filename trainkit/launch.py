"""Whether a run may go on: a run is its recipe, its program, and its tokens.

The program is what JAX makes of `create_state` and `train_step`, not their source: an edit
counts if it changes an operation or a constant, however it comes about. It is traced for one
device without kernels, chunks, or scans, so that other machines continue the run; and in a
new process, since JAX would remember here what a function called before a cell ran again.
"""

import base64
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterable

import jax
import numpy as np
import ray

from trainkit import checkpoints, lock, run_log, token_files, workers
from trainkit.config import RecipeConfig, TrainingConfig

FLAGS = ["jax_threefry_partitionable", "jax_default_prng_impl"]  # what is drawn
FLAGS += ["jax_enable_x64", "jax_default_matmul_precision"]  # and in which types
ONE_DEVICE = {
    **{"platform": "cpu", "num_workers": 1, "devices_per_worker": 1, "topology": None},
    **{"accelerator_type": None, "data_parallel": -1, "fsdp": 1, "tensor_parallel": 1},
    **{"attention": "xla", "loss_chunks": 1, "scan_layers": False},
}
BESIDE = "eval_step", "program as configured"  # which may differ
NOTHING = {"recipe": {}, "tokens": {}, "windows": {}, "jax": "?", "accepted": []}
MEMORY = (
    "A device has too little memory for this step. Set device_batch_size lower, loss_chunks "
    "higher, fsdp higher, or scan_layers: true, in this order; docs/guide.md tells more."
)


def guard(trainer, config: TrainingConfig, *programs: Callable):
    """`trainer`, whose `fit` refuses to mix two runs, or two launches of one.

    It also deletes Ray's record of the run's checkpoints: `checkpoints` says why.

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
            say_if_done(config)
            workers.release_placement_groups()
            checkpoints.prepare_folder(config)
            trainer.train_loop_per_worker = guarded(loop, mark, now["tokens"])
            return fit()

    trainer.fit = guarded_fit
    return trainer


def guarded(loop: Callable[[dict], None], mark: str, tokens: dict) -> Callable:
    """`loop`, on workers that see the folder and the tokens that the launch sees."""

    @functools.wraps(loop)
    def guarded_loop(settings: dict) -> None:
        config = TrainingConfig(**settings)
        lock.joined[str(config.run_path)] = mark
        lock.confirm(config)
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
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(MEMORY)  # now: Ray keeps the error until its last attempt
            raise MemoryError(MEMORY) from error

    return guarded_loop


def describe(config, programs: tuple, environment: dict) -> dict:
    """What makes a run; `environment`: the workers', which may set flags of JAX."""
    variables = {"env_vars": environment | {"JAX_PLATFORMS": "cpu"}}
    options = {"num_cpus": 0, "max_calls": 1, "runtime_env": variables}
    traced = ray.remote(**options)(trace).remote(config, *programs)
    recipe = {f.name: getattr(config, f.name) for f in dataclasses.fields(RecipeConfig)}
    now = {"recipe": recipe, "tokens": token_files.digest(config), "windows": {}}
    if "train" in now["tokens"]:  # or the run streams its text
        second = token_files.count_windows(config, "train") // config.batch_size + 1
        known = checkpoints.read_json(config.run_path / "identity.json")
        steps = {0, second, config.max_steps - 1, *map(int, known.get("windows", {}))}
        for n in sorted(steps):
            numbers = token_files.windows_of(config, "train", range(n, n + 1))[0]
            now["windows"][str(n)] = f"{numbers[:4]} ... {show(numbers)}"
    return now | ray.get(traced)


def trace(config, create_state, train_step, eval_step) -> dict:
    """The program, compressed; and of what may differ, a hash. For a fresh process."""
    shape = config.batch_size, config.block_size + 1
    batch = jax.ShapeDtypeStruct(shape, config.token_dtype)
    one = dataclasses.replace(config, **ONE_DEVICE, device_batch_size=config.batch_size)
    really = {"loss_chunks": config.loss_chunks, "scan_layers": config.scan_layers}
    really["device_batch_size"] = config.batch_size // config.micro_batches
    made, state = jax.make_jaxpr(lambda: create_state(one), return_shape=True)()

    @functools.cache
    def text(function, config) -> str:
        given = state.params if function is eval_step else state
        try:
            made = jax.make_jaxpr(lambda *x: function(*x, config))(given, batch)
        except TypeError as error:  # JAX's own can't travel to the driver
            raise TypeError(str(error)).with_traceback(error.__traceback__) from None
        return text_of(made)

    flags = [f"{name} {getattr(jax.config, name)}" for name in FLAGS]
    program = "\n".join([*flags, text_of(made), text(train_step, one)])
    configured = text(train_step, dataclasses.replace(one, **really))
    return {
        "jax": jax.__version__,
        "program": base64.b85encode(zlib.compress(program.encode())).decode(),
        "program as configured": zlib.crc32(configured.encode()),
        "eval_step": zlib.crc32(text(eval_step, one).encode()),
    }


def text_of(jaxpr) -> str:
    """A jaxpr, an operation a line, without what changes no result.

    Variables are numbered, names and addresses left out, and `jax.jit` looked through.
    """
    lines, numbers = [], map("%{}".format, itertools.count())

    def walk(jaxpr, inputs: Iterable[str], indent: str) -> list[str]:
        body, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        inputs = itertools.chain(map(show, constants), inputs)
        names = dict(zip([*body.constvars, *body.invars], inputs))

        def name(atom) -> str:
            return show(atom.val) if hasattr(atom, "val") else names[atom]

        for each in body.eqns:
            kind, operands = each.primitive.name, [*map(name, each.invars)]
            inner = [x for x in jax.tree.leaves(each.params) if hasattr(x, "eqns")]
            if kind in ("jit", "pjit"):
                outputs = walk(*inner, operands, indent)
            else:
                outputs = [next(numbers) for _ in each.outvars]
                types = [str(variable.aval) for variable in each.outvars]
                options = {k: show(x) for k, x in each.params.items() if k != "name"}
                if kind.startswith("random"):
                    options["partitionable"] = each.ctx.threefry_partitionable
                said = [f"{k}={x}" for k, x in sorted(options.items()) if x]
                said = [*outputs, *types, "=", kind, *operands, *said]
                lines.append(indent + " ".join(said))
                for part in inner:
                    results = walk(part, numbers, indent + "  ")
                    lines.append(f"{indent}  return {' '.join(results)}")
            names |= zip(each.outvars, outputs)
        return [*map(name, body.outvars)]

    results = walk(jaxpr, numbers, "")
    return "\n".join([*lines, f"return {' '.join(results)}"])


def show(x) -> str:
    """A number as it is, a hash of an array, nothing of functions, and else the `repr`."""
    if any(callable(part) or hasattr(part, "eqns") for part in jax.tree.leaves(x)):
        return ""
    if "key<" in str(getattr(x, "dtype", "")):
        x = jax.random.key_data(x)
    if not hasattr(x, "__array__"):
        return re.sub(" at 0x[0-9a-f]+", "", repr(x))
    x = np.asarray(x)
    hashed = hashlib.blake2b(x.tobytes(), digest_size=8).hexdigest()
    return f"{x.dtype}{[*x.shape]}:{x.item() if x.size == 1 else hashed}"


def compare(config: TrainingConfig, now: dict) -> None:
    """Refuse to continue another run, and keep in its folder what this one is.

    Raises:
        ValueError: with what differs, and what to do.
    """
    path, begun = config.run_path / "identity.json", checkpoints.list_folders(config)
    known = NOTHING | (checkpoints.read_json(path) if begun else now)
    if not known["recipe"] and (settings := checkpoints.newest_settings(config)):
        known["recipe"] = {"layout": 1} | settings
    recipe, tokens, program = (
        differences(known[key], now[key]) for key in ("recipe", "tokens", "windows")
    )
    said = []
    if known["jax"] != now["jax"]:
        said = [
            f"JAX {now['jax']}: its program can't be compared with JAX {known['jax']}'s"
        ]
    elif lines := first_lines(known["program"], now["program"]):
        program += lines
    else:
        said = [f"another {name}" for name in BESIDE if known[name] != now[name]]
    if program and config.accept_changed_program:
        said.append("another program, as you accept it")
        known["accepted"] = [*known["accepted"], begun[0]]
        program = []
    for what, found, advice in [
        ("another recipe", recipe, "restore these values"),
        ("other tokens", tokens, "bring the old files back"),
        (
            "another program",
            program,
            "undo the change, or set accept_changed_program: true",
        ),
    ]:
        if found:
            first = f"run_name: {config.run_path} holds a run with {what}:"
            last = f"Choose another run_name to start a new run, or {advice}."
            raise ValueError("\n".join([first, *found, last]))
    for each in said:
        print(f"{config.run_path} continues with {each}.")
    kept = now | {"accepted": known["accepted"]}
    checkpoints.write_whole(path, json.dumps(kept))


def first_lines(before: str, now: str) -> list[str]:
    """The first lines in which two programs differ that `trace` has compressed."""
    packed = map(base64.b85decode, (before, now))
    sides = [zlib.decompress(text).decode().split("\n") for text in packed]
    start = max(len(os.path.commonprefix(sides)) - 1, 0)
    sides = [lines[start : start + 99] for lines in sides]
    lines = difflib.unified_diff(*sides, "the run's", "this one's", n=1, lineterm="")
    return [*lines][:12]


def differences(before: dict, now: dict) -> list[str]:
    """What differs among the keys of both."""
    return [
        f"{key} was {before[key]!r}, and is {value!r}"
        for key, value in now.items()
        if key in before and before[key] != value
    ]


def say_if_done(config: TrainingConfig) -> None:
    """Print that the run has nothing left to do, if that is so."""
    done = checkpoints.step_of(next(iter(checkpoints.list_saved(config)), "step_0"))
    if done >= config.max_steps:
        print(
            f"{config.run_path} has done {done:,} steps, and max_steps is "
            f"{config.max_steps:,}: nothing is trained. Set max_steps higher to continue, or "
            "choose another run_name to start anew."
        )

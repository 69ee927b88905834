"""Whether a run may go on: what counts as another program, and what becomes of one."""

import base64
import dataclasses
import json
import math
import os
import re
import shutil
import types
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from conftest import SLICE
from samples import byte_pairs

import trainkit.launch
from trainkit import checkpoints, lock, run_log, token_files, workers

PROGRAM = """
import functools
from typing import NamedTuple
import jax, jax.numpy as jnp, numpy as np, optax

{definitions}
class State(NamedTuple):
    step: jax.Array
    params: dict

def create_state(config):
    key = jax.random.key(config.seed)
    return State(jnp.zeros((), int), {{"w": jax.random.normal(key, (config.vocab_size, 3))}})

def loss(params, windows):
    x = params["w"][windows.astype(int)]
    return jnp.mean({expression})

@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(state, windows, config):
    value, grads = jax.value_and_grad(loss)(state.params, windows)
    params = jax.tree.map(lambda x, g: x - 0.1 * g, state.params, grads)
    return State(state.step + 1, params), value

def eval_step(params, windows, config):
    return loss(params, windows)
"""
NAMES = ("create_state", "train_step", "eval_step")
BEFORE = {"ACT": "jnp.tanh", "NUMBER": "2.0"}
AFTER = {"ACT": "jnp.sin", "NUMBER": "3.0"}
DEFAULT = ("def act(x):\n    return ACT(x)", "act(x)")
ONE = "@jax.jit\ndef minus(x): return -x\n"
TWO = "@jax.jit\ndef twice(x): return 2 * x\n"
# What a step uses, and how it uses it; a word of those above is edited.
KINDS = """
def act(x): return ACT(x) | act(x)
SCALES = np.arange(2997).reshape(3, 999) * NUMBER | x @ SCALES
rate = optax.cosine_decay_schedule(1.0, NUMBER) | rate(1) * x
class Act: act = property(lambda self: ACT) | Act().act(x)
act = jax.custom_vjp(jnp.abs); act.defvjp(lambda x: (x, 0), lambda _, g: (NUMBER * g,)) | act(x)
act = jax.jit(lambda x: jax.lax.scan(lambda y, _: (y * NUMBER, None), x, None, 2)[0]) | act(x)
""".strip().split("\n")


def source_of(definitions: str, expression: str, words: dict) -> str:
    definitions = definitions.replace("; ", "\n")
    text = PROGRAM.format(definitions=definitions, expression=expression)
    return re.sub(r"\b[A-Z]+\b", lambda found: words.get(found[0], found[0]), text)


def functions_in(program: str | types.ModuleType) -> list:
    """The notebook's, or those of a program in a module of its own."""
    if isinstance(program, str):
        source, program = program, types.ModuleType("program")
        exec(source, vars(program))
    return [getattr(program, name) for name in NAMES]


def text_of(config, program: str | types.ModuleType) -> str:
    packed = trainkit.launch.translate(config, *functions_in(program))["program"]
    return zlib.decompress(base64.b85decode(packed)).decode()


KERNEL = """
from jax.experimental import pallas
def act(x):
    def kernel(a, b):
        b[...] = ACT(a[...])
    return pallas.pallas_call(kernel, out_shape=x)(jax.lax.stop_gradient(x))
"""


@pytest.mark.parametrize("kind", [*KINDS, f"{KERNEL} | x * act(x)"])
def test_an_edit_that_changes_the_program_is_seen(small, kind):
    """The kernel's as well, though no CPU has it."""
    on_tpu = {"block_size": 128, "vocab_size": 128, "platform": "tpu", "num_workers": 1}
    config = small(**on_tpu if "pallas" in kind else {})
    before, after = (source_of(*kind.split(" | "), x) for x in (BEFORE, AFTER))
    text = text_of(config, before)
    assert text == text_of(config, before) != text_of(config, after)


NO_EDITS = [
    ("return jnp.tanh(x)", "return jnp.tanh(x)  # bounded"),
    ("minus", "negated"),
    ("@functools", "0  # as IPython makes of %%time\n@functools"),
    (ONE + TWO, TWO + ONE),
]


@pytest.mark.parametrize("old, new", NO_EDITS)
def test_an_edit_that_changes_no_result_is_none(small, old, new):
    source = source_of(f"{DEFAULT[0]}\n{ONE}{TWO}", "twice(minus(act(x)))", BEFORE)
    assert old in source
    assert text_of(small(), source) == text_of(small(), source.replace(old, new))


def test_other_machines_continue_the_program(small, tutorial):
    """Its text has neither names nor addresses, which would differ."""
    parts = {"fsdp": 2, "device_batch_size": 1, "loss_chunks": 4, "scan_layers": True}
    machines = {}, SLICE | parts, {"platform": "gpu", "attention": "cudnn"}
    same = {"compute_dtype": "bfloat16", "batch_size": SLICE["batch_size"]}
    (text,) = {text_of(small(**each | same), tutorial) for each in machines}
    assert not re.search(r"0x[0-9a-f]{6}|lambda|loss_fn|gelu|grad_norm", text)
    assert len(text.splitlines()) > 500


# The launch


@pytest.fixture
def here(monkeypatch):
    """Programs are translated in this process; gives what else was asked of Ray."""

    def remote(runtime_env, **options):
        assert runtime_env == {"env_vars": {"FLAG": "yours", "JAX_PLATFORMS": "cpu"}}
        assert options == {"max_calls": 1, "num_cpus": 0}
        asked.append("a new process")  # JAX remembers what a cell said before
        return lambda function: SimpleNamespace(remote=function)

    tool, asked = SimpleNamespace(remote=remote, get=lambda found: found), []
    monkeypatch.setattr(trainkit.launch, "ray", tool)
    for name in ("check_resources", "release_placement_groups"):
        ask = lambda *_, name=name: asked.append(name)  # noqa: E731
        monkeypatch.setattr(workers, name, ask)
    return asked


FLAG = {"FLAG": "yours", "JAX_PLATFORMS": "tpu"}


class Launch:
    """Launches runs whose step is that of PROGRAM; a run of them ends at once."""

    def __init__(self, config):
        self.config, self.fitted = config, 0

    def __call__(self, old="", new="", **changes) -> None:
        source = source_of(*DEFAULT, BEFORE).replace(old, new)
        trainer = SimpleNamespace(
            train_loop_per_worker=print,
            fit=self.fit,
            run_config=SimpleNamespace(worker_runtime_env={"env_vars": FLAG}),
        )
        config = dataclasses.replace(self.config, **changes)
        trainkit.launch.guard(trainer, config, *functions_in(source)).fit()

    def refuses(self, words: str, old="", new="", **changes) -> None:
        with pytest.raises(ValueError, match=words):
            self(old, new, **changes)

    def fit(self):
        assert lock.read_mark(self.config)
        self.fitted += 1


@pytest.fixture
def launch(small, write_bins, here):
    """A run with the program as it was first launched, and a checkpoint."""
    launch = Launch(write_bins(small()))
    launch()
    (launch.config.run_path / "step_00000002").mkdir()
    return launch


def test_a_run_that_has_saved_nothing_may_change(small, write_bins, here, capsys):
    launch = Launch(write_bins(small()))
    launch()
    launch("0.1 * g", "0.2 * g", learning_rate=1e-2)
    assert launch.fitted == 2 and capsys.readouterr().out == ""


def test_another_program_is_refused(launch, capsys):
    """With the first lines that differ, and three ways out; until it is accepted."""
    launch()
    for old, new in (("random.normal", "random.uniform"), ("0.1 * g", "0.2 * g")):
        with pytest.raises(ValueError) as error:
            launch(old, new)
    message = str(error.value)
    assert "another program:" in message and "changed_program: true" in message
    lines = re.findall(r"^([+-]) .*constant dense<(.*)> : tensor<f32>", message, re.M)
    assert max(map(len, message.splitlines())) < 300
    assert lines == [("-", "1.000000e-01"), ("+", "2.000000e-01")]
    assert launch.fitted == 2 and capsys.readouterr().out == ""
    launch("0.1 * g", "0.2 * g", accept_changed_program=True)
    assert "continues, though its program was another" in capsys.readouterr().out
    launch("0.1 * g", "0.2 * g")  # which is the run's now
    launch.refuses("another program")


def test_a_step_that_cannot_be_traced_is_not_launched(launch):
    """And the error, which is JAX's own, can travel to the driver."""
    with pytest.raises(TypeError) as error:
        launch("jnp.tanh(x)", "(x if x.sum() > 0 else -x)")
    assert type(error.value) is TypeError and launch.fitted == 1


def test_another_recipe_is_refused(launch):
    launch(max_steps=99, num_workers=2, device_batch_size=1)
    launch.refuses("another recipe.*:\nseed was 1337, and is 1", seed=1)
    (launch.config.run_path / "identity.json").unlink()  # then checkpoints tell
    settings = {"custom_metadata": dataclasses.asdict(launch.config)}
    path = launch.config.run_path / "step_00000002" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(settings))
    for key, value in (("batch_size", 8), ("init_from", "gpt2")):
        launch.refuses(f"{key} was .*, and is '?{value}", **{key: value})
    launch()


def test_a_tokenizer_that_was_moved_is_the_same(small, here, tmp_path):
    """And weights in another folder of that name; others are another recipe."""
    builtin = Path(trainkit.__file__).with_name("builtin_tokenizer.json")
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "weights").mkdir(parents=True)
        path = shutil.copy(builtin, folder)
        launch = Launch(small(tokenizer=path, init_from=f"{folder}/weights"))
        launch()
        launch.config.run_path.joinpath("step_00000002").mkdir(exist_ok=True)
    launch.refuses("init_from was 'weights', and is 'scratch'", init_from="scratch")
    byte_pairs(other := tmp_path / "c" / builtin.name, ["another text"])
    launch.refuses("what the tokenizer does was", tokenizer=str(other))


def test_other_tokens_are_refused(launch, write_bins):
    """Of the same length as well."""
    write_bins(launch.config, seed=1)
    launch.refuses("another tokens.*:\ntrain was '2,001 tokens")
    write_bins(launch.config)
    launch()
    token_files.path_of(launch.config, "train").unlink()
    launch()  # `token_files.check` says what is missing


def test_other_windows_are_refused(launch, monkeypatch):
    """Of the first step, of one in the second epoch, and of the last."""
    launch(max_steps=50)  # a longer run is the same run
    launch()
    numbers = token_files.windows_of
    for other in (0, 32, 19):

        def others(config, split, steps, other=other):
            return numbers(config, split, steps)[:, :: -1 if other in steps else 1]

        monkeypatch.setattr(token_files, "windows_of", others)
        launch.refuses(rf"another program:\nstep {other} was .* \.\.\. ")
    monkeypatch.setattr(token_files, "windows_of", numbers)
    launch()


@pytest.mark.parametrize("note", ["another JAX", None, "{", "[]"])
def test_what_cannot_be_compared_is_said_once(launch, monkeypatch, capsys, note):
    """Under another JAX, or without a note of what the run is."""
    path = launch.config.run_path / "identity.json"
    if note == "another JAX":
        monkeypatch.setattr(jax, "__version__", "0.99.0")
    else:
        path.unlink() if note is None else path.write_text(note)
    launch("0.1 * g", "0.2 * g")
    was = "0.1" if note == "another JAX" else "unknown"
    assert f"continues, though JAX was {was}" in capsys.readouterr().out
    launch("0.1 * g", "0.2 * g")
    assert capsys.readouterr().out == ""
    launch.refuses("another program")


def test_what_is_not_the_program_is_said(launch, here, capsys):
    """Another evaluation, of other windows or by another function; and a finished run."""
    assert here == ["check_resources", "a new process", "release_placement_groups"]
    for edit, changes, words in (
        ((), {"max_steps": 3, "loss_chunks": 4}, ""),
        ((), {"max_steps": 2}, "max_steps: step_00000002 is there already"),
        ((), {"eval_steps": 3}, "continues, though eval_steps was 2, and is 3"),
        (("return loss", "return -loss"), {}, "continues, though eval_step was"),
    ):
        launch(*edit, **changes)
        said = capsys.readouterr().out
        assert words in said and bool(words) == bool(said)


def test_a_run_that_diverges_ends_its_launch_with_an_error(launch):
    """Or a job would end well; nor does it start again, until a person deletes the note."""
    config, lines = launch.config, {1: {"loss": 3.0, "grad_norm": math.nan}}
    fit, launch.fit = launch.fit, lambda: run_log.has_diverged(config, lines)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="at step 1.*nan.*step_.*delete"):
            launch()
        launch.fit = pytest.fail
    (config.run_path / "diverged.txt").unlink()
    launch.fit = fit
    launch()


def test_a_refused_launch_leaves_the_run_alone(launch):
    """A launch deletes Ray's record, which may name what isn't there; a refused one doesn't.

    And the one that trains has its mark and its note as before.
    """
    record = launch.config.run_path / checkpoints.RECORD
    record.write_text("")
    launch.refuses("another program", "0.1 * g", "0.2 * g")
    with lock.hold(launch.config):
        files = [*launch.config.run_path.iterdir()]
        before = [path.stat().mtime for path in files]
        with pytest.raises(RuntimeError, match="another launch trains"):
            launch()
        assert [path.stat().mtime for path in files] == before and record in files
    launch()
    assert not record.exists()


# The workers


OTHERS = [({"seed": 1}, "train"), ({"val_tokens": 400}, "val"), (None, "train")]


@pytest.mark.parametrize("other, split", OTHERS)
def test_a_node_with_other_tokens_is_refused(small, write_bins, tmp_path, other, split):
    """With both values, and its name; unless the run streams its text.

    Nor does a worker start whose launch has ended.
    """
    config, ran = write_bins(small()), []
    there = dataclasses.replace(config, data_dir=str(tmp_path / "there"))
    if other:
        write_bins(there, **other)
    tokens, found = token_files.digest(config), token_files.digest(there)
    words = f"{split} was {tokens[split]!r}, and is {found.get(split, 'nothing')!r}"
    words = f"^data_dir: on {os.uname().nodename}, .*{re.escape(words)}"
    with lock.hold(config) as mark:
        loop = trainkit.launch.guarded(ran.append, mark, tokens)
        loop(dataclasses.asdict(config))
        with pytest.raises(ValueError, match=words):
            loop(dataclasses.asdict(there))
        streaming = trainkit.launch.guarded(ran.append, mark, {})
        streaming(dataclasses.asdict(there))
    with pytest.raises(RuntimeError, match="belongs to no launch"):
        loop(dataclasses.asdict(config))
    assert ran == [dataclasses.asdict(each) for each in (config, there)]


def test_a_device_without_memory_gets_advice(small):
    """Of 64 TiB, for which XLA raises here what it raises on a GPU."""
    config, refuse = small(), Mock(side_effect=jax.errors.JaxRuntimeError("?"))

    def allocate(settings):
        jax.numpy.zeros(2**44).block_until_ready()

    for loop in (allocate, refuse):
        with lock.hold(config) as mark, pytest.raises(jax.errors.JaxRuntimeError) as e:
            trainkit.launch.guarded(loop, mark, {})(dataclasses.asdict(config))
        notes = getattr(e.value, "__notes__", [])
        assert (trainkit.launch.MEMORY in notes) == (loop is allocate)

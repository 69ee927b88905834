"""Whether a run may go on: what counts as another program, and what becomes of one."""

import base64
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
import ray
import ray.train
from accidents import at_step, in_the_background, log_of, wait_for

import trainkit.checkpoints
import trainkit.launch
import trainkit.layers
import trainkit.lock
import trainkit.run_log
import trainkit.token_files

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import contextlib, dataclasses, functools, os, random, sys
from typing import NamedTuple
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
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
ACT = "def act(x):\n    return jnp.tanh(x)\n"
TANH = ("jnp.tanh", "jnp.sin")
KINDS = {  # definitions, an expression of x, and an edit
    "a registry": (ACT + "KINDS = {'mine': act}", "KINDS['mine'](x)", TANH),
    "a global": ("act = jnp.tanh", "act(x)", TANH),
    "a lambda": ("act = lambda x: jnp.tanh(x)", "act(x)", TANH),
    "a list": ("acts = [jnp.abs, jnp.tanh]", "acts[1](x)", TANH),
    "an array": ("SCALES = np.arange(3.0)", "x * SCALES", ("3.0", "3.0)[::-1] + (0")),
    "an array of JAX": ("SCALES = jnp.arange(3)", "x * SCALES", ("(3)", "(1, 4)")),
    "a partial's argument": (
        "act = functools.partial(jnp.clip, max=2.0)",
        "act(x)",
        ("2.0", "2.5"),
    ),
    "an instance": (
        "class Act:\n    def __init__(self, f):\n        self.f = f\nact = Act(jnp.tanh)",
        "act.f(x)",
        TANH,
    ),
    "a schedule": (
        "rate = optax.cosine_decay_schedule(1e-3, 100)",
        "rate(3) * x",
        ("100", "200"),
    ),
    "a class attribute": ("class Acts:\n    act = jnp.tanh", "Acts.act(x)", TANH),
    "a named tuple": (
        "class Sizes(NamedTuple):\n    scale: float = 2.0\nSIZES = Sizes()",
        "SIZES.scale * x",
        ("2.0", "2.5"),
    ),
    # Further kinds, which no one reported.
    "a default argument": (
        "def act(x, y=2.0):\n    return x * y",
        "act(x)",
        ("2.", "3."),
    ),
    "a closure": (
        "def make(y):\n    return lambda x: x * y\nact = make(2.0)",
        "act(x)",
        ("make(2.0)", "make(3.0)"),
    ),
    "a base class": (
        "class Base:\n    def act(self, x):\n        return jnp.tanh(x)\n"
        "class Derived(Base):\n    pass",
        "Derived().act(x)",
        TANH,
    ),
    "a property": (
        "class Act:\n    @property\n    def f(self):\n        return jnp.tanh",
        "Act().f(x)",
        TANH,
    ),
    "a decorator": (
        "def twice(f):\n    return lambda x: f(2 * x)\n@twice\n" + ACT,
        "act(x)",
        ("2 *", "3 *"),
    ),
    "a loop's body": (
        "def act(x):\n    return jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y), x)",
        "act(x)",
        TANH,
    ),
    "a branch": (
        "def act(x):\n    return jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.abs, x)",
        "act(x)",
        TANH,
    ),
    "a gradient of its own": (
        "@jax.custom_vjp\ndef act(x):\n    return x\n"
        "act.defvjp(lambda x: (x, None), lambda _, g: (2.0 * g,))",
        "act(x)",
        ("2.0", "3.0"),
    ),
    "a key": (
        "KEY = jax.random.key(7)\n@jax.jit\ndef act(x):\n"
        "    return x + jax.random.normal(KEY, x.shape)",
        "act(x)",
        ("7", "8"),
    ),
    "a constant in a scan in a jit": (
        "TABLE = np.ones((3, 3))\n@jax.jit\ndef act(x):\n"
        "    return jax.lax.scan(lambda y, _: (y @ TABLE, None), x, None, 2)[0]",
        "act(x)",
        ("ones((3, 3))", "eye(3)"),
    ),
    "how it draws": (
        "def act(x):\n    with jax.threefry_partitionable(True):\n"
        "        return x * jax.random.uniform(jax.random.key(0), x.shape)",
        "act(x)",
        ("True", "False"),
    ),
    "a precision": (
        "def act(x):\n    with jax.default_matmul_precision('default'):\n"
        "        return x @ jnp.ones((3, 3))",
        "act(x)",
        ("'default'", "'highest'"),
    ),
    "a variable of the environment": (
        "os.environ['TEST_SCALE'] = '2'",
        "x * float(os.environ['TEST_SCALE'])",
        ("'2'", "'3'"),
    ),
    "a default of an attribute": (
        "@dataclasses.dataclass\nclass Sizes:\n    scale: float = 2.0",
        "Sizes().scale * x",
        ("2.0", "2.5"),
    ),
}


def program_of(source: str, config, name: str = "program") -> str:
    """The text of a program in a module of its own, as after a cell that was run again."""
    module = types.ModuleType(name)
    exec(source, vars(module))
    functions = (
        getattr(module, n) for n in ("create_state", "train_step", "eval_step")
    )
    return unpacked(trainkit.launch.trace(config, *functions))


def unpacked(traced: dict) -> str:
    return zlib.decompress(base64.b85decode(traced["program"])).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_that_changes_the_program_is_seen(small, kind):
    definitions, expression, (old, new) = KINDS[kind]
    source = PROGRAM.format(definitions=definitions, expression=expression)
    assert source.count(old) == 1
    before, same = (program_of(source, small()) for _ in range(2))
    assert before == same
    assert program_of(source.replace(old, new), small()) != before


SAME = {
    "a comment": ("return jnp.tanh(x)", "return jnp.tanh(x)  # bounded"),
    "a docstring": ("def act(x):\n", 'def act(x):\n    """Bounded."""\n'),
    "a name": ("act", "activation"),
    "a variable": ("grads", "slopes"),
    "formatting": ("0.1 * g", "(0.1\n        * g)"),
    "a cell's magic": ("@functools", "0  # as IPython makes of %%time\n@functools"),
    "a function that isn't called": ("class State", "def f(): pass\nclass State"),
    "an added jit": ("def loss", "@jax.jit\ndef loss"),
    "no jit": ("@functools.partial(jax", "#(jax"),
}
FIRST = "def one(x):\n    return jnp.tanh(x)\n"
SECOND = "def two(x):\n    return jnp.sin(x)\n"


@pytest.mark.parametrize("kind", SAME)
def test_an_edit_that_changes_no_result_is_none(small, kind):
    source = PROGRAM.format(definitions=ACT, expression="act(x)")
    old, new = SAME[kind]
    assert program_of(source.replace(old, new), small()) == program_of(source, small())


def test_the_order_of_definitions_is_no_change(small):
    sources = [
        PROGRAM.format(definitions=text, expression="one(x) + jax.jit(two)(x)")
        for text in (FIRST + SECOND, SECOND + FIRST)
    ]
    one, other = (program_of(source, small()) for source in sources)
    assert one == other


def test_an_edit_of_another_module_is_seen(small, monkeypatch):
    source = PROGRAM.format(definitions="import acts", expression="acts.act(x)")
    found = []
    for function in (jax.numpy.tanh, jax.numpy.sin):
        monkeypatch.setitem(sys.modules, "acts", SimpleNamespace(act=function))
        found.append(program_of(source, small()))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "flag, value",
    [
        ("jax_threefry_partitionable", False),
        ("jax_default_prng_impl", "rbg"),
        ("jax_default_matmul_precision", "highest"),
        ("jax_enable_x64", True),
    ],
)
def test_a_flag_that_changes_draws_or_types_is_seen(small, flag, value):
    source = PROGRAM.format(definitions="", expression="x")
    before, kept = program_of(source, small()), getattr(jax.config, flag)
    jax.config.update(flag, value)
    try:
        assert program_of(source, small()) != before
    finally:
        jax.config.update(flag, kept)


def test_the_text_has_neither_names_nor_addresses(small, tutorial):
    functions = tutorial.create_state, tutorial.train_step, tutorial.eval_step
    text = unpacked(trainkit.launch.trace(small(dropout=0.1), *functions))
    assert not re.search(r"0x[0-9a-f]{6}|<function|lambda|loss_fn|gelu", text)
    assert len(text.splitlines()) > 500


OTHER_MACHINES = [
    {"num_workers": 2, "devices_per_worker": 2, "fsdp": 2},
    {"device_batch_size": 1},
    {"loss_chunks": 4, "scan_layers": True},
    {"platform": "tpu", "topology": "2x2", "accelerator_type": "TPU-V6E"}
    | {"devices_per_worker": 4, "num_workers": 1},
    {
        "platform": "gpu",
        "compute_dtype": "bfloat16",
        "attention": "cudnn",
        "n_embd": 32,
    },
]


@pytest.mark.parametrize("changes", OTHER_MACHINES)
def test_other_machines_continue_the_program(small, tutorial, changes):
    functions = tutorial.create_state, tutorial.train_step, tutorial.eval_step
    recipe = {k: v for k, v in changes.items() if k in ("compute_dtype", "n_embd")}
    texts = [
        unpacked(trainkit.launch.trace(small(**x), *functions))
        for x in (recipe, changes)
    ]
    assert texts[0] == texts[1]


# The launch


@pytest.fixture
def here(monkeypatch):
    """Programs are traced in this process."""

    def remote(**options):
        assert options["max_calls"] == 1 and options["num_cpus"] == 0
        return lambda function: SimpleNamespace(remote=function)

    tool = SimpleNamespace(remote=remote, get=lambda found: found)
    monkeypatch.setattr(trainkit.launch, "ray", tool)
    monkeypatch.setattr(trainkit.workers, "release_placement_groups", lambda: None)
    monkeypatch.setattr(trainkit.workers, "check_resources", lambda config: None)


class Launch:
    """Launches runs whose step is that of PROGRAM; a run of them ends at once."""

    def __init__(self, config):
        self.config, self.fitted = config, 0

    def __call__(self, old="", new="", config=None, module=None) -> None:
        if not module:
            source = PROGRAM.format(definitions=ACT, expression="act(x)")
            module = types.ModuleType("program")
            exec(source.replace(old, new), vars(module))
        run_config = SimpleNamespace(worker_runtime_env={})
        trainer = SimpleNamespace(
            train_loop_per_worker=print, fit=self.fit, run_config=run_config
        )
        names = ("create_state", "train_step", "eval_step")
        functions = (getattr(module, name) for name in names)
        config = config or self.config
        trainkit.launch.guard(trainer, config, *functions).fit()

    def fit(self):
        assert trainkit.lock.read_mark(self.config)
        self.fitted += 1

    def begin(self, step: int = 2) -> None:
        (self.config.run_path / f"step_{step:08d}").mkdir(parents=True)

    def record(self) -> dict:
        return json.loads((self.config.run_path / "identity.json").read_text())


@pytest.fixture
def launch(small, write_bins, here):
    """A run with the program as it was first launched, and a checkpoint."""
    launch = Launch(write_bins(small()))
    launch()
    launch.begin()
    return launch


def test_another_program_is_refused(launch, capsys):
    """With the first lines that differ, and three ways out; until it is accepted."""
    launch()
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            launch("0.1 * g", "0.2 * g")
    message = str(error.value)
    assert (
        f"run_name: {launch.config.run_path} holds a run with another program"
        in message
    )
    lines = re.findall(r"^([+-])%\d+ float32\[521,3\] = mul .*:0\.(\d)", message, re.M)
    assert lines == [("-", "1"), ("+", "2")]
    for words in (
        "another run_name",
        "undo the change",
        "accept_changed_program: true",
    ):
        assert words in message
    assert launch.fitted == 2 and capsys.readouterr().out == ""
    accepting = dataclasses.replace(launch.config, accept_changed_program=True)
    launch("0.1 * g", "0.2 * g", config=accepting)
    assert "continues with another program" in capsys.readouterr().out
    assert launch.record()["accepted"] == ["step_00000002"]
    launch("0.1 * g", "0.2 * g")  # which is the run's now
    assert launch.record()["accepted"] == ["step_00000002"]
    with pytest.raises(ValueError, match="another program"):
        launch()


def test_a_run_that_has_trained_nothing_may_change(small, here, capsys):
    launch = Launch(small())
    launch()
    launch("0.1 * g", "0.2 * g")
    assert launch.fitted == 2 and capsys.readouterr().out == ""


def test_of_a_long_difference_twelve_lines_are_shown(launch):
    with pytest.raises(ValueError) as error:
        launch("jnp.tanh(x)", "jnp.sort(jnp.cos(jnp.exp(jnp.sin(x)))) ** 3 + x.min()")
    assert len(str(error.value).splitlines()) == 1 + 12 + 1


def test_a_step_that_cannot_be_traced_is_not_launched(launch):
    with pytest.raises(AttributeError):
        launch("jnp.tanh(x)", "jnp.tanh(x).missing()")
    assert launch.fitted == 1
    launch()


def test_another_recipe_is_refused(launch, small, tmp_path):
    longer = small(max_steps=99, num_workers=2, device_batch_size=1)
    launch(config=longer)
    with pytest.raises(ValueError, match="another recipe:\nseed was 1337, and is 1"):
        launch(config=small(seed=1))
    (launch.config.run_path / "identity.json").unlink()  # then checkpoints tell
    settings = {"custom_metadata": dataclasses.asdict(launch.config)}
    path = launch.config.run_path / "step_00000002" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="batch_size was 4, and is 8"):
        launch(config=small(batch_size=8))


def test_other_tokens_are_refused(launch, write_bins):
    """Of the same length as well."""
    write_bins(launch.config, seed=1)
    with pytest.raises(
        ValueError, match="other tokens:\ntrain was '2,001 tokens, (.|\\n)*back"
    ):
        launch()
    write_bins(launch.config)
    launch()
    trainkit.token_files.path_of(launch.config, "train").unlink()
    launch()  # `token_files.check` says what is missing
    with pytest.raises(ValueError, match="other tokens"):
        launch(config=write_bins(launch.config, seed=1))


def shuffled_from_behind(numbers, steps):
    return numbers[:, ::-1]


def another_second_epoch(numbers, steps):
    return numbers * (steps.start < 31)


def another_end(numbers, steps):
    return numbers + (steps.start == 19)


def read_by(windows):
    """Patch which windows a run reads."""
    numbers = trainkit.token_files.windows_of

    def others(config, split, steps):
        return windows(numbers(config, split, steps), steps)

    return mock.patch.object(trainkit.token_files, "windows_of", others)


@pytest.mark.parametrize(
    "windows", [shuffled_from_behind, another_second_epoch, another_end]
)
def test_other_windows_are_refused(launch, windows):
    with read_by(windows):
        with pytest.raises(
            ValueError, match="another program:\n\\d+ was '.* ... int64"
        ):
            launch()
    launch()


def test_a_longer_run_is_the_same_run(launch, small):
    """Whose last step is another, and was noted for the shorter one."""
    launch(config=small(max_steps=50))
    assert {"0", "19", "49"} <= launch.record()["windows"].keys()
    with pytest.raises(ValueError, match="another program:\n19 was"):
        with read_by(another_end):
            launch(config=small(max_steps=50))


def test_another_jax_is_said_once(launch, monkeypatch, capsys):
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    launch("0.1 * g", "0.2 * g")
    assert (
        "JAX 0.99.0: its program can't be compared with JAX 0.1"
        in capsys.readouterr().out
    )
    launch("0.1 * g", "0.2 * g")
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="another program"):
        launch()


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_run_without_a_note_goes_on(launch, capsys, text):
    path = launch.config.run_path / "identity.json"
    path.unlink() if text is None else path.write_text(text)
    launch("0.1 * g", "0.2 * g")
    assert "can't be compared" in capsys.readouterr().out
    launch("0.1 * g", "0.2 * g")
    assert capsys.readouterr().out == ""


def test_what_is_not_the_program_is_said(launch, small, capsys):
    launch("return loss(", "return 2 * loss(")
    said = capsys.readouterr().out
    assert "continues with another eval_step" in said and "configured" not in said


def test_the_program_as_configured_is_said(small, tutorial, here, capsys):
    """Here, that the loss comes in other parts; as it would be of an edit of the parts."""
    launch = Launch(small(loss_chunks=4))
    launch(module=tutorial)
    launch.begin()
    launch(module=tutorial)
    assert capsys.readouterr().out == ""
    launch(module=tutorial, config=small(loss_chunks=2))
    said = capsys.readouterr().out
    assert "another program as configured" in said and "eval_step" not in said


@pytest.mark.parametrize("max_steps, done", [(1, True), (2, True), (3, False)])
def test_a_finished_run_says_so(launch, small, capsys, max_steps, done):
    launch(config=small(max_steps=max_steps))
    said = capsys.readouterr().out
    assert ("has done 2 steps" in said and "max_steps higher" in said) == done


def test_a_diverged_run_is_not_started_again(launch):
    """Until a person says so, by deleting the note."""
    nan = {1: {"loss": 3.0, "grad_norm": 1.0}, 2: {"loss": 3.0, "grad_norm": math.nan}}
    assert trainkit.run_log.has_diverged(launch.config, nan)
    with pytest.raises(FloatingPointError, match="at step 2.*nan.*step_.*delete"):
        launch()
    (launch.config.run_path / "diverged.txt").unlink()
    launch()


@pytest.mark.parametrize("text", ["", "{", '{"checkpoint_results": [{"'])
def test_a_launch_deletes_rays_record(launch, text):
    """Ray would refuse one that is empty, cut off, or names what isn't there."""
    record = launch.config.run_path / trainkit.checkpoints.RECORD
    record.write_text(text)
    begun = record.with_name("step_00000007.orbax-checkpoint-tmp")
    (begun / "d").mkdir(parents=True)  # of a save that was cut off
    with pytest.raises(ValueError):
        launch("0.1 * g", "0.2 * g")
    assert record.exists() and begun.exists()
    launch()
    assert not record.exists() and not begun.exists()


def test_a_refused_launch_leaves_the_run_alone(launch):
    """The one that trains has its mark, its record, and its note as before."""
    with trainkit.lock.hold(launch.config) as mark:
        before = {p.name: p.stat().mtime for p in launch.config.run_path.iterdir()}
        with pytest.raises(RuntimeError, match="another launch trains"):
            launch()
        assert trainkit.lock.read_mark(launch.config) == mark
        after = {p.name: p.stat().mtime for p in launch.config.run_path.iterdir()}
    assert before == after


# The workers


@pytest.fixture
def worker(monkeypatch):
    """This process as a worker."""
    monkeypatch.setattr(trainkit.lock, "joined", {})


@pytest.mark.parametrize("kind", ["another seed", "shorter", "validation", "nothing"])
def test_a_node_with_other_tokens_is_refused(small, write_bins, worker, tmp_path, kind):
    """With both values, and its name; unless the run streams its text."""
    config = write_bins(small())
    there = dataclasses.replace(config, data_dir=str(tmp_path / "there"))
    if kind != "nothing":
        write_bins(
            there,
            train_tokens=2_001 - (kind == "shorter"),
            val_tokens=401 + (kind == "validation"),
            seed=int(kind == "another seed"),
        )
    ran, tokens = [], trainkit.token_files.digest(config)
    with trainkit.lock.hold(config) as mark:
        loop = trainkit.launch.guarded(ran.append, mark, tokens)
        loop(dataclasses.asdict(config))
        with pytest.raises(ValueError) as error:
            loop(dataclasses.asdict(there))
        assert len(ran) == 1
        streaming = trainkit.launch.guarded(ran.append, mark, {})
        streaming(dataclasses.asdict(there))
    found = trainkit.token_files.digest(there)
    split = "val" if kind == "validation" else "train"
    words = f"{split} was {tokens[split]!r}, and is {found.get(split, 'nothing')!r}"
    message = str(error.value)
    assert words in message and os.uname().nodename in message
    assert message.startswith("data_dir: ")


def test_a_worker_of_another_launch_does_not_start(small, worker):
    config, ran = small(), []
    with trainkit.lock.hold(config) as mark:
        pass
    with pytest.raises(RuntimeError, match="belongs to no launch"):
        trainkit.launch.guarded(ran.append, mark, {})(dataclasses.asdict(config))
    assert not ran


def test_a_device_without_memory_gets_advice_and_other_errors_pass(
    small, worker, capsys
):
    def loop(settings):
        raise jax.errors.JaxRuntimeError(said)

    config = small()
    with trainkit.lock.hold(config) as mark:
        guarded = trainkit.launch.guarded(loop, mark, {})
        said = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"
        keys = "device_batch_size.*loss_chunks.*fsdp.*scan_layers.*docs/guide.md"
        with pytest.raises(MemoryError, match=f"too little memory.*{keys}"):
            guarded(dataclasses.asdict(config))
        assert "too little memory" in capsys.readouterr().out
        said = "INTERNAL: another process died"
        with pytest.raises(jax.errors.JaxRuntimeError, match="another process died"):
            guarded(dataclasses.asdict(config))
    assert guarded.__name__ == "loop"


# With Ray


def programs_of(tutorial) -> tuple:
    names = ("create_state", "train_step", "eval_step")
    return tuple(getattr(tutorial, name) for name in names)


def test_a_process_of_its_own_traces_what_the_cells_say_now(
    tutorial, cluster, small, monkeypatch
):
    """Only `loss_fn` is another, as after its cell was run again; and flags come, too."""
    config = small()

    def program(**variables) -> str:
        given = config, programs_of(tutorial), variables
        return trainkit.launch.describe(*given)["program"]

    before = program()
    assert program() == before
    loss_fn = tutorial.loss_fn
    monkeypatch.setattr(tutorial, "loss_fn", lambda *given: 2 * loss_fn(*given))
    assert program() != before
    monkeypatch.setattr(tutorial, "loss_fn", lambda *given: loss_fn(*given))
    assert program() == before
    assert program(JAX_DEFAULT_MATMUL_PRECISION="highest") != before


def test_another_program_ends_the_launch_at_once(
    tutorial, cluster, small, write_bins, monkeypatch
):
    """In the driver, before a worker starts, though the run may fail without end."""
    config = write_bins(small(max_steps=2, eval_interval=2, max_failures=-1))
    assert tutorial.make_trainer(config).fit().error is None
    assert tutorial.make_trainer(config).fit().metrics["step"] == 2  # a cell run again
    schedule = tutorial.learning_rate_schedule
    later = lambda config: lambda step: schedule(config)(step + 1)  # noqa: E731
    monkeypatch.setattr(tutorial, "learning_rate_schedule", later)
    start, log = time.monotonic(), log_of(config)
    with pytest.raises(ValueError, match="holds a run with another program:\n---"):
        tutorial.make_trainer(config).fit()
    assert time.monotonic() - start < 60 and log_of(config) == log


OTHER_DRIVER = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/ci"]
import ray
from notebook_module import load_notebook
ray.init(sys.argv[2], log_to_driver=False)
tutorial = load_notebook()
tutorial.make_trainer(tutorial.TrainingConfig(**json.loads(sys.argv[3]))).fit()
"""


def waiting_loop(tutorial, config, step: int):
    """The notebook's loop, which waits at a step until there is a file `go`."""
    train_loop, may_go_on = tutorial.train_loop_per_worker, config.run_path / "go"

    def loop(settings):
        add = trainkit.run_log.RunLog.add

        def wait_at_step(self, n, metrics):
            while n == step and not may_go_on.exists():
                time.sleep(0.1)
            add(self, n, metrics)

        trainkit.run_log.RunLog.add = wait_at_step
        try:
            train_loop(settings)
        finally:
            trainkit.run_log.RunLog.add = add

    return loop


@pytest.mark.slow
def test_second_launch_is_refused_and_the_first_undisturbed(
    tutorial, cluster, small, write_bins
):
    config = write_bins(small(max_steps=8, log_interval=1))
    settings = json.dumps(vars(config))
    address = ray.get_runtime_context().gcs_address
    trainer = tutorial.make_trainer(config, waiting_loop(tutorial, config, 5))
    with in_the_background(trainer.fit) as result:
        wait_for(lambda: at_step(4)(config), what="step 4")
        second = subprocess.run(
            [sys.executable, "-c", OTHER_DRIVER, ROOT, address, settings],
            capture_output=True,
            text=True,
            timeout=120,
        )
        (config.run_path / "go").touch()
        assert result().error is None
    words = f"{config.run_path}: process {os.getpid()} on"
    assert second.returncode and words in second.stderr.splitlines()[-1]
    assert [line["step"] for line in log_of(config)] == list(range(1, 9))


@pytest.mark.slow
def test_a_launch_whose_run_was_taken_ends_before_it_saves(
    tutorial, cluster, small, write_bins
):
    """As where storage has no locks: its workers find the other's mark, and save nothing."""
    config = write_bins(small(max_steps=8, eval_interval=6, max_failures=1))
    trainer = tutorial.make_trainer(config, waiting_loop(tutorial, config, 5))
    other = "process 7 on far, since then (0123)"
    with in_the_background(trainer.fit) as result:
        wait_for(lambda: at_step(4)(config), what="step 4")
        (config.run_path / "launch.txt").write_text(other)
        (config.run_path / "go").touch()
        with pytest.raises(ray.train.TrainingFailedError, match="belongs to process 7"):
            result()
    assert not trainkit.checkpoints.list_folders(config)
    assert trainkit.lock.read_mark(config) == other


def test_worker_that_runs_out_of_memory_says_what_helps(tutorial, cluster, small):
    """Memory that no machine has; XLA raises what it raises on a GPU."""

    def loop(settings):
        jax.block_until_ready(jax.numpy.zeros(2**44))

    config = small(max_failures=0)
    with pytest.raises(ray.train.TrainingFailedError) as error:
        tutorial.make_trainer(config, loop).fit()
    for words in ("Out of memory allocating", "too little memory", "device_batch_size"):
        assert words in str(error.value)

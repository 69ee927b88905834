"""What is refused or said before workers start, and what they start with."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ray.train import ScalingConfig

import trainkit.launch
import trainkit.run_lock
import trainkit.workers
from trainkit import tokenization

NODE = {"use_gpu": True, "resources_per_worker": {"GPU": 8}}
GPUS = {"num_workers": 2, "use_gpu": True}
SLICE = {"use_tpu": True, "topology": "4x4", "accelerator_type": "TPU-V6E"}


@pytest.mark.parametrize(
    "platform, options", [("cpu", {}), ("cuda", {"use_gpu": True}), ("tpu", SLICE)]
)
def test_environment_of_a_worker(small, tmp_path, monkeypatch, platform, options):
    """JAX reads it when it is imported, so it must be there before. Your own stays."""
    config, scaling = small(), ScalingConfig(num_workers=4, **options)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    found = trainkit.launch.environment(config, scaling)
    assert found["JAX_PLATFORMS"] == platform
    assert found["XLA_FLAGS"].split()[-1] == "--mine"  # which wins
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"
    assert found["JAX_ENABLE_COMPILATION_CACHE"] == str(platform != "cpu")
    assert found["grpc_proxy"] == ""
    for name, value in (
        ("JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY", "true"),
        ("JAX_THREEFRY_GPU_KERNEL_LOWERING", "true"),
        ("JAX_OPTIMIZATION_LEVEL", "O1"),
    ):
        assert found.get(name) == (value if platform == "cuda" else None)
    assert found.pop("JAX_PLATFORM_NAME") == ""  # the driver's could say another one
    options = {name.lower() for name in found if name.startswith("JAX_")}
    assert {name for name in options if not hasattr(jax.config, name)} == set()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    found = trainkit.launch.environment(config, scaling)
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "data-jax-cache")
    for changes, kept in (
        ({}, False),
        ({"fsdp": 2}, True),
        ({"fsdp": 2, "scan_layers": True}, False),
    ):
        flags = trainkit.launch.environment(small(**changes), scaling)["XLA_FLAGS"]
        assert ("NO_UNROLL" in flags) == (kept and platform == "cuda")


EVAL = "eval_windows: 6 can't be shared by 4 devices: expected a multiple of 4"


@pytest.mark.parametrize(
    "options, changes, words",
    [
        ({"num_workers": (2, 4)}, {}, "batch_size: 4 .* 3 devices: .* 3$"),
        ({"num_workers": (1, 4)}, {"eval_windows": 6, "batch_size": 12}, EVAL),
        ({"num_workers": 2, "use_gpu": True}, {"fsdp": 4}, "2 devices: .*fsdp .* .4"),
        ({"num_workers": 2, **NODE}, {}, "4 can.t be shared by 16 devices"),  # its GPUs
        (
            {"num_workers": 4, **SLICE},
            {},
            "4 can.t be shared by 16 devices",
        ),  # its chips
        ({"num_workers": 8, **SLICE}, {"fsdp": 32}, "is 32: .*the 16 chips of a slice"),
        ({"num_workers": (4, 8), **SLICE}, {"fsdp": 3}, "is 3: .*16 chips"),
        ({"num_workers": 0}, {}, "num_workers: expected 1 or more, found 0"),
    ],
)
def test_a_batch_that_workers_cant_share_is_refused(small, options, changes, words):
    """In the driver; of an elastic run, for each number."""
    scaling = ScalingConfig(**options)
    with pytest.raises(ValueError, match=words):
        trainkit.launch.check(small(**changes), scaling, *[None] * 3)


def test_an_elastic_run_grows_by_whole_slices():
    """Numbers of workers between them needn't divide the batch."""
    scaling = ScalingConfig(num_workers=(8, 16), **SLICE)
    assert trainkit.launch._numbers_of_devices(scaling) == [32, 48, 64]


@pytest.mark.parametrize(
    "options, most",
    [
        ({"num_workers": 6, "use_gpu": True}, 6),
        ({"num_workers": (4, 6), "use_gpu": True}, 1),
        ({"num_workers": 8, **SLICE}, 16),
        ({"num_workers": (4, 16), **SLICE}, 16),
    ],
)
def test_a_state_is_sharded_within_a_slice(options, most):
    """Over as many devices as all sizes of an elastic run share."""
    assert trainkit.launch.most_shards(ScalingConfig(**options)) == most


FAILS = [  # on the workers, otherwise
    (
        {"vocab_size": 640, "fsdp": 2, "n_embd": 33, "n_head": 3},
        "model.h.0.attn.c_proj.kernel of shape .33",
    ),
    ({"n_embd": 33}, "cannot reshape array"),
    ({"loss_chunks": 3}, "equal division"),
    ({"n_head": 1, "tensor_parallel": 2}, "axis sizes that are not even"),
    ({"attention": "splash"}, "attention: splash needs use_tpu in scaling"),
    ({"attention": "cudnn", "scaling": GPUS}, "attention: cudnn computes in bfloat16"),
]


@pytest.mark.parametrize("changes, words", FAILS)
def test_what_would_fail_on_the_workers_fails_before(
    tutorial, small, write_bins, cluster, changes, words
):
    """On the mesh that they will have, with the name of the array."""
    config = write_bins(small(**changes))
    with pytest.raises(Exception, match=words):
        tutorial.make_trainer(config, tutorial.train_loop_per_worker)


def test_kernels_that_the_driver_lacks_are_no_mistake(
    tutorial, small, write_bins, cluster
):
    """It has no GPU. What they can't take is one."""
    gpus = {"attention": "cudnn", "compute_dtype": "bfloat16", "scaling": GPUS}
    tutorial.make_trainer(write_bins(small(**gpus)), tutorial.train_loop_per_worker)
    parts = tutorial.create_state, tutorial.abstract_state, tutorial.loss_fn
    with pytest.raises(ValueError, match="splash takes 512 .* and block_size, 16"):
        trainkit.dry_run.check_sharding(small(attention="splash"), 1, *parts)


def holder() -> nnx.Module:
    module = nnx.Module()
    module.table = jnp.ones(3)
    return module


@pytest.mark.parametrize(
    "own, message",
    [
        (lambda model: nnx.Dropout(0.1, rngs=nnx.Rngs(0)), r"own\.rngs\.count is Rng"),
        (lambda model: jnp.ones(3), "own is an array and no nnx.Param"),
        (lambda model: np.ones(3), "own is an array and no nnx.Param"),
        (
            lambda model: nnx.Dict(a=nnx.List([holder()])),
            r"own\.a\.0\.table is an array",
        ),
        (lambda model: model.embedding, "own is Param .* also embedding"),
        (lambda model: nnx.Param(jnp.ones(3, "bfloat16")), "own is .* bfloat16"),
    ],
)
def test_what_a_step_would_not_train_right_is_refused(own, message):
    model = nnx.Embed(4, 3, rngs=nnx.Rngs(0))
    model.own = own(model)
    with pytest.raises(ValueError, match=f"create_model: {message}.*expected"):
        trainkit.dry_run.check_parameters(model)


def test_a_table_that_is_no_parameter_is_named_before_workers_start(
    tutorial, small, write_bins, cluster, monkeypatch
):
    """Where the model is traced, Flax takes it for a part of the program."""
    create_model = tutorial.create_model

    def with_table(config):
        model = create_model(config)
        model.h[1].attn.table = jnp.arange(3.0)
        return model

    monkeypatch.setattr(tutorial, "create_model", with_table)
    with pytest.raises(ValueError, match="create_model: h.1.attn.table is an array"):
        tutorial.make_trainer(write_bins(small()), tutorial.train_loop_per_worker)


def test_a_key_that_an_edit_no_longer_reads_is_refused(
    tutorial, small, write_bins, cluster, monkeypatch
):
    config = write_bins(small(model={"alpha": 1}))
    create_model = tutorial.create_model
    launch = partial(tutorial.make_trainer, config, tutorial.train_loop_per_worker)
    reads = lambda c: create_model(c) if c.model["alpha"] else None  # noqa: E731
    monkeypatch.setattr(tutorial, "create_model", reads)
    for _ in range(2):
        launch()
    monkeypatch.setattr(tutorial, "create_model", create_model)
    with pytest.raises(ValueError, match="nor its loss has read alpha"):
        launch()


def test_numbers_that_a_checkpoint_would_keep_are_refused(tutorial, small, monkeypatch):
    """A branch would go on with them."""
    given = tutorial.create_state, tutorial.abstract_state, tutorial.loss_fn
    rate = optax.inject_hyperparams(lambda learning_rate: optax.sgd(learning_rate))
    scheduled = rate(lambda count: 0.1)
    adamw = optax.inject_hyperparams(optax.adamw)
    for optimizer, kept in (
        (
            adamw(lambda count: 0.1, weight_decay=0.1),
            "b1, b2, eps, eps_root, weight_decay",
        ),
        (optax.inject_hyperparams(optax.sgd)(0.1), "learning_rate"),
    ):
        clipped = optax.chain(scheduled, optimizer)
        monkeypatch.setattr(tutorial, "create_optimizer", lambda c, o=clipped: o)
        with pytest.raises(ValueError, match=f"inject_hyperparams keeps {kept} in"):
            trainkit.dry_run.check_sharding(small(), 1, *given)


def test_the_launch_compares_tokens_with_what_it_launches(small, write_bins):
    """The configuration may have been changed since they were made."""
    config = write_bins(small(tokenizer="builtin", eval_windows=25))
    identity = f"tokenizer: {tokenization.identity('builtin')}"
    manifest = {"made_from": [identity], "tokens": {"train": 2_001, "val": 401}}
    manifest["largest_id"] = {"train": 520, "val": 520}
    manifest["bytes"] = {"train": 9_999, "val": 4 * 401}
    path = Path(config.data_dir) / "manifest.json"
    for text in ("", json.dumps(manifest)):  # also without one, as nanoGPT's files are
        if text:
            path.write_text(text)
        trainkit.launch.settings(config)
        for changes, words in (
            ({"vocab_size": 520}, "has the token 520, and vocab_size is 520"),
            ({"eval_windows": 26}, "eval_windows asks for 26 of val"),
        ):
            with pytest.raises(ValueError, match=words):
                trainkit.launch.settings(replace(config, **changes))
    found = trainkit.launch.settings(config)["val"]
    assert found == {"windows": 25, "bytes_per_token": 4.0}
    path.write_text(json.dumps(manifest | {"made_from": ["tokenizer: another"]}))
    with pytest.raises(ValueError, match="holds tokens of .'tokenizer: another'"):
        trainkit.launch.settings(config)


def test_a_run_that_has_diverged_is_not_launched(tutorial, small, write_bins, cluster):
    """Nor tried again by a job, until somebody deletes the note."""
    config = write_bins(small())
    config.run_path.mkdir(parents=True)
    trainkit.run_lock.note_divergence(config, "step 3")
    with pytest.raises(FloatingPointError, match="run diverged at step 3"):
        tutorial.make_trainer(config, tutorial.train_loop_per_worker)
    (config.run_path / "diverged.txt").unlink()
    tutorial.make_trainer(config, tutorial.train_loop_per_worker)


def test_what_the_cluster_lacks_is_said(tutorial, cluster, small, write_bins, capsys):
    """Then Ray waits, for an hour. What it has and no worker uses is said, too, and whether a
    CPU is left to read batches.
    """
    config = small(batch_size=840, eval_windows=840)
    write_bins(config, val_tokens=840 * 16 + 1)
    unused = "The cluster has 2 GPUs, and the workers use 0 of them.\n$"
    full = f"^The workers take all CPUs, and .* wait .*\n{unused}"
    asked = "ask for .*8.*cluster has .*4"
    gpus = {"use_gpu": True, "resources_per_worker": {"CPU": 0.5, "GPU": 1}}
    for options, words in (
        ({"num_workers": 3}, f"^{unused}"),  # 4 CPUs are there
        ({"num_workers": 4}, full),
        ({"num_workers": (4, 8)}, full),
        ({"num_workers": 8}, asked),
        ({"num_workers": 3} | gpus, "^The .* ask for .*'GPU': 3.* has .*'GPU': 2"),
    ):
        changed = replace(config, scaling=options)
        trainer = tutorial.make_trainer(changed, tutorial.train_loop_per_worker)
        assert re.search(words, capsys.readouterr().out)
    assert trainer.run_config.failure_config.controller_failure_limit == 60  # minutes
    kept = trainer.run_config.checkpoint_config  # the best, also if the loss rises
    assert (kept.num_to_keep, kept.checkpoint_score_order) == (2, "min")
    assert kept.checkpoint_score_attribute == "val_loss"


def test_a_launch_without_a_name_is_refused(small):
    scaling = ScalingConfig(num_workers=2)
    with pytest.raises(ValueError, match="run_name: .*'run_name: my-run'"):
        trainkit.launch.check(small(run_name=None), scaling, *[None] * 3)

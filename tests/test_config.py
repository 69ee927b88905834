"""The configuration: defaults, files, and what is refused before anything starts."""

import dataclasses
import math
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import ray
import yaml
from notebook_module import code_cells

import trainkit.config
import trainkit.corpus
import trainkit.tokens
import trainkit.watch
import trainkit.workers

ROOT = Path(__file__).resolve().parent.parent
# gpt2-finetune starts from weights on the hub; test_huggingface loads it with local ones.
FILES = sorted(p for p in (ROOT / "configs").glob("*.yaml") if "finetune" not in p.name)


def test_defaults_are_gpt2_small(tutorial):
    config = trainkit.config.TrainingConfig()
    assert (config.n_layer, config.n_head, config.n_embd) == (12, 12, 768)
    assert (config.vocab_size, config.padded_vocab_size) == (50_257, 50_304)
    assert config.batch_size * config.block_size == 491_520  # nanoGPT's tokens a step
    assert all(f.type is not dataclasses.MISSING for f in dataclasses.fields(config))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_loads(tutorial, path):
    config = trainkit.config.load_config(path)
    assert (
        Path(config.storage_path).is_absolute() and Path(config.data_dir).is_absolute()
    )
    devices = config.num_workers * config.devices_per_worker
    assert math.prod(config.mesh_shape(config.num_workers)) == devices
    scaling = trainkit.workers.scaling_config(config)
    assert scaling.use_gpu == (config.platform == "gpu")
    assert scaling.use_tpu == (config.platform == "tpu")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batchsize": 3}, ["batchsize"]),
        ({"batch_size": "many"}, ["batch_size", "integer", "many"]),
        ({"batch_size": 0}, ["batch_size", "greater than 0"]),
        ({"learning_rate": "6e-4"}, ["learning_rate", "6e-4"]),
        ({"platform": "npu"}, ["platform", "'cpu', 'gpu' or 'tpu'"]),
        ({"n_embd": 130}, ["n_embd (130)", "n_head (4)"]),
        ({"batch_size": 7}, ["batch_size (7)", "2 devices"]),
        ({"fsdp": 3}, ["fsdp", "num_workers x devices_per_worker (2)"]),
        ({"num_workers": [1, 3]}, ["batch_size (8)", "3 devices"]),
        ({"num_workers": 3, "fsdp": 3, "batch_size": 9}, ["fsdp (3)", "n_embd (128)"]),
        (
            {"num_workers": 5, "tensor_parallel": 5, "n_head": 5, "n_embd": 125},
            ["tensor_parallel (5)", "50304"],
        ),
        ({"decay_steps": 5}, ["decay_steps (5)", "warmup_steps (10)"]),
        ({"learning_rate": 3e-5}, ["min_learning_rate (0.0002)", "rate (3e-05)"]),
        ({"seed": 2**31}, ["seed", "less than"]),
        ({"attention": "cudnn"}, ["attention: cudnn", "platform: gpu", "cpu"]),
        ({"attention": "cudnn", "platform": "gpu"}, ["attention: cudnn", "bfloat16"]),
        (
            {"attention": "cudnn", "platform": "gpu", "compute_dtype": "bfloat16"}
            | {"n_embd": 36, "n_head": 3},
            ["n_embd / n_head", "bfloat16 and 12"],
        ),
        ({"attention": "splash"}, ["attention: splash", "platform: tpu", "cpu"]),
        ({"data_dir": "s3://bucket/data"}, ["data_dir", "not a URL"]),
        ({"topology": "4x4"}, ["topology (4x4)", "platform: tpu", "cpu"]),
        ({"accelerator_type": "TPU-V6E"}, ["(TPU-V6E)", "platform: tpu", "cpu"]),
    ],
)
def test_mistakes_name_the_key(tutorial, changes, words):
    with pytest.raises(ValueError) as error:
        trainkit.config.load_config(ROOT / "configs/smoke.yaml", **changes)
    assert all(word in str(error.value) for word in ["smoke.yaml", *words])


def test_file_that_is_no_mapping(tutorial, tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match="list.yaml"):
        trainkit.config.load_config(path)


def test_run_name_follows_the_recipe(tutorial):
    def name(**changes):
        return trainkit.config.load_config(
            ROOT / "configs/smoke.yaml", **changes
        ).run_name

    assert name() == name(max_steps=7, num_workers=1) != name(learning_rate=1e-3)
    assert name() != name(max_skipped_steps=2)  # the optimizer's state has another form


def test_relative_places_mean_the_same_to_workers(tutorial, tmp_path, monkeypatch):
    """Ray changes the directory of each worker."""
    monkeypatch.chdir(tmp_path)
    places = {"data_dir": "data", "storage_path": "runs"}
    config = trainkit.config.load_config(ROOT / "configs/smoke.yaml", **places)
    assert config.data_dir == str(tmp_path / "data")
    assert config.storage_path == str(tmp_path / "runs")
    config = trainkit.config.load_config(
        ROOT / "configs/smoke.yaml", storage_path="~/runs"
    )
    assert config.storage_path == str(Path.home() / "runs")
    config = trainkit.config.load_config(
        ROOT / "configs/smoke.yaml", storage_path="s3://a/b"
    )
    assert config.storage_path == "s3://a/b"
    with pytest.raises(ValueError, match="not a valid configuration"):
        trainkit.config.load_config(ROOT / "configs/smoke.yaml", data_dir=3)


def test_travels_to_a_worker(tutorial, cluster, small):
    """Both as plain data, which the trainer sends, and as an object."""

    @ray.remote
    def echo(settings, config):
        return trainkit.config.TrainingConfig(**settings) == config

    config = small()
    assert ray.get(echo.remote(dataclasses.asdict(config), config))


def test_missing_resources_are_named(tutorial, cluster, small):
    config = small(num_workers=2, devices_per_worker=4, platform="gpu", batch_size=8)
    with pytest.raises(RuntimeError, match=r"'GPU': 8.*'GPU': 0"):
        trainkit.workers.check_resources(config)
    trainkit.workers.check_resources(dataclasses.replace(config, autoscaling=True))
    trainkit.workers.check_resources(small(num_workers=2))
    with pytest.raises(
        RuntimeError, match=r"a CPU for Ray Data .*'CPU': 4.5.*'CPU': 4"
    ):
        trainkit.workers.check_resources(small(num_workers=7, batch_size=14))


def test_storage_that_cannot_be_written(tutorial, small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="storage_path"):
        trainkit.watch.check_storage(small(storage_path=str(tmp_path / "file")))


def test_driver_stays_on_the_cpu(tutorial):
    import jax

    assert {device.platform for device in jax.devices()} == {"cpu"}


def test_configuration_is_data_and_not_a_program(tutorial, tmp_path):
    path, proof = tmp_path / "evil.yaml", tmp_path / "proof"
    path.write_text(f"run_name: !!python/object/apply:os.system ['touch {proof}']\n")
    with pytest.raises(yaml.constructor.ConstructorError):
        trainkit.config.load_config(path)
    assert not proof.exists()


def test_nothing_unpickles(tutorial):
    """Token files, weights, and checkpoints have formats that cannot hold code."""
    source = "\n".join(cell.source for cell in code_cells())
    for word in ("pickle", "eval(", "exec(", "torch.load", "np.load", "trust_remote"):
        assert word not in source, word


def test_errors_do_not_tell_secrets(tutorial, cluster, small, monkeypatch, tmp_path):
    """What a person copies into a bug report has no token in it."""
    secret = "hf_thisIsASecretToken1234567890"
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    storage = str(tmp_path / "file")
    Path(storage).write_text("")
    attempts = [
        lambda: trainkit.config.load_config(ROOT / "configs/smoke.yaml", wrong=1),
        lambda: trainkit.corpus.load(small(dataset="nobody/nothing")),
        lambda: trainkit.watch.check_storage(small(storage_path=storage)),
        lambda: trainkit.workers.check_resources(
            small(num_workers=4, cpus_per_worker=999.0)
        ),
        lambda: trainkit.tokens.open_tokens(small(), "train"),
    ]
    for attempt in attempts:
        with pytest.raises((ValueError, OSError, RuntimeError)) as error:
            attempt()
        assert secret not in "".join(traceback.format_exception(error.value))


def test_dashboard_listens_on_the_loopback_address_only(tutorial):
    """Started as the notebook starts it, in a process of its own."""
    (cell,) = [c.source for c in code_cells() if c.source.startswith("ray.init(")]
    script = f"""
import os, psutil, ray
{cell.splitlines()[0]}
port = int(ray._private.worker.global_worker.node.webui_url.rsplit(":", 1)[1])
found = [c.laddr.ip for c in psutil.net_connections("tcp")
         if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
print("LISTENS", found)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert "LISTENS ['127.0.0.1']" in result.stdout, result.stdout + result.stderr

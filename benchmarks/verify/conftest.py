"""What the checks of a device share: its configuration, and how they record what they find."""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common  # before trainkit
import notebook_module
import report as reports

import trainkit.config

CONFIGS = {"cpu": "smoke", "gpu": "gpt2-124m", "tpu": "gpt2-124m-tpu-v6e"}


def pytest_addoption(parser):
    parser.addoption("--change", action="append", default=[], help="key=value")
    parser.addoption("--into", type=Path, help="the folder of the report")
    parser.addoption("--rehearse", help="a GPU of benchmarks/gpus to compile for")


def pytest_configure(config):
    """Set the environment as a worker has it, before this process looks for devices."""
    options = config.option
    find = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    kind = "gpu" if options.rehearse else subprocess.check_output(find, text=True)
    if notebook_module.HAS_RAY:
        os.environ["RAY_ADDRESS"] = "local"  # a cluster of its own
        trainkit.set_up_driver()  # which limits JAX to CPUs, until below
    import jax

    from trainkit import workers

    options.into = options.into.resolve()
    options.into.mkdir(parents=True, exist_ok=True)
    file = f"{CONFIGS[kind.strip()]}.yaml"
    base = trainkit.config.load_config(common.ROOT / "configs" / file)
    base = common.for_one_device(base, common.parse_changes(options.change))
    options.cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = options.cache or f"{options.into}/cache"
    settings = workers.environment(base)
    settings.pop("LD_LIBRARY_PATH", None)  # which Ray would expand on a node
    if base.platform != "cpu":
        settings["JAX_PLATFORMS"] += ",cpu"  # to compare with
    if options.rehearse:
        settings["JAX_PLATFORMS"] = "cpu"
    os.environ |= settings
    for key, value in settings.items():
        if key.startswith("JAX_"):
            jax.config.update(key.lower(), yaml.safe_load(value))
    if base.platform == "gpu":
        workers.load_cuda_libraries()
    options.base, path = base, options.into / "report.json"
    options.report = {"device": "an unknown device", "versions": {}, "checks": {}}
    options.report["date"] = str(datetime.date.today())
    options.report["configuration"] = " ".join([file, *options.change])
    if path.exists():
        options.report = json.loads(path.read_text())


@pytest.fixture(scope="session")
def base(pytestconfig):
    """The platform's configuration, with the changes asked for, for one device."""
    return pytestconfig.option.base


@pytest.fixture(scope="session")
def tutorial():
    return notebook_module.load_notebook()


@pytest.fixture
def record(record_property):
    """A function that records what is found; if it isn't as expected, the test fails."""
    failed = []

    def add(what: str, found: str, expected="", passed=True, value=None):
        result = "fail" if not passed else "pass" if expected else "measured"
        row = {"what": what, "expected": expected, "found": found, "result": result}
        record_property("row", row | {"value": value})
        if not passed:
            failed.append(row)

    yield add
    assert not failed


def keep(item, found: str = "", result: str = "fail") -> None:
    """Keep the rows of a test in the report, and what is found of the test as a whole."""
    rows = [row for _, row in item.user_properties]
    if found:
        what = item.function.__doc__.splitlines()[0].rstrip(".")
        rows += [{"what": what, "expected": "", "found": found, "result": result}]
    item.config.option.report["checks"][item.name] = rows
    reports.write(item.config.option.report, item.config.option.into)


def pytest_runtest_setup(item):
    keep(item, "it crashed, or took longer than ten minutes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep what a test that has ended has found, and why, if it broke or was skipped."""
    report = yield
    if report.skipped:
        keep(item, call.excinfo.value.msg, "skipped")
    elif report.failed and call.when != "teardown":
        keep(item, f"{call.excinfo.exconly():.300}")
    elif call.when == "call":
        keep(item)
    return report

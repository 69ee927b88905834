"""The command that checks a machine: its parts on two cores, its report, and its table."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import verify
import verify_table

ROOT = Path(__file__).resolve().parent.parent
TINY = ["n_layer=1", "n_embd=32", "n_head=2", "block_size=32"]
ALONE = "machine,numbers,step,memory,profile"


def run_verify(folder: Path, *arguments: str) -> tuple[int, dict, str]:
    """The exit code, the report, and the report for people."""
    command = ["bash", str(ROOT / "ci/verify.sh"), "--into", str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = folder / "report.json"
    assert report.exists(), result.stderr[-3000:]
    return result.returncode, json.loads(report.read_text()), result.stdout


def by_name(records: list[dict]) -> dict[str, dict]:
    return {record["what"]: record for record in records}


def failed(report: dict) -> list[dict]:
    return [
        r for part in report["parts"].values() for r in part if r["result"] == "fail"
    ]


@pytest.mark.slow
def test_every_part_that_needs_no_ray(tmp_path):
    code, report, printed = run_verify(tmp_path, f"--only={ALONE}", *TINY)
    assert not failed(report) and code == 0
    assert list(report["parts"]) == ALONE.split(",")
    assert report["device"].startswith(f"{os.cpu_count()}-core ")
    assert not report["ended"]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(f"# {verify.summary(report)}\n")
    assert verify.summary(report) in printed

    parts = {name: by_name(records) for name, records in report["parts"].items()}
    numbers = parts["numbers"]
    for dtype in ("float32", "bfloat16"):
        assert numbers[f"the gradients in {dtype}, a small shape"]["result"] == "pass"
    assert numbers["20 steps with the same seed, twice"]["found"] == "the same"
    step = parts["step"]
    assert step["tokens/s"]["value"] > 0 and 0 < step["MFU"]["value"] < 1
    assert parts["memory"]["memory as compiled"]["result"] == "pass"
    shares = [r["value"] for r in report["parts"]["profile"] if "value" in r]
    assert len(shares) == 10 and shares == sorted(shares, reverse=True)
    assert 0.3 < sum(shares) <= 1
    assert (tmp_path / "jax-cache").is_dir() and not (ROOT / "INTO").exists()
    (row,) = verify_table.rows([tmp_path / "report.json"])
    assert f"{step['tokens/s']['value']:,.0f}" in row


@pytest.mark.extra
def test_variants_of_the_real_step(tmp_path):
    code, report, _ = run_verify(tmp_path, "--minutes=0.8", "--only=variants", *TINY)
    assert not failed(report) and code == 0
    variants = by_name(report["parts"]["variants"])
    first = variants["the configuration as it is"]["found"]
    assert first.startswith("1.00 of the first's speed")
    assert "one product for q, k, and v" in variants


@pytest.mark.slow
def test_the_program_through_ray(tmp_path):
    code, report, _ = run_verify(tmp_path, "--only=program", *TINY)
    assert not failed(report) and code == 0
    program = by_name(report["parts"]["program"])
    again = program["a worker is killed, and the run continues"]
    assert again["found"] == "17 of 17 steps the same"
    assert program["the loop between two saves"]["value"] > 0


def test_time_is_divided_among_the_parts_that_are_left():
    parts = list(verify.PARTS)
    left, shares = 600.0, []
    for part in parts:  # each takes all that it may
        shares.append(verify.share(part, parts, left))
        left -= shares[-1]
    assert left == pytest.approx(0)
    weights = list(verify.PARTS.values())
    expected = [600 * weight / sum(weights) for weight in weights]
    assert shares == pytest.approx(expected)
    # What a part leaves is for the later ones; the last may take all of it.
    assert verify.share("variants", parts, 500) == 500
    assert verify.share("step", ["machine", "step"], 90) == 90


def test_only_and_changes():
    options = verify.parse_options(["--only", "memory,step", "n_layer=1"])
    assert options.parts == ["machine", "step", "memory"]
    assert options.changes == ["n_layer=1"]
    with pytest.raises(SystemExit):
        verify.parse_options(["--only", "speed"])


def parts_of(tmp_path, monkeypatch, code: str) -> dict:
    """Let processes find these parts instead of the real ones; the options of a part."""
    (tmp_path / "verify_parts.py").write_text(code)
    monkeypatch.setattr(verify, "FORKS", verify.multiprocessing.get_context("spawn"))
    monkeypatch.syspath_prepend(tmp_path)
    return {"folder": str(tmp_path), "environment": {}}


PARTS = """
import os, time

def start(environment):
    pass

def hangs(options, add):
    add(what="first", expected="", found="1", result="pass")
    time.sleep(60)

def dies(options, add):
    add(what="first", expected="", found="1", result="pass")
    os.abort()

def raises(options, add):
    raise ValueError("as it must")

def variant(options, add):
    time.sleep(0.1)
    add(tokens_per_s=options["variant"]["speed"], more="MFU 50.0%")
"""


@pytest.mark.parametrize(
    "part, found",
    [
        ("hangs", "it took longer than its 3 s"),
        ("dies", "it ended with -6"),
        ("raises", "ValueError: as it must"),
    ],
)
def test_a_part_that_ends_early_is_a_failed_check(tmp_path, monkeypatch, part, found):
    options = parts_of(tmp_path, monkeypatch, PARTS)
    *before, last = verify.run_part(part, options, 3)
    assert last["result"] == "fail" and last["found"].startswith(found)
    assert [record["what"] for record in before] == ["first"] * (part != "raises")


def test_variants_take_the_time_that_is_left(tmp_path, monkeypatch):
    options = parts_of(tmp_path, monkeypatch, PARTS)
    each = {"environment": {}, "says": "a key"}
    names = {"as it is": 100.0, "slower": 50.0, "faster": 110.0}
    options["variants"] = [
        each | {"name": name, "speed": speed} for name, speed in names.items()
    ]
    written = []
    records = verify.run_variants(options, 60, written.append)
    found = {name: record["found"] for name, record in by_name(records).items()}
    assert (
        found["slower"] == "0.50 of the first's speed: 50 tokens/s, MFU 50.0%, 3 runs"
    )
    assert found["the best"] == "faster, 1.10 of the first's speed: a key"
    assert len(written) == verify.ROUNDS * len(names)
    assert written[0][1]["found"] == "no time was left"
    assert "the best" not in by_name(written[2])  # after one run of each
    assert by_name(verify.run_variants(options, 0, written.append)).keys() == {*names}


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_report(tmp_path):
    command = [sys.executable, str(ROOT / "ci/verify.py"), "--into", str(tmp_path)]
    process = subprocess.Popen(
        [*command, *TINY],
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in front
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "machine.log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ended"] == "interrupted in the part 'machine'"
    assert "interrupted" in (tmp_path / "report.md").read_text().splitlines()[0]


def make_report(*results: str) -> dict:
    """A report with so many records."""
    records = [
        {"what": str(i), "expected": "", "found": "", "result": result}
        for i, result in enumerate(results)
    ]
    keys = {"device": "a GPU", "date": "2026-11-24", "configuration": "x.yaml"}
    keys |= {"versions": {"jax": "0.10.2"}, "seconds": 60, "ended": ""}
    return keys | {"parts": {"numbers": records}}


def test_a_report_for_people():
    report = make_report("pass", "pass", "fail", "skipped", "measured")
    assert verify.tally(report) == (2, 3, 1)
    expected = "2 of 3 checks passed on a GPU, 2026-11-24; 1 skipped"
    assert verify.summary(report) == expected
    text = verify.as_markdown(report)
    assert text.startswith(f"# {expected}\n") and text.count("**fail**") == 1
    report["parts"]["numbers"][0]["found"] = "a|b"
    assert "a\\|b" in verify.as_markdown(report)


def test_a_row_of_what_was_not_measured():
    expected = "| a GPU | x.yaml | 2026-11-24 | jax 0.10.2 | - | - | 1 of 1 |"
    assert verify_table.row(make_report("pass")) == expected


@pytest.mark.slow
def test_a_check_that_fails_makes_the_exit_code_1(tmp_path):
    """Such as when JAX finds no device."""
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    command = [sys.executable, str(ROOT / "ci/verify.py"), "--into", str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert result.returncode == 1
    (record,) = json.loads((tmp_path / "report.json").read_text())["parts"]["machine"]
    assert record["result"] == "fail" and "no_such_platform" in record["found"]


@pytest.mark.parametrize("page", ["benchmarks/README.md"])
def test_the_pages_show_the_reports(page):
    """Exactly: the table between its header and the next empty line."""
    text = (ROOT / page).read_text()
    header = "\n".join(verify_table.HEADER) + "\n"
    assert text.count(header) == 1
    shown = text.split(header)[1].split("\n\n")[0].splitlines()
    assert verify_table.rows() and shown == verify_table.rows()


def test_reports_name_no_person_and_no_place():
    for path in verify_table.REPORTS.glob("*.json"):
        text = path.read_text()
        assert str(ROOT) not in text and "/home/" not in text and "/root/" not in text
        assert os.uname().nodename not in text


def test_kernels_are_read_from_the_lines_of_each_platform(monkeypatch):
    sys.path.append(str(ROOT / "benchmarks"))
    import verify_parts

    def plane(name, **lines):
        def event(text):
            name, ns = text.split()
            return SimpleNamespace(
                name=name, duration_ns=int(ns), stats=[("hlo_op", 1)]
            )

        made = [
            SimpleNamespace(name=k, events=[*map(event, v)]) for k, v in lines.items()
        ]
        return SimpleNamespace(name=name, lines=made)

    gpu = plane(
        "/device:GPU:0", **{"Stream #13(Compute)": ["gemm 5", "gemm 2", "copy 1"]}
    )
    tpu = plane("/device:TPU:0", **{"XLA Modules": ["step 9"], "XLA Ops": ["fusion 7"]})
    cpu = plane("/host:CPU", python=["while 90", "dot.1 3"])
    assert verify_parts.kernels(iter([cpu, gpu])) == {"gemm": 7, "copy": 1}
    assert verify_parts.kernels(iter([tpu])) == {"fusion": 7}
    assert verify_parts.kernels(iter([cpu])) == {"dot.1": 3}


@pytest.mark.slow
def test_without_ray_the_train_step_is_there():
    code = """
import sys
sys.modules["ray"] = None  # as if it weren't installed
sys.path[:0] = ["benchmarks", "ci"]
import verify_parts as v
config = v.dataclasses.replace(v.base_config("cpu", {"n_layer": 1}), **v.SMALL)
state, _ = v.tutorial.train_step(
    v.tutorial.create_state(config), v.random_windows(config), config
)
assert state.step == 1 and v.run_log.PEAK_FLOPS and v.workers.environment(config)
assert not hasattr(v.tutorial, "make_token_dataset")
v.program({}, lambda **record: print(record["found"]))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "Ray is missing\n", result.stderr

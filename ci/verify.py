"""Check on this machine what the pages say, in ten minutes, and write a report.

    bash ci/verify.sh [--minutes 10] [--only step,memory] [--original README.md]
        [--into build/verify] [key=value ...]

Takes what JAX finds here, unless JAX_PLATFORMS says otherwise, and that platform's
configuration, with the changes `key=value`. It asks for nothing from the network and installs
nothing; without Ray, what needs it is skipped. Each part has a process of its own and a share
of the time, so one that crashes or hangs leaves the others alone. The report is written after
each part: report.md for people, report.json for verify_table.py. The exit code is 1 if a check
fails. The parts are in benchmarks/verify_parts.py.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # which the processes of parts take over
# What matters most first. Each part may take this share of the time that is left, among the
# parts that are left; the variants take what remains.
PARTS = {
    "machine": 2,
    "numbers": 4,
    "step": 3,
    "memory": 2,
    "program": 10,
    "profile": 2,
    "variants": 4,
}
TITLES = {
    "machine": "The machine",
    "numbers": "Numbers: this device against float32 on the CPU",
    "step": "The train step of the configuration",
    "memory": "Memory: as compiled, and as run",
    "program": "The program through Ray",
    "profile": "The longest kernels of three steps",
    "variants": "Variants of the step, beside the first",
}
ROUNDS = 3  # of the variants, if there is time
FASTER = 1.02  # a variant that is no faster than this isn't worth a change


def share(name: str, chosen: list[str], left: float) -> float:
    """The seconds that a part may take of those that are `left`."""
    later = chosen[chosen.index(name) :]
    return left * PARTS[name] / sum(PARTS[part] for part in later)


def run_alone(part: str, options: dict, seconds: float) -> tuple[list[dict], str]:
    """What a part finds out in a process of its own, and why it ended early, if it did."""
    folder = Path(options["folder"])
    found, log = folder / f"{part}.jsonl", folder / f"{part}.log"
    found.unlink(missing_ok=True)
    options = options | {"seconds": seconds}
    process = FORKS.Process(target=in_child, args=(part, options, found, log))
    process.start()
    try:
        process.join(seconds)
        ended = "" if process.exitcode == 0 else f"it ended with {process.exitcode}"
        if process.is_alive():
            ended = f"it took longer than its {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all that it started
        process.kill()  # if it had no time to become a group
        process.join()
    return read_records(found), ended


def read_records(path: Path) -> list[dict]:
    """What a part has recorded so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def in_child(part: str, options: dict, found: Path, log: Path) -> None:
    """Run a part: its records go to the file `found`, all that it prints to `log`."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)

    def add(**record) -> None:
        with found.open("a") as file:
            file.write(without_places(json.dumps(record), found.parent) + "\n")

    try:
        import verify_parts

        verify_parts.start(options["environment"])
        getattr(verify_parts, part)(options, add)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        add(
            what="the part runs to its end",
            expected="no error",
            found=f"{type(error).__name__}: {first:.300}",
            result="fail",
        )
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # without the shutdown of what is still running


def without_places(text: str, folder: Path) -> str:
    """A record without names of folders, hosts, and people: reports are published."""
    names = {str(folder): "INTO", str(ROOT): "REPOSITORY", sys.prefix: "PYTHON"}
    names |= {str(Path.home()): "HOME", os.uname().nodename: "HOST"}
    for name, stands_for in names.items():
        if len(name) > 2:  # not a home that is "/"
            text = text.replace(name, stands_for)
    return text


def run_part(part: str, options: dict, seconds: float) -> list[dict]:
    """The records of a part, with one more if it ended early."""
    records, ended = run_alone(part, options, seconds)
    if ended:
        records.append(
            {
                "what": "the part runs to its end",
                "expected": "no error",
                "found": f"{ended}; see {part}.log",
                "result": "fail",
            }
        )
    return records


def run_variants(
    options: dict, seconds: float, write: Callable[[list[dict]], None]
) -> list[dict]:
    """Measure one variant after the other, round after round, as long as there is time."""
    variants, runs, errors = options["variants"], {}, {}
    start, longest, records = time.monotonic(), 0.0, []
    for turn in range(ROUNDS * len(variants)):
        variant, began = variants[turn % len(variants)], time.monotonic()
        name = variant["name"]
        if name in errors:
            continue
        if began + 1.2 * longest > start + seconds:
            break
        environment = options["environment"] | variant["environment"]
        one = options | {"variant": variant, "environment": environment}
        found, ended = run_alone("variant", one, start + seconds - began)
        longest = max(longest, time.monotonic() - began)
        if ended or found[-1].get("result") == "fail":
            errors[name] = ended or found[-1]["found"]
        else:
            runs.setdefault(name, []).append(found[-1])
        records = compare(variants, runs, errors)
        write(records)
    return records or compare(variants, runs, errors)


def compare(variants: list[dict], runs: dict, errors: dict) -> list[dict]:
    """A record for each variant, beside the first, and one for the best."""
    base = runs.get(variants[0]["name"], [])
    records, ratios = [], {}
    for variant in variants:
        name = variant["name"]
        record = {"what": name, "expected": "", "result": "measured"}
        if name in errors:
            result = "fail" if variant is variants[0] else "skipped"
            record |= {"found": f"not measured: {errors[name]}", "result": result}
        elif name not in runs:
            record |= {"found": "no time was left", "result": "skipped"}
        else:
            speeds = [run["tokens_per_s"] for run in runs[name]]
            speed, text = statistics.median(speeds), ""
            if base:
                pairs = zip(speeds, (run["tokens_per_s"] for run in base))
                ratios[name] = statistics.median(a / b for a, b in pairs)
                text = f"{ratios[name]:.2f} of the first's speed: "
            text += f"{speed:,.0f} tokens/s, {runs[name][-1]['more']}"
            record |= {"found": f"{text}, {count(len(speeds), 'run')}", "value": speed}
        records.append(record)
    ours = {v["name"]: v["says"] for v in variants if v["says"]}
    known = {n: ratio for n, ratio in ratios.items() if n in ours and len(runs[n]) > 1}
    if len(known) > 1:  # one run of each says too little
        best = max(known, key=known.get)
        found = "the configuration as it is; no variant is 2 % faster"
        if known[best] >= FASTER:
            found = f"{best}, {known[best]:.2f} of the first's speed: {ours[best]}"
        records.append(
            {"what": "the best", "expected": "", "found": found, "result": "measured"}
        )
    return records


def count(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"


def tally(report: dict) -> tuple[int, int, int]:
    """How many checks passed, how many there were, and how much was skipped."""
    results = [r["result"] for part in report["parts"].values() for r in part]
    passed, failed = results.count("pass"), results.count("fail")
    return passed, passed + failed, results.count("skipped")


def summary(report: dict) -> str:
    """One line for people."""
    passed, checks, skipped = tally(report)
    line = f"{passed} of {checks} checks passed on {report['device']}, {report['date']}"
    line += f"; {skipped} skipped" if skipped else ""
    return line + (f"; {report['ended']}" if report["ended"] else "")


def as_markdown(report: dict) -> str:
    """The report for a person who has never seen the project."""
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    lines = [
        f"# {summary(report)}",
        "",
        "What the repository's GPT-2 in JAX and Ray Train does on this machine, as "
        f"`bash ci/verify.sh` has found out in {report['seconds'] / 60:.1f} minutes. "
        "A check that passes has found what was expected. What is only measured has no "
        "expectation, and what is skipped says why.",
        "",
        f"Configuration: {report['configuration']}. Versions: {versions}.",
    ]
    for part, records in report["parts"].items():
        lines += ["", f"## {TITLES[part]}", ""]
        lines += ["| what | expected | found | result |", "|---|---|---|---|"]
        for record in records:
            cells = (record[key] for key in ("what", "expected", "found"))
            cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
            mark = {"fail": "**fail**"}.get(record["result"], record["result"])
            lines.append(f"| {' | '.join([*cells, mark])} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    names = ",".join(PARTS)
    parser.add_argument("--only", help=f"parts, of {names}", default=names)
    parser.add_argument("--original", type=Path, help="the original tutorial's README")
    parser.add_argument("--into", type=Path, default=ROOT / "build/verify")
    parser.add_argument("changes", nargs="*", help="key=value of the configuration")
    options = parser.parse_intermixed_args(arguments)
    asked = options.only.split(",")
    if unknown := set(asked) - PARTS.keys():
        parser.error(f"--only: expected some of {names}, found {', '.join(unknown)}")
    options.parts = [part for part in PARTS if part in (*asked, "machine")]
    return options


def main() -> int:
    arguments = parse_options()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # PyTorch isn't missed
    deadline = time.monotonic() + 60 * arguments.minutes
    folder = arguments.into.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "device": "an unknown device",
        "date": str(datetime.date.today()),
        "versions": {},
        "configuration": "unknown",
        "seconds": 0.0,
        "ended": "",
        "parts": {},
    }
    original = arguments.original and str(arguments.original.resolve())
    options = {"folder": str(folder), "changes": arguments.changes, "environment": {}}
    options |= {"original": original, "variants": []}

    def write(part: str, records: list[dict]) -> None:
        report["parts"][part] = [r for r in records if "result" in r]
        report["seconds"] = round(time.monotonic() - deadline + 60 * arguments.minutes)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / "report.md").write_text(as_markdown(report))

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    part = ""
    try:
        for part in arguments.parts:
            seconds = share(part, arguments.parts, deadline - time.monotonic())
            print(f"{TITLES[part]}: at most {seconds:.0f} s ...", flush=True)
            if part == "variants":
                write(part, run_variants(options, seconds, partial(write, part)))
                continue
            records = run_part(part, options, seconds)
            if part == "machine":
                write(part, records)
                if "plan" not in records[-1]:
                    break  # without a device there is nothing to check
                plan = records[-1]["plan"]
                report |= plan.pop("report")
                cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax-cache")}
                options |= plan | {"environment": plan["environment"] | cache}
            write(part, records)
    except KeyboardInterrupt:
        report["ended"] = f"interrupted in the part {part!r}"
        write(part, report["parts"].get(part) or read_records(folder / f"{part}.jsonl"))
    print(f"{summary(report)}\nThe report is {folder / 'report.md'}")
    passed, checks, _ = tally(report)
    return 130 if report["ended"] else int(passed < checks)


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["verify_parts"])  # it imports a lot: once for all

if __name__ == "__main__":
    sys.exit(main())

"""The report of `bash ci/verify.sh`; run as a script, it prints the pages' table of reports."""

import json
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "benchmarks/reports"
INTRODUCTION = """\
What GPT-2 in JAX and Ray Train does on this machine, found out by `bash ci/verify.sh`. A \
check that passes has found what was expected. What is measured has no expectation."""
TABLE = """\
| device | configuration | date | versions | tokens/s | MFU | checks |
|---|---|---|---|---|---|---|"""


def tally(report: dict) -> str:
    """How many checks passed, of how many, and how many were skipped."""
    results = [row["result"] for rows in report["parts"].values() for row in rows]
    passed, failed, skipped = map(results.count, ("pass", "fail", "skipped"))
    return f"{passed} of {passed + failed} passed, {skipped} skipped"


def as_markdown(report: dict) -> str:
    """The report for a person who has never seen the project."""
    versions = ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    blocks = [f"# {report['device']}, {report['date']}: {tally(report)}"]
    blocks += [INTRODUCTION, f"Configuration: {report['configuration']}. {versions}."]
    for part, rows in report["parts"].items():
        keys = ("what", "expected", "found", "result")
        lines = [f"| {' | '.join(keys)} |", "|---|---|---|---|"]
        for row in rows:
            cells = [row[key].replace("|", "\\|").replace("\n", " ") for key in keys]
            lines.append(f"| {' | '.join(cells)} |")
        blocks += [f"## The {part}", "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def write(report: dict, folder: Path) -> None:
    """Write report.json, report.md, and report.zip, which holds both.

    Names of folders, hosts, and people are left out, because reports are published.
    """
    names = {str(folder): "INTO", str(ROOT): "REPOSITORY", sys.prefix: "PYTHON"}
    names |= {str(Path.home()): "HOME", os.uname().nodename: "HOST"}
    files = {"report.json": json.dumps(report, indent=1) + "\n"}
    files["report.md"] = as_markdown(report)
    with zipfile.ZipFile(folder / "report.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for file, text in files.items():
            for name, stands_for in names.items():
                if len(name) > 2:  # not a home that is "/"
                    text = text.replace(name, stands_for)
            (folder / file).write_text(text)
            packed.writestr(file, text)


def row(report: dict) -> str:
    """The report's row in the pages' table; what wasn't measured is a dash."""
    step = {r["what"]: r.get("value") for r in report["parts"].get("step", [])}
    speed, mfu = step.get("tokens/s"), step.get("MFU")
    shown = ("python", "jax", "flax", "ray")
    versions = [f"{n} {v}" for n, v in report["versions"].items() if n in shown]
    cells = [report["device"], report["configuration"], report["date"]]
    cells += [", ".join(versions), f"{speed:,.0f}" if speed else "-"]
    cells += [f"{mfu:.0%}" if mfu else "-", tally(report)]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The pages' table: a row for each report in benchmarks/reports."""
    found = [json.loads(p.read_text()) for p in sorted(REPORTS.glob("*.json"))]
    return "\n".join([TABLE, *map(row, found)])


if __name__ == "__main__":
    print(table())

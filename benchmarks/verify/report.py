"""The report of `bash ci/verify.sh`."""

import json
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTRODUCTION = """\
What GPT-2 in JAX and Ray Train does on this machine, found out by `bash ci/verify.sh`. A \
check that passes has found what was expected. What is measured has no expectation."""


def as_row(cells) -> str:
    """A row of a Markdown table."""
    cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(cells)} |"


def as_markdown(report: dict) -> str:
    """The report for a person who has never seen the project, and its row in the page."""
    versions = ", ".join(f"{name} {x}" for name, x in report["versions"].items())
    keys = ["what", "expected", "found", "result"]
    rows = [[row[key] for key in keys] for row in sum(report["checks"].values(), [])]
    blocks = f"# {report['device']}: {tally(report)}", INTRODUCTION, versions
    lines = [as_row(keys), as_row(["---"] * 4), *map(as_row, rows)]
    return "\n\n".join([*blocks, "\n".join(lines), summary(report)]) + "\n"


def tally(report: dict) -> str:
    """How many checks passed, of how many, and how many were skipped."""
    results = [row["result"] for row in sum(report["checks"].values(), [])]
    passed, failed, skipped = map(results.count, ("pass", "fail", "skipped"))
    return f"{passed} of {passed + failed} passed, {skipped} skipped"


def summary(report: dict) -> str:
    """The report as a row of the table in benchmarks/README.md; a dash wasn't measured."""
    rows, versions = sum(report["checks"].values(), []), report["versions"]
    values = {row["what"]: row.get("value") for row in rows}
    speed, mfu = values.get("tokens/s"), values.get("MFU")
    shown = [name for name in ("python", "jax", "flax", "ray") if name in versions]
    cells = [report[key] for key in ("device", "configuration", "date")]
    cells += [", ".join(f"{name} {versions[name]}" for name in shown)]
    cells += [f"{speed:,.0f}" if speed else "-", f"{mfu:.0%}" if mfu else "-"]
    return as_row([*cells, tally(report)])


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

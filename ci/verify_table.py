"""Print the rows of the pages' table of what is verified, from reports of verify.py.

python ci/verify_table.py benchmarks/reports/*.json
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from verify import tally

REPORTS = Path(__file__).resolve().parent.parent / "benchmarks/reports"
HEADER = [
    "| device | configuration | date | versions | tokens/s | MFU | checks passed |",
    "|---|---|---|---|---|---|---|",
]
SHOWN = ("python", "jax", "flax", "ray")


def rows(paths: Iterable[Path] | None = None) -> list[str]:
    """A Markdown row for each report, in the order of their names, under `HEADER`.

    Args:
        paths: of report.json files; by default, those in benchmarks/reports.
    """
    paths = sorted(REPORTS.glob("*.json")) if paths is None else paths
    return [row(json.loads(Path(path).read_text())) for path in paths]


def row(report: dict) -> str:
    """The row of one report; what it hasn't measured is a dash."""
    passed, checks, skipped = tally(report)
    versions = report["versions"]
    step = {r["what"]: r.get("value") for r in report["parts"].get("step", [])}
    speed, mfu = step.get("tokens/s"), step.get("MFU")
    cells = [
        report["device"],
        report["configuration"],
        report["date"],
        ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions),
        f"{speed:,.0f}" if speed else "-",
        f"{mfu:.0%}" if mfu else "-",
        f"{passed} of {checks}" + (f", {skipped} skipped" if skipped else ""),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(*HEADER, *rows(map(Path, sys.argv[1:]) if sys.argv[1:] else None), sep="\n")

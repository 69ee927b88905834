"""Take the page's plots from an executed notebook, so that they come from a real run.

    bash ci/smoke.sh
    python ci/make_images.py [build/smoke/README.ipynb]

Writes images/loss.png and images/drill.png. Put the date of the run under them in the
notebook's text.
"""

import base64
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("loss.png", "drill.png")  # in the notebook's order


def main(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    plots = [
        o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})
    ]
    if len(plots) != len(NAMES):
        raise SystemExit(
            f"{path} has {len(plots)} plots, expected {len(NAMES)}: {NAMES}"
        )
    (ROOT / "images").mkdir(exist_ok=True)
    for name, plot in zip(NAMES, plots):
        (ROOT / "images" / name).write_bytes(base64.b64decode(plot))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/smoke/README.ipynb")

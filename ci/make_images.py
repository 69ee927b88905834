"""Take the page's plots from an executed notebook, so that they come from a real run.

    bash ci/smoke.sh
    python ci/make_images.py

writes images/loss.png and images/drill.png. Of a notebook that has run with another
configuration, such as configs/laptop.yaml, name the first plots yourself:

    python ci/make_images.py executed.ipynb laptop.png

Put the date of the run under them in the notebook's text.
"""

import base64
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("loss.png", "drill.png")  # in the notebook's order


def main(path: Path, names: tuple[str, ...]) -> None:
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    plots = [
        o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})
    ]
    if len(plots) < len(names):
        raise SystemExit(f"{path} has {len(plots)} plots, expected {names}")
    (ROOT / "images").mkdir(exist_ok=True)
    for name, plot in zip(names, plots):
        (ROOT / "images" / name).write_bytes(base64.b64decode(plot))


if __name__ == "__main__":
    path, *names = sys.argv[1:] or [ROOT / "build/smoke/README.ipynb"]
    main(Path(path), tuple(names) or NAMES)

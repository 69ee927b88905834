"""Draw the pages' diagrams: who calls whom, and how the model is divided.

    python ci/make_diagrams.py

Writes images/lanes.png and images/sharding.png. The second one asks the notebook's own
functions which device holds which part of each array, on eight simulated devices.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import matplotlib.pyplot as plt
from flax import nnx
from matplotlib.patches import Rectangle
from notebook_module import load_notebook

import trainkit.config
import trainkit.sharding

LANES = ["driver", "controller", "workers", "data tasks", "storage"]
WHAT = ["this notebook", "of one run", "with all devices", "Ray Data", ""]
CALLS = [  # from a lane, to a lane, what; a number begins a part of the story
    ("Launch", [(0, 1, "fit")]),
    ("Each start,\nalso after a failure", [(1, 2, "the loop"), (4, 2, "restore")]),
    (
        "Each step",
        [(4, 3, "windows"), (3, 2, "iter_batches"), (2, 2, "average gradients")],
    ),
    ("At checkpoints", [(2, 4, "save"), (2, 1, "report")]),
    ("At the end", [(1, 0, "result")]),
]
COLORS = {"Each step": "tab:orange"}  # the path that a run takes again and again


def draw_lanes(path: Path) -> None:
    """Which process calls which, from top to bottom."""
    figure, axes = plt.subplots(figsize=(8, 4))
    y = 0.0
    for part, calls in CALLS:
        top = y
        for start, end, what in calls:
            y -= 0.5
            color = COLORS.get(part, "tab:gray")
            arrow = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0}
            within = start == end  # among the processes of a lane
            if not within:
                axes.annotate("", (end, y), (start, y), arrowprops=arrow)
            edge = color if within else "none"
            axes.text(
                (start + end) / 2,
                y + 0.06,
                what,
                ha="center",
                va="bottom",
                size=9,
                bbox={"facecolor": "white", "edgecolor": edge, "pad": 3 * within + 0.5},
            )
        y -= 0.2
        axes.text(-1.4, (top + y) / 2, part, va="center", size=9)
    for x, (lane, what) in enumerate(zip(LANES, WHAT)):
        axes.plot([x, x], [0, y], color="lightgray", linewidth=1, zorder=-1)
        axes.text(x, 0.45, lane, ha="center", va="center", weight="bold")
        axes.text(x, 0.15, what, ha="center", va="center", size=8)
    axes.set(xlim=(-1.45, 4.4), ylim=(y - 0.05, 0.65))
    axes.axis("off")
    figure.savefig(path, dpi=130, bbox_inches="tight")


def draw_array(axes, name: str, shape: tuple, sharding, colors: dict) -> None:
    """The array as a rectangle, cut where devices divide it, with their numbers.

    The same devices have the same color in all arrays.
    """
    parts = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        parts.setdefault(bounds, []).append(device.id)
    rows, columns = shape
    for ((top, bottom), (left, right)), devices in parts.items():
        box = (left / columns, 1 - bottom / rows)
        width, height = (right - left) / columns, (bottom - top) / rows
        color = plt.cm.tab10(colors.setdefault(tuple(sorted(devices)), len(colors)))
        axes.add_patch(
            Rectangle(
                box, width, height, facecolor=color, alpha=0.35, edgecolor="black"
            )
        )
        label = ", ".join(map(str, sorted(devices)))
        middle = box[0] + width / 2, box[1] + height / 2
        axes.text(*middle, label, ha="center", va="center", size=9)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    by = [
        axis and "+".join([axis] if isinstance(axis, str) else axis)
        for axis in sharding.spec
    ]
    cuts = [f"{size:,} over {axis}" for size, axis in zip((rows, columns), by) if axis]
    axes.set_title("\n".join([name, *cuts, ""][:3]), size=9)
    axes.axis("off")


def draw_sharding(path: Path) -> None:
    tutorial = load_notebook()
    config = trainkit.config.TrainingConfig(
        devices_per_worker=8, fsdp=2, tensor_parallel=2, batch_size=8
    )
    mesh = trainkit.sharding.make_mesh(config)
    state = trainkit.sharding.abstract_state(tutorial.create_state, config, mesh)
    params = nnx.to_flat_state(state.params)
    params = {".".join(map(str, path)): value for path, value in params}
    batch = trainkit.sharding.batch_sharding(mesh)
    arrays = [("a batch of windows", (8, config.block_size + 1), batch)]
    for name in ("wte.embedding", "h.0.mlp.c_fc.kernel", "h.0.mlp.c_proj.kernel"):
        leaf = jax.tree.leaves(params[name])[0]
        arrays.append((name, leaf.shape, leaf.sharding))
    figure, axes = plt.subplots(1, len(arrays), figsize=(11, 2.9))
    shape = " x ".join(map(str, mesh.devices.shape))
    title = f"Devices 0 to 7, a mesh of {shape}, and the parts that they hold"
    figure.suptitle(title, size=11, y=1.15)
    colors = {}
    for axis, array in zip(axes, arrays):
        draw_array(axis, *array, colors)
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    draw_lanes(ROOT / "images/lanes.png")
    draw_sharding(ROOT / "images/sharding.png")

"""Draw images/lanes.png, the page's diagram of who calls whom, from top to bottom.

python ci/make_diagrams.py
"""

import matplotlib.pyplot as plt

LANES = ["driver", "controller", "workers", "storage"]
WHAT = ["this notebook", "of one run", "with all devices", ""]
CALLS = {  # a part of the story: from a lane, to a lane, what
    "Launch": [(0, 1, "fit")],
    "Start": [(1, 2, "the loop")],
    "Each step": [(2, 2, "average gradients")],
    "Every eighth step": [(2, 3, "save"), (2, 1, "report")],
    "A worker is killed": [
        (1, 2, "start all again"),
        (3, 2, "newest, restore"),
    ],
    "End": [(1, 0, "result")],
}

figure, axes = plt.subplots(figsize=(8, 4))
y = 0.0
for part, calls in CALLS.items():
    color = "tab:orange" if part == "A worker is killed" else "tab:gray"
    axes.text(-1.4, y - len(calls) / 4 - 0.15, part, va="center", size=9)
    for start, end, what in calls:
        y -= 0.5
        arrow = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0}
        if start != end:
            axes.annotate("", (end, y), (start, y), arrowprops=arrow)
        box = {"facecolor": "white", "edgecolor": color if start == end else "none"}
        middle = ((start + end) / 2, y + 0.06)
        axes.text(
            *middle, what, ha="center", va="bottom", size=9, bbox=box | {"pad": 2}
        )
    y -= 0.2
for x, (lane, what) in enumerate(zip(LANES, WHAT)):
    axes.plot([x, x], [0, y], color="lightgray", linewidth=1, zorder=-1)
    axes.text(x, 0.45, lane, ha="center", va="center", weight="bold")
    axes.text(x, 0.15, what, ha="center", va="center", size=8)
axes.set(xlim=(-1.45, 3.4), ylim=(y - 0.05, 0.65))
axes.axis("off")
figure.savefig("images/lanes.png", dpi=130, bbox_inches="tight")

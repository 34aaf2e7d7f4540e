"""Draws docs/figures/states.png from the states table: python docs/draw.py"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from shardwise.core.zero import ROWS, step_moves

RANKS = 4
BYTES = {"param": 2, "grad": 2, "optim": 12}
COLOURS = {"param": "#4c78a8", "grad": "#f58518", "optim": "#54a24b"}
NAMES = {"param": "parameter", "grad": "gradient", "optim": "optimizer state"}


def draw(path: Path) -> None:
    """One panel a row of the table; in it one bar a rank, bytes per parameter upwards."""
    figure, panels = plt.subplots(1, len(ROWS), figsize=(10, 3.2), sharey=True)
    for panel, (name, row) in zip(panels, ROWS.items(), strict=True):
        for rank in range(RANKS):
            bottom = 0.0
            for state, size in BYTES.items():
                placement = getattr(row, state)
                height = size * placement.share(RANKS)
                panel.bar(rank, height, 0.8, bottom, color=COLOURS[state])
                bottom += height
        numel = 1000
        sent = sum(move.sent for move in step_moves(row, numel, RANKS))
        volume = sent / numel * RANKS / (RANKS - 1)
        panel.set_title(f"{name}\n{bottom:g} bytes, sends {volume:g} $\\Psi$", fontsize=11)
        panel.set_xticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bytes per parameter on a rank")
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[state]) for state in BYTES]
    labels = [NAMES[state] for state in BYTES]
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(__file__).parent / "figures" / "states.png")

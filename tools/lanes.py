"""Draw the lanes of a Chrome trace that the engine wrote, rank 0's of several: one row per lane, one for the waits.

    python tools/lanes.py runs/trace.json lanes.png
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

COLOURS = {
    "gpu": "#3b7dd8",
    "adam": "#2a9d57",
    "nvme-read": "#e08e2b",
    "nvme-write": "#c2553d",
    "upload": "#8e6bbf",
    "download": "#b9a2d8",
    "comm": "#777777",
    "waits": "#999999",
}


def read_rows(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Lane -> (start, length) of each span in seconds from the first one, lanes without spans left out."""
    opened: Any = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        events = json.load(file)["traceEvents"]
    first = min(event["pid"] for event in events)
    names = {event["tid"]: event["args"]["name"] for event in events if event["pid"] == first and event["name"] == "thread_name"}
    spans = [event for event in events if event["pid"] == first and event["ph"] == "X"]
    begin = min(event["ts"] for event in spans)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in COLOURS}
    for event in spans:
        rows[names[event["tid"]]].append(((event["ts"] - begin) / 1e6, event["dur"] / 1e6))
    return {name: row for name, row in rows.items() if row}


def draw(rows: dict[str, list[tuple[float, float]]], out: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.45 * len(rows) + 1.1), layout="constrained")
    for at, (name, row) in enumerate(rows.items()):
        axes.broken_barh(row, (at - 0.35, 0.7), color=COLOURS[name], linewidth=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="a trace.json, gzipped or not")
    parser.add_argument("out", type=Path, help="the picture to write")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    draw(read_rows(args.trace), args.out, args.title)


if __name__ == "__main__":
    main()

"""The sweep as a picture: for each path and mode, rates over block size and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.tune.setting import Setting
from infinity.tune.sweep import Measured, Mode
from infinity.workload.notation import format_size

_PANEL_INCHES = (4.2, 3.2)
_GB_S = 1e9


def has_matplotlib() -> bool:
    """Whether a picture can be drawn; it is not among the package's requirements."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def save_heatmap(measured: Sequence[Measured], chosen: Setting, file: Path) -> None:
    """PNG of the rates with as many workers as `chosen` has, which is framed."""
    from matplotlib.figure import Figure  # draws without a display

    settings = [setting for setting in measured[0].settings() if setting.workers == chosen.workers]
    blocks, depths = (sorted({getattr(setting, name) for setting in settings}) for name in ("block_bytes", "depth"))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(Mode), height * len(measured)), layout="constrained")
    axes = figure.subplots(len(measured), len(Mode), squeeze=False)
    for row, path in zip(axes, measured, strict=True):
        for ax, mode in zip(row, Mode, strict=True):
            rates = {(one.block_bytes, one.depth): path.rate(one, mode) / _GB_S for one in settings}
            table = [[rates.get((block, depth)) for depth in depths] for block in blocks]
            _draw(ax, table, [format_size(block) for block in blocks], depths)
            ax.set_title(f"{path.path}: {mode}, GB/s, {chosen.workers} worker{'s' * (chosen.workers > 1)}", fontsize=9)
            if chosen in settings:
                place = (depths.index(chosen.depth) - 0.5, blocks.index(chosen.block_bytes) - 0.5)
                ax.add_patch(_frame(place))
    figure.savefig(file, dpi=110)


def _draw(ax: Any, table: Sequence[Sequence[float | None]], blocks: Sequence[str], depths: Sequence[int]) -> None:
    fastest = max(rate for row in table for rate in row if rate is not None)
    ax.imshow([[float("nan") if rate is None else rate for rate in row] for row in table], cmap="Blues", aspect="auto", vmax=1.2 * fastest)
    ax.set_xticks(range(len(depths)), depths)
    ax.set_yticks(range(len(blocks)), blocks)
    ax.set_xlabel("depth")
    for y, row in enumerate(table):
        for x, rate in enumerate(row):
            if rate is not None:
                ax.text(x, y, f"{rate:.2f}", ha="center", va="center", color="black", fontsize=8)


def _frame(place: tuple[float, float]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(place, 1, 1, fill=False, edgecolor="red", linewidth=2)

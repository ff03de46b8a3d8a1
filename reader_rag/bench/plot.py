"""Plots of the benches, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reader_rag.bench.systems import READER
from reader_rag.errors import MissingExtraError

OURS, THEIRS = "#c0392b", "#7f8c8d"


def plot_peers(results: Sequence[dict[str, Any]], file: str | Path) -> Path:
    """Tokens per pass by system with 95 % intervals over prompts, a panel for each result; speed-ups below where a model ran."""
    figure, grid = _panels(2 if any(_timed(result) for result in results) else 1, len(results))
    for column, result in enumerate(results):
        entries = {**result["peers"], READER: result["reader"]}
        names = sorted(entries, key=lambda name: float(entries[name]["tokens_per_pass"]))
        head = f"width {result['width']}, {result['rows']} prompts\n{result['learning']}"
        values = [entries[name]["tokens_per_pass"] for name in names]
        _bars(grid[0][column], names, values, [entries[n]["ci95"] for n in names], "tokens per pass", head)
        if _timed(result):
            timed = [name for name in names if entries[name]["speedup_vs_generate"] is not None]
            speeds = [entries[name]["speedup_vs_generate"] for name in timed]
            spans = [entries[name]["speedup_ci95"] for name in timed]
            _bars(grid[1][column], timed, speeds, spans, "times the speed of generate", "")
    return _save(figure, file)


def plot_curve(result: dict[str, Any], file: str | Path) -> Path:
    """Tokens per pass over the number of requests seen before; the first point has seen none."""
    figure, grid = _panels(1, 1)
    axes = grid[0][0]
    seen = [point["seen"] for point in result["points"]]
    axes.plot(seen, [point["tokens_per_pass"] for point in result["points"]], marker="o", color=OURS)
    axes.set_xscale("symlog", linthresh=1)
    ticks = [count for count in seen[:-1] if 1.5 * count < seen[-1]] + seen[-1:]  # the last two may lie close
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.minorticks_off()
    axes.set_xlabel("other requests seen before")
    axes.set_ylabel("tokens per pass")
    axes.set_title(f"{result['tests']} test answers, width {result['width']}")
    axes.grid(alpha=0.3)
    return _save(figure, file)


def _timed(result: dict[str, Any]) -> bool:
    return result["reader"]["speedup_vs_generate"] is not None


def _bars(
    axes: Any, names: Sequence[str], values: Sequence[float], spans: Sequence[Any], label: str, head: str
) -> None:
    low = [max(value - span[0], 0.0) for value, span in zip(values, spans, strict=True)]
    high = [max(span[1] - value, 0.0) for value, span in zip(values, spans, strict=True)]
    colours = [OURS if name == READER else THEIRS for name in names]
    axes.barh(names, values, xerr=[low, high], color=colours, capsize=3, height=0.7)
    axes.set_xlim(left=min(1.0, *values) if values else 1.0)
    axes.set_xlabel(label)
    axes.set_title(head, fontsize=9)
    axes.grid(axis="x", alpha=0.3)


def _panels(rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            'plots need matplotlib, which is not installed: pip install "reader-rag[bench]"'
        ) from error
    figure = Figure(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, file: str | Path) -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path

"""The rows as a table and as a plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.quality.results import Row
from benchmarks.quality.setting import Setting

__all__ = ["plot", "shown", "table"]

STARTS = ("scratch", "continued")
REDUCTIONS = (400, 4000)


def shown(rows: Sequence[Row], start: str, clusters: int, seed: int) -> list[str]:
    """The settings that matter: dense at its best learning rate, the best at 400 and the best at 4,000 times fewer bytes."""
    group = [row for row in rows if (row["start"], row["clusters"], row["seed"]) == (start, clusters, seed)]
    dense = [row for row in group if Setting.parse(row["setting"]).dense]
    groups = [dense, *([row for row in group if row["reduction"] >= reduction] for reduction in REDUCTIONS)]
    return list(dict.fromkeys(min(rows, key=lambda row: row["eval_loss"])["setting"] for rows in groups if rows))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown lines: a setting and number of clusters per line, ordered by reduction; means over the seeds."""
    groups: dict[tuple[int, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["clusters"], row["setting"]][row["start"]].append(row)
    order = sorted(groups, key=lambda key: (key[0], _reduction(groups[key]), key[1]))
    yield "| clusters | setting | fewer bytes | from scratch | continued | seeds |"
    yield "|---|---|---|---|---|---|"
    for clusters, setting in order:
        found = groups[clusters, setting]
        seeds = max(len(rows) for rows in found.values())
        cells = " | ".join(_gap(found.get(start, [])) for start in STARTS)
        yield f"| {clusters} | `{setting}` | {_times(_reduction(found))} | {cells} | {seeds} |"


def _reduction(found: dict[str, list[Row]]) -> float:
    """The smallest, over starts and seeds: what may be claimed."""
    return min(row["reduction"] for rows in found.values() for row in rows)


def _times(reduction: float) -> str:
    return f"{reduction:,.0f}x" if reduction > 0.95 else f"{reduction:.1f}x"  # all-to-all sends more than a ring


def _gap(rows: Sequence[Row]) -> str:
    gaps = [row["gap_percent"] for row in rows if row["gap_percent"] is not None]
    if not gaps:
        return "-"
    if not any(gaps) and Setting.parse(rows[0]["setting"]).dense:
        return f"loss {mean(row['eval_loss'] for row in rows):.4f}"
    spread = f" ({min(gaps):+.2f} to {max(gaps):+.2f})" if len(gaps) > 1 else ""
    return f"{mean(gaps):+.2f} %{spread}"


def plot(rows: Sequence[Row], path: Path, clusters: int, seed: int) -> None:
    """Loss over tokens from scratch for dense and the best found, and all final gaps over reduction.

    Raises:
        ImportError: matplotlib is missing (the extra ``notebook`` has it).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [row for row in rows if (row["clusters"], row["seed"]) == (clusters, seed)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    named = shown(rows, "scratch", clusters, seed)
    for row in chosen:
        if row["start"] == "scratch" and row["setting"] in named:
            tokens, losses = zip(*row["curve"], strict=True)
            left.plot(tokens, losses, label=f"{row['setting']} ({row['reduction']:,.0f}x)")
    left.set(xlabel="tokens (bytes of text), all clusters", ylabel="held-out loss, nats per byte", title="From scratch")
    left.legend(fontsize=7)
    for start, marker in zip(STARTS, "os", strict=True):
        points = [row for row in chosen if row["start"] == start and row["gap_percent"] is not None]
        right.scatter(
            [row["bytes_sent"] / row["parameters"] / row["steps"] for row in points],
            [row["gap_percent"] for row in points],
            marker=marker,
            label={"scratch": "from scratch", "continued": "continued from dense"}[start],
        )
    right.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    for reduction in REDUCTIONS:
        right.axvline(4 / reduction, color="grey", linewidth=0.8, linestyle=":")
    right.set(
        xscale="log",
        yscale="symlog",
        xlabel="bytes per cluster, parameter and step (dotted: 400x, 4,000x)",
        ylabel="final loss above dense, %",
        title="Final gap over bytes",
    )
    right.set_yticks(ticks := [-1, 0, 1, 2, 5, 10, 20, 50], [str(tick) for tick in ticks])
    right.set_ylim(bottom=-1)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

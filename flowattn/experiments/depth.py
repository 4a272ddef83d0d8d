"""How deep can a character model be trained at a fixed learning rate? Dot products against distances.

    python -m flowattn.experiments depth --data PATH [--depths 2 4 8 16] [--rungs dot_product l2_tied_A ...]

Every rung is trained with LayerNorm and without, at every depth, by the same fixed rate after the same warm-up. Writes
DIR/results/depth.csv, one CSV per run, and DIR/figures/depth.png. Runs that ended are not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from flowattn.experiments._lab import COLORS, MARKERS, Row, save_figure, write_csv
from flowattn.experiments._language import add_options, make_quick, make_run, run_all
from flowattn.experiments.ladder import Results, show
from flowattn.models import RUNGS


def summary(results: Results) -> list[Row]:
    """One row per rung, norm and depth: the mean over the seeds that came to an end, and how many did not."""
    rows: list[Row] = []
    groups: dict[tuple[str, bool, int, float], list[float]] = {}
    for run, outcome in results:
        groups.setdefault((run.rung, run.layer_norm, run.layers, run.rate), []).append(outcome.val_nll)
    for (rung, layer_norm, layers, rate), losses in groups.items():
        ended = [loss for loss in losses if math.isfinite(loss)]
        rows.append(
            {
                "rung": rung,
                "layer_norm": int(layer_norm),
                "layers": layers,
                "rate": rate,
                "seeds": len(losses),
                "diverged": len(losses) - len(ended),
                "val_nll": statistics.fmean(ended) if ended else math.nan,
            }
        )
    return rows


def plot(rows: Sequence[Row]) -> Figure:
    """The loss against depth, one line per rung and rate, dashed without LayerNorm. Runs that diverged are missing."""
    figure, ax = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
    rungs, rates = (list(dict.fromkeys(row[name] for row in rows)) for name in ("rung", "rate"))
    for (k, rung), layer_norm, rate in itertools.product(enumerate(rungs), (1, 0), rates):
        line = [row for row in rows if (row["rung"], row["layer_norm"], row["rate"]) == (rung, layer_norm, rate)]
        line.sort(key=lambda row: row["layers"])
        if line:
            depths, losses = ([float(row[name]) for row in line] for name in ("layers", "val_nll"))
            label = f"{rung}, {'LayerNorm' if layer_norm else 'no LayerNorm'}"
            label += f", rate {rate:g}" if len(rates) > 1 else ""
            ax.plot(depths, losses, color=COLORS[k % len(COLORS)], marker=MARKERS[k % len(MARKERS)], label=label,
                    linestyle="-" if layer_norm else "--")  # fmt: skip
    ax.set_xscale("log", base=2)
    depths = sorted({float(row["layers"]) for row in rows})
    ax.set_xticks(depths, [f"{depth:g}" for depth in depths])
    ax.set_xlabel("layers")
    ax.set_ylabel("validation, nats per character")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flowattn.experiments depth", description=__doc__.partition("\n")[0]
    )
    chosen = ["dot_product", "l2_tied", "contractive_token", "invertible"]
    parser.add_argument("--rungs", nargs="+", choices=list(RUNGS), default=chosen)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16])
    add_options(parser)
    options = parser.parse_args(arguments)
    make_quick(options)
    if options.quick:
        options.depths = options.depths[:2]

    norms = [(rung, norm) for rung in options.rungs for norm in (True, False) if not (norm and rung == "invertible")]
    runs = [
        make_run(
            options,
            rung=rung,
            layers=layers,
            seed=seed,
            rate=rate,
            schedule="fixed",
            layer_norm=layer_norm,
            position=None,
        )
        for layers, (rung, layer_norm), rate, seed in itertools.product(
            options.depths, norms, options.rates, options.seeds
        )
    ]
    rows = summary(run_all(runs, options, "depth"))
    write_csv(options.out / "results" / "depth.csv", rows)
    save_figure(options.out / "figures" / "depth.png", lambda: plot(rows))
    show(f"depth on {runs[0].text}: validation nats per character", rows)

"""Command line of the scripts that draw figures of the results."""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.core.report import environment


def write_pictures(
    benchmark: str, draw: Callable[[bool], Mapping[str, Figure]], argv: Sequence[str] | None = None, *, num_threads: int
) -> None:
    """Fit and write figures, with the options of a command line.

    :param benchmark: name of the benchmark, with which the names of the files begin.
    :param draw: function that returns figures by name; its argument is the option ``--quick``.
    :param argv: arguments; those of the process by default.
    :param num_threads: number of threads of torch.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.tasks.{benchmark}_pictures")
    parser.add_argument("--quick", action="store_true", help="take few steps, to check that it runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the pictures")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    torch.set_num_threads(num_threads)
    print(f"    {shlex.join([*parser.prog.split(), *argv])}\n\n{environment()}", flush=True)
    figures = draw(options.quick)
    for name, figure in figures.items():
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        path = options.out / f"{benchmark}_{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(f"wrote {path}")

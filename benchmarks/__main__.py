"""Command line of the benchmarks: ``python -m benchmarks NAME``; ``--list`` lists names, ``--help`` options."""

import argparse
import importlib
import inspect
import math
import pkgutil
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import benchmarks
from benchmarks import tasks
from benchmarks.core.report import Measurement, aggregate, environment, to_markdown, write_json


def find_benchmarks() -> dict[str, ModuleType]:
    """Find the modules of ``benchmarks.tasks`` that define ``run``, by name."""
    names = [info.name for info in pkgutil.iter_modules(tasks.__path__)]
    modules = {name: importlib.import_module(f"benchmarks.tasks.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "run")}


def main(argv: Sequence[str] | None = None, known: Mapping[str, ModuleType] | None = None) -> None:
    """Run the benchmark that the command line names, and print its table.

    A benchmark is a module with a docstring, ``run(*, quick, seeds)`` that yields a Measurement for each seed and metric,
    ``PUBLISHED`` rows for comparison, ``NOTES`` on how to read the table, and ``NUM_THREADS`` for torch; ``NUM_SEEDS``, if it
    is there, is the default of ``--seeds``, and ``run`` may have arguments ``minutes`` and ``picture``.  A benchmark of
    several parts has ``TASKS``, the names of the parts or a dictionary by name, and an argument ``only`` of ``run``.

    :param argv: arguments; those of the process by default.
    :param known: benchmarks by name; those of this package by default.
    :raises SystemExit: with code 2 for an unknown name or bad arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    known = find_benchmarks() if known is None else known
    parser = _make_parser()
    args = parser.parse_args(argv)
    listing = "\n".join(f"{name:15} {(module.__doc__ or '').splitlines()[0]}" for name, module in known.items())
    if args.list:
        print(listing)
        return
    if args.name not in known:
        parser.error(f"expected NAME to be one of these, got {args.name!r}:\n{listing}")
    benchmark = known[args.name]
    options = _options_of_run(parser, args, benchmark)
    torch.set_num_threads(benchmark.NUM_THREADS)
    print(f"    python -m benchmarks {shlex.join(argv)}\n\n{environment()}\n", flush=True)
    measurements: list[Measurement] = []
    try:
        for measurement in benchmark.run(**options):
            measurements.append(measurement)
    finally:  # report the measurements made before an error or Ctrl-C
        _report(benchmark, measurements, args.json)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the benchmark to run")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed, to check that it runs")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds; 3 for most, 1 with --quick")
    parser.add_argument("--only", metavar="PART", help="one part of a benchmark of several")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device to fit on, for benchmarks that can use a GPU")
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="duration, for benchmarks of a given duration")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the rows, for benchmarks that can")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    return parser


def _minutes(text: str) -> float:
    """Convert an argument to a duration."""
    if not 0.0 <= (minutes := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return minutes


def _options_of_run(parser: argparse.ArgumentParser, args: argparse.Namespace, benchmark: ModuleType) -> dict[str, Any]:
    """Check the command line, and return the arguments of ``benchmark.run``."""
    seeds = args.seeds if args.seeds is not None else (1 if args.quick else getattr(benchmark, "NUM_SEEDS", 3))
    if seeds < 1:
        parser.error(f"expected --seeds of 1 or more, got {seeds}")
    for name in ("json", "picture"):
        path = getattr(args, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"expected --{name} in a folder that exists, got {str(path)!r}; make the folder first")
    parts = list(getattr(benchmark, "TASKS", ()))
    if args.only is not None and args.only not in parts:
        parser.error(f"expected --only to be one of {parts} for {args.name}, got {args.only!r}")
    parameters = inspect.signature(benchmark.run).parameters
    if args.device is not None and "device" not in parameters:
        parser.error(f"expected no --device for {args.name}, which runs on the CPU, got {args.device!r}")
    device = args.device or ("device" in parameters and parameters["device"].default)
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"expected a GPU for {args.name}, got none; use --device cpu, or see torch.cuda.is_available()")
    for name in ("minutes", "picture"):
        if getattr(args, name) is not None and name not in parameters:
            parser.error(f"expected no --{name} for {args.name}, got {str(getattr(args, name))!r}")
    optional = {"only": args.only, "device": args.device, "minutes": args.minutes, "picture": args.picture}
    return {"quick": args.quick, "seeds": seeds} | {name: value for name, value in optional.items() if value is not None}


def _report(benchmark: ModuleType, measurements: Sequence[Measurement], json: Path | None) -> None:
    """Print the table with published rows and notes; write the rows to a file if one is given."""
    rows = aggregate(measurements)
    measured = {row.dataset for row in rows}
    rows += [row for row in benchmark.PUBLISHED if row.dataset in measured]
    print(f"{to_markdown(rows)}\n\n{benchmark.NOTES}")
    if json is not None:
        write_json(rows, json)


if __name__ == "__main__":
    main()

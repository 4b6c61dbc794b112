"""The one front door: ``python -m benchmarks NAME``, with options that ``--help`` lists, or ``--list``."""

import argparse
import importlib
import inspect
import pkgutil
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

import benchmarks
from benchmarks import tasks
from benchmarks.core.report import Measurement, aggregate, environment, to_markdown, write_json


def find_benchmarks() -> dict[str, ModuleType]:
    """The modules of this package that have a ``run``, by name."""
    names = [info.name for info in pkgutil.iter_modules(tasks.__path__)]
    modules = {name: importlib.import_module(f"benchmarks.tasks.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "run")}


def main(argv: Sequence[str] | None = None, known: Mapping[str, ModuleType] | None = None) -> None:
    """Run the benchmark that the command line names, and print its table.

    A benchmark is a module with a docstring, ``run(*, quick, seeds)`` that yields a Measurement for each seed and metric,
    ``PUBLISHED`` rows to set beside them, ``NOTES`` on how to read the table, and ``NUM_THREADS`` for torch.  One of several
    parts has them by name in ``TASKS``, and its ``run`` takes ``only``.

    :param argv: arguments; those of the process by default.
    :param known: benchmarks by name; those of this package by default.
    :raises SystemExit: with code 2 for an unknown name or bad arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the benchmark to run")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed: does it run?")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds; 3, or 1 with --quick")
    parser.add_argument("--only", metavar="PART", help="one part of a benchmark of several")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where to fit, of benchmarks that can use a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    args = parser.parse_args(argv)

    known = find_benchmarks() if known is None else known
    listing = "\n".join(f"{name:15} {(module.__doc__ or '').splitlines()[0]}" for name, module in known.items())
    if args.list:
        print(listing)
        return
    if args.name not in known:
        parser.error(f"expected NAME to be one of these, got {args.name!r}:\n{listing}")
    seeds = args.seeds if args.seeds is not None else (1 if args.quick else 3)
    if seeds < 1:
        parser.error(f"expected --seeds of 1 or more, got {seeds}")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"expected --json in a folder that exists, got {str(args.json)!r}; make the folder first")

    benchmark = known[args.name]
    parts = list(getattr(benchmark, "TASKS", ()))
    if args.only is not None and args.only not in parts:
        parser.error(f"expected --only to be one of {parts} for {args.name}, got {args.only!r}")
    takes = inspect.signature(benchmark.run).parameters
    if args.device is not None and "device" not in takes:
        parser.error(f"expected no --device for {args.name}, which runs on the CPU, got {args.device!r}")
    device = args.device or ("device" in takes and takes["device"].default)
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"expected a GPU for {args.name}, got none; use --device cpu, or see torch.cuda.is_available()")
    told = {"only": args.only, "device": args.device}
    options = {"quick": args.quick, "seeds": seeds} | {name: value for name, value in told.items() if value is not None}
    torch.set_num_threads(benchmark.NUM_THREADS)
    print(f"    python -m benchmarks {shlex.join(argv)}\n\n{environment()}\n", flush=True)
    measurements: list[Measurement] = []
    try:
        for measurement in benchmark.run(**options):
            measurements.append(measurement)
    finally:  # what was measured before an error or Ctrl-C is not lost
        rows = aggregate(measurements)
        rows += [row for row in benchmark.PUBLISHED if row.dataset in {measured.dataset for measured in rows}]
        print(f"{to_markdown(rows)}\n\n{benchmark.NOTES}")
        if args.json is not None:
            write_json(rows, args.json)


if __name__ == "__main__":
    main()

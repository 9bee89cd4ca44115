"""Runs benchmarks one after the other and prints their tables.

python -m tests.benchmarks                 # all
python -m tests.benchmarks start recovery  # some
python -m tests.benchmarks data --jpeg     # its own options: see bench_data.py
python -m tests.benchmarks --quick         # fewer rounds, to see that they run
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import platform

from tests.benchmarks.table import show


def names() -> list[str]:
    here = pathlib.Path(__file__).parent
    return sorted(path.stem.removeprefix("bench_") for path in here.glob("bench_*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names())}; none: all")
    parser.add_argument("--quick", action="store_true")
    asked, more = parser.parse_known_args()
    if more and asked.names != ["data"]:
        parser.error(f"{' '.join(more)}: only data takes options of its own, and only when it is run alone")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, Python {platform.python_version()}")
    for name in asked.names or names():
        module = importlib.import_module(f"tests.benchmarks.bench_{name}")
        print(f"\n## {name}: {(module.__doc__ or '').splitlines()[0]}")
        show(module.run(asked.quick, more) if more else module.run(asked.quick))


if __name__ == "__main__":
    main()

"""Runs experiments by name: ``python -m flowattn.experiments NAME ...``, or ``all``."""

import argparse
import importlib
import pkgutil

from flowattn import experiments


def main() -> None:
    known = [m.name for m in pkgutil.iter_modules(experiments.__path__) if not m.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="python -m flowattn.experiments")
    parser.add_argument("names", nargs="+", choices=[*known, "all"])
    names = parser.parse_args().names
    for name in known if "all" in names else names:
        importlib.import_module(f"flowattn.experiments.{name}").main()


if __name__ == "__main__":
    main()

"""Runs experiments by name: ``python -m flowattn.experiments NAME [options of NAME]``, or ``all``."""

import argparse
import importlib
import pkgutil

from flowattn import experiments


def main() -> None:
    known = [m.name for m in pkgutil.iter_modules(experiments.__path__) if not m.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="python -m flowattn.experiments")
    parser.add_argument("name", choices=[*known, "all"])
    parser.add_argument("options", nargs=argparse.REMAINDER, help="those of the experiment; all takes none")
    chosen = parser.parse_args()
    if chosen.name == "all" and chosen.options:
        parser.error(f"all takes no options; got {' '.join(chosen.options)}")
    for name in known if chosen.name == "all" else [chosen.name]:
        importlib.import_module(f"flowattn.experiments.{name}").main(chosen.options)


if __name__ == "__main__":
    main()

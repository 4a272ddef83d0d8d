"""Runs experiments by name: ``python -m flowattn.experiments NAME [options of NAME]``, or ``all`` but the long ones."""

import argparse
import importlib
import pkgutil

from flowattn import experiments

#: They train for hours; `all` leaves them out.
LONG = ("depth", "ladder", "recover")


def main() -> None:
    known = [m.name for m in pkgutil.iter_modules(experiments.__path__) if not m.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="python -m flowattn.experiments")
    parser.add_argument("name", choices=[*known, "all"], help=f"all runs each but {', '.join(LONG)}")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="those of the experiment, `--help` lists them; all takes none"
    )
    chosen = parser.parse_args()
    if chosen.name == "all" and chosen.options:
        parser.error(f"all takes no options; got {' '.join(chosen.options)}")
    for name in [n for n in known if n not in LONG] if chosen.name == "all" else [chosen.name]:
        importlib.import_module(f"flowattn.experiments.{name}").main(chosen.options)


if __name__ == "__main__":
    main()

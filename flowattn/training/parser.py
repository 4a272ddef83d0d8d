"""The parser of the command line: own titles, no abbreviations, and short answers."""

from __future__ import annotations

import re
from pydoc import locate
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from pytorch_lightning.cli import LightningArgumentParser

TITLES = {
    "trainer": "How it is trained",
    "model": "What is trained: a density of sequences, or a language model",
    "data": "What it is trained on, such as files of your own (--data.help ArraySequences)",
}
#: Lines that say how jsonargparse went about it.
NOISE = (
    *("Subtypes:", "Does not validate against", "Errors:", "Given value type:", "Expected a <class 'NoneType'>"),
    *("Given value: Namespace(", "Given value: NestedArg(", "Given value: {"),
)


class ShortParser(LightningArgumentParser):
    """Answers a mistake with what is wrong, not with a page of options and types."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def add_argument_group(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        return super().add_argument_group(*([TITLES[name]] if name in TITLES else args), name=name, **kwargs)

    def print_usage(self, file: Any = None) -> None:
        pass

    def error(self, message: str, *args: Any) -> NoReturn:
        super().error(shortened(message), *args)


def shortened(message: str) -> str:
    r"""What jsonargparse says about a mistake, without what it looks like inside.

    Example:
        >>> shortened("Problem with class_path 'flowattn.training.EMA':\n  Option 'decoy' is not accepted")
        "EMA has no option 'decoy'. It has decay."
    """
    if re.search(r"arguments are required: \w+\.(data|model)\b", message):
        return (
            "a config must say what is trained on what: add --config configs/NAME.yaml. `python train.py` lists them."
        )
    found = re.search(r"\w+ has no option '\w+'\. It has [^.]*\.", message)  # by a parser inside this one
    if found:
        return found[0]
    found = re.search(
        r"Option '(?P<key>\w+)' is not accepted\. Got value: Namespace\(class_path='(?P<of>[\w.]+)'", message
    )
    found = found or re.search(r"class_path '(?P<of>[\w.]+)':\s+Option '(?P<key>\w+)' is not accepted", message)
    kind: Any = found and locate(found["of"])
    if found and kind:
        names = ArgumentParser().add_class_arguments(kind, skip={"event_shape"}, fail_untyped=False)
        return f"{kind.__name__} has no option {found['key']!r}. It has {', '.join(names)}."
    lines = [line.partition(". Got value: Namespace(")[0] for line in message.splitlines() if line.strip()]
    return "\n".join(line for line in lines if not any(part in line for part in NOISE))

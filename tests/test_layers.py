"""Imports point down the list of layers, so that the package can be read from the top."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowattn"

CORE = [
    "checks",
    "kernels",
    "attention",
    "lipschitz",
    "contractions",
    "logdet",
    "inverse",
    "context",
    "distributions",
    "transforms",
    "flows",
    "__init__",
    "testing",
]
LAYERS = [*CORE, "metrics", "models", "data", "training", "cli", "experiments"]
NOT_IN_CORE = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"}


def layer(module: str) -> str:
    """The layer of a dotted name; the package itself is the layer `__init__`."""
    return [*module.split("."), "__init__"][1]


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The absolute names a module imports, at any depth; `package` is where relative ones start."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            for alias in node.names:
                is_layer = base == "flowattn" and alias.name in LAYERS
                yield f"{base}.{alias.name}" if is_layer else base


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What `module`, dotted and with this source, imports against the rules."""
    own = layer(module)
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for name in imported(ast.parse(source), package):
        if name.split(".")[0] == "flowattn" and layer(name) not in LAYERS[: LAYERS.index(own) + 1]:
            found.append(f"{module} imports {name}, which is no earlier layer")
        if own in CORE and name.split(".")[0] in NOT_IN_CORE:
            found.append(f"{module} imports {name}, which the core does without")
    return found


def test_every_import_points_down_the_layers():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        assert layer(module) in LAYERS, f"{module} is in no layer"
        found += violations(path.read_text(), module, is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import flowattn.flows",
        "import flowattn",
        "from flowattn import L2SelfAttention",
        "from flowattn import flows",
        "from flowattn.transforms.residual import Residual",
        "from ..transforms import Residual",
        "from .. import transforms",
        "from ..transforms import residual as attention",
        "def f():\n    from ..flows import flow",
        "if TYPE_CHECKING:\n    import flowattn.experiments.demo",
        "import torchmetrics",
        "from pytorch_lightning.callbacks import Callback",
    ],
)
def test_an_import_against_the_layers_is_found(source):
    assert len(violations(source, "flowattn.lipschitz.bounds")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch, flowattn.attention",
        "from flowattn.attention import l2_attention",
        "from ..attention import l2_attention",
        "from .. import attention",
        "from . import norms",
        "from .norms import token_norm",
        "from flowattn.lipschitz import flows",
    ],
)
def test_an_import_along_the_layers_is_allowed(source):
    assert not violations(source, "flowattn.lipschitz.bounds")


def test_relative_imports_of_a_package_start_from_itself():
    assert not violations("from .flows import bound", "flowattn.lipschitz", is_package=True)
    assert violations("from ..flows import flow", "flowattn.lipschitz", is_package=True)
    assert not violations("from .flows import flow", "flowattn", is_package=True)
    assert violations("from .training import Module", "flowattn", is_package=True)

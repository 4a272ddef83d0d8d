"""Every python block in the README and the docs runs, and every `make` command exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(*languages: str) -> list:
    return [
        pytest.param(match[2], id=f"{page.name}:{page.read_text().count(chr(10), 0, match.start()) + 1}")
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[1] in languages
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_block_runs(code, request):
    exec(compile(code, request.node.callspec.id, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("code", blocks("sh", "bash", "shell", "console"))
def test_make_targets_of_a_shell_block_exist(code):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([a-z-]+)", code)
    assert set(named) <= set(targets)


def test_the_readme_has_an_example_and_commands():
    assert any(block.id.startswith("README") for block in blocks("python"))
    assert any("make test" in block.values[0] for block in blocks("sh"))

"""The demonstration of the certified inverse, in small."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "flowattn.experiments",
            "demo",
            "--samples",
            "4",
            "--tokens",
            "8",
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_certified_error_covers_the_true_one_at_every_stage():
    finished = run()
    assert finished.returncode == 0, finished.stderr
    rows = [line.strip("│ ").split("│") for line in finished.stdout.splitlines() if line.startswith("│")]
    steps, certified, true = zip(*((int(a), float(b), float(c)) for a, b, c in rows), strict=True)
    assert len(steps) > 3
    assert all(c >= 0.9 * t for c, t in zip(certified, true, strict=True))  # printed to two digits
    assert certified[-1] <= 1e-10


def test_too_few_steps_are_an_error():
    finished = run("--max_steps", "1")
    assert finished.returncode != 0
    assert "Raise --max_steps" in finished.stderr

"""Every benchmark runs: those of speed on tiny shapes to the end, those that train as far as their help."""

import importlib

import pytest

from benchmarks import attention, lipschitz, residual, spectral

SMALL = {
    attention: {"SHAPES": [(2, 3, 4, 2)], "LENGTHS": [16]},
    lipschitz: {"SHAPES": [(3, 2, 1), (2, 2, 1)], "STEPS": 2, "RESTARTS": 2},
    residual: {
        "CAUSAL": [(2, 3, 4, 2)],
        "DENSE": [(2, 3, 2, 1)],
        "LARGE": (2, 3, 4, 2),
        "LIFTED": (2, 3, 2, 2),
        "GROWTH": [(2, 3, 4, 2)],
    },
    spectral: {"SIZES": [8]},
}


@pytest.mark.parametrize("benchmark", SMALL, ids=lambda module: module.__name__)
def test_a_benchmark_of_speed_prints_a_row_for_each_shape(benchmark, monkeypatch, capsys):
    for name, value in SMALL[benchmark].items():
        monkeypatch.setattr(benchmark, name, value)
    benchmark.main(rounds=1)
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line for line in tables if line[2].isdigit() or line.startswith(("| L2", "| dot"))]
    assert len(rows) >= sum(len(shapes) for shapes in SMALL[benchmark].values() if isinstance(shapes, list))


@pytest.mark.parametrize("name", ["characters", "particles", "sequences"])
def test_a_benchmark_that_trains_says_how_it_is_used(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "usage" in capsys.readouterr().out

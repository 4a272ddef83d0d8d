"""Checks shapes at run time in the maths modules, and gives every test the same seed."""

import os

import jaxtyping
import pytest
import torch

MATHS = ("kernels.dot_products", "kernels.fused_l2", "kernels.diagonal", "kernels.pairs", "attention", "lipschitz")
jaxtyping.install_import_hook([f"flowattn.{name}" for name in MATHS], "beartype.beartype")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def without_shape_checks():
    """For tests of torch.compile, which cannot trace the checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)

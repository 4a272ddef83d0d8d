r"""Solves y = x + f(x) for a contraction f, sample by sample, with a certified error.

.. math:: |x_k - x| \le \frac{|y - x_k - f(x_k)|}{1 - L} \quad\text{for any } x_k

The plain iteration :math:`x \leftarrow y - f(x)` always converges, if slowly. Faster steps are tried first: Newton's on
each token where f is tokenwise (the diagonal blocks are then the whole Jacobian), Anderson's otherwise. A step that
does not bring a sample closer is replaced by a plain one, so the guarantee of the plain iteration is kept.
"""

from flowattn.inverse.gradient import invert
from flowattn.inverse.iteration import InverseNotConverged, Solution
from flowattn.inverse.solver import Solver

__all__ = ["InverseNotConverged", "Solution", "Solver", "invert"]

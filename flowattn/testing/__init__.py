"""The contract of a transform of nflows, as a function to run on ours and on yours.

    from flowattn.testing import check_transform

    def test_my_transform():
        check_transform(lambda: MyTransform(3), event_shape=(5, 3))

Each check is a function in `CHECKS`, and its name says what it asks for.
"""

from flowattn.testing.case import ContractViolation
from flowattn.testing.checks import CHECKS
from flowattn.testing.contract import check_transform

__all__ = ["CHECKS", "ContractViolation", "check_transform"]

"""log|det(I + J)| of a residual map x + f(x): exact, by power series, or unbiased by Russian roulette."""

from flowattn.logdet.auto import AutoLogDet
from flowattn.logdet.base import LogDet
from flowattn.logdet.exact import ExactLogDet
from flowattn.logdet.series import PowerSeries, RussianRoulette

__all__ = ["AutoLogDet", "ExactLogDet", "LogDet", "PowerSeries", "RussianRoulette"]

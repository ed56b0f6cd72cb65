"""Which prices a cluster is planned with: measured on the device at hand where it says so, else the model."""

from collections.abc import Callable

from shardwright.ir import Cluster
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.prices import Prices
from shardwright.runtime.measured_prices import MeasuredPrices
from shardwright.runtime.profile_db import ProfileDb

__all__ = ["ERROR_FRACTION", "prices_for"]

ERROR_FRACTION = {True: 0.15, False: 0.3}
"""Half width of a prediction's error bar: measured prices against the steps of `benchmarks/peers.py`, and the model
against the operator tables of `benchmarks/cost_model.py`."""


def prices_for(cluster: Cluster, progress: Callable[[str], None] | None = None, *, measure: bool = True) -> Prices:
    """Prices of one rank of the cluster; with `measure` what is missing in the database is measured now."""
    if not cluster.device.measured:
        return AnalyticalPrices(cluster)
    return MeasuredPrices(cluster, ProfileDb(), measure=measure, progress=progress)

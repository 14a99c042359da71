"""The tuner: config space, cost model, records, measurement in processes that can be killed."""

from ecornn.tune.api import Result, tune

__all__ = ["Result", "tune"]

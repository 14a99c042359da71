"""The tuner: config space, cost model, records, measurement in processes that can be killed."""

from ecornn.tune.api import tune
from ecornn.tune.session import Result, Session

__all__ = ["Result", "Session", "tune"]

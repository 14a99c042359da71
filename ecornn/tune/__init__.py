"""The tuner: config space, cost model, records, measurement in processes that can be killed."""

from ecornn.tune.session import Result, Session, tune

__all__ = ["Result", "Session", "tune"]

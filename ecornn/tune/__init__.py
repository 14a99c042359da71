"""The tuner: config space, cost model, records, measurement in processes that can be killed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecornn.tune.session import Result, Session, tune

__all__ = ["Result", "Session", "tune"]


def __getattr__(name: str) -> Any:  # compiling a layer looks records up, and needs nothing of a search
    if name not in __all__:
        raise AttributeError(f"module 'ecornn.tune' has no attribute {name!r}")
    from ecornn.tune import session

    return getattr(session, name)

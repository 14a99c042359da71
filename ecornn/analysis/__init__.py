"""From a cell's te graph to a :class:`StepGraph`: what is hoisted, exchanged and pointwise."""

from ecornn.analysis.graph import analyse
from ecornn.analysis.step import Assign, Phase, Row, Statistic, StepGraph, Vector

__all__ = ["Assign", "Phase", "Row", "Statistic", "StepGraph", "Vector", "analyse"]

"""From a cell's te graph to a :class:`StepGraph`: what is hoisted, exchanged and pointwise."""

from ecornn.analysis.graph import analyse
from ecornn.analysis.step import Assign, OuterProduct, Phase, Product, Statistic, StepGraph, Sum, Term, Vector

__all__ = ["Assign", "OuterProduct", "Phase", "Product", "Statistic", "StepGraph", "Sum", "Term", "Vector", "analyse"]

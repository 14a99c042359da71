"""Scalar operators of te, as PyTorch writes them: a line of Python for each."""

from __future__ import annotations

BINARY = {
    "Add": "{0} + {1}", "Sub": "{0} - {1}", "Mul": "{0} * {1}", "Div": "{0} / {1}", "FloorDiv": "{0} // {1}",
    "FloorMod": "{0} % {1}", "Max": "torch.maximum({0}, {1})", "Min": "torch.minimum({0}, {1})",
    "LT": "{0} < {1}", "LE": "{0} <= {1}", "GT": "{0} > {1}", "GE": "{0} >= {1}", "EQ": "{0} == {1}",
    "NE": "{0} != {1}", "And": "torch.logical_and({0}, {1})", "Or": "torch.logical_or({0}, {1})"}
CLAMP = {"Max": "torch.clamp({0}, min={1})", "Min": "torch.clamp({0}, max={1})"}  # where one side is a number

FUNCTIONS = {name: f"torch.{name}({{0}})" for name in (
    "exp", "tanh", "sigmoid", "log", "log2", "log1p", "exp2", "sqrt", "rsqrt", "erf", "log10", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "floor", "ceil", "trunc", "round")} | {
    "fabs": "torch.abs({0})", "nearbyint": "torch.round({0})", "exp10": "torch.pow(10.0, {0})",
    "pow": "torch.pow({0}, {1})", "atan2": "torch.atan2({0}, {1})", "if_then_else": "torch.where({0}, {1}, {2})"}

NUMBERS = {"pow", *BINARY} - {"And", "Or"}  # those that take Python's numbers beside tensors

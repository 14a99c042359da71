"""Device functions in CUDA C: how they are called, and operators that TVM writes too slowly, or not as a step needs."""

from __future__ import annotations

import re
from textwrap import dedent, indent

from ecornn.schedules.builder import Expr, T

_TYPES = {"float": "float32", "int": "int32", "unsigned": "uint32", "void": "void"}


def call(signature: str, body: str, *arguments: Expr) -> Expr:
    """The value of a device function of C's ``signature`` and ``body``, which is written once however often called."""
    kind, name = re.findall(r"\w+", signature)[:2]
    body = indent(dedent(body).strip("\n"), "  ")
    source = f"\n__device__ __forceinline__ {signature} {{\n{body}\n}}"
    return T.cuda.func_call(name, *arguments, source_code=source, return_type=_TYPES[kind])


def run(signature: str, body: str, *arguments: Expr) -> None:
    """Calls a device function that returns nothing."""
    T.evaluate(call(signature, body, *arguments))


def _instruction(name: str, instruction: str, operand: str = "x", result: str = "y") -> tuple[str, str]:
    """Signature and body of a function of x that is one instruction, of which y is the result."""
    return f"float ecornn_{name}(float x)", f"""
        float y;
        asm("{instruction} %0, %1;" : "=f"(y) : "f"({operand}));
        return {result};"""


_FAST = {
    "sigmoid": ("float ecornn_sigmoid_fast(float x)", """
        float e, r;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
        return r;"""),
    # 1 - 2 / (1 + exp(2 x)): absolute error 2e-7, also for small x
    "tanh": ("float ecornn_tanh_fast(float x)", """
        float e, r;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.8853900817779268f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
        return fmaf(-2.0f, r, 1.0f);"""),
    # x log2(e) is rounded: relative error 1e-7 and 6e-8 |x| more
    "exp": _instruction("exp_fast", "ex2.approx.ftz.f32", "x * 1.4426950408889634f"),
    # absolute error 2e-7 where x is between 1/2 and 2, relative error 2e-7 elsewhere
    "log": _instruction("log_fast", "lg2.approx.ftz.f32", result="y * 0.6931471805599453f"),
    # to 2 ulp; zero where y is above 2^126
    "Div": ("float ecornn_divide_fast(float x, float y)", """
        float q;
        asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
        return q;"""),
}
# 1 - 2 / (1 + exp(2 x)) from 0.3 on, nearer to zero x - x^3/3 + ...: relative error 8e-7 everywhere
_RELATIVE = {
    "sigmoid": _FAST["sigmoid"],
    "tanh": ("float ecornn_tanh_relative(float x)", """
        float e, r, s = x * x;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.8853900817779268f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
        float p = fmaf(s, 0.021869488f, -0.053968254f);
        p = fmaf(s, fmaf(s, p, 0.13333333f), -0.33333333f);
        float near = fmaf(s * x, p, x), far = fmaf(-2.0f, r, 1.0f);
        return s < 0.09f ? near : far;"""),
}
_APPROX = {
    "sigmoid": _instruction("sigmoid_approx", "tanh.approx.f32", "0.5f * x", "fmaf(0.5f, y, 0.5f)"),
    "tanh": _instruction("tanh_approx", "tanh.approx.f32"),
}
_EXACT = {
    # NaN where either operand is, as NumPy's and PyTorch's are and CUDA's not
    "Max": ("float ecornn_max(float x, float y)", """
        float z;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
        return z;"""),
    "Min": ("float ecornn_min(float x, float y)", """
        float z;
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
        return z;"""),
    # to 2 ulp, which is as exact as CUDA's rsqrtf
    "rsqrt": _instruction("rsqrt", "rsqrt.approx.f32"),
}
FUNCTIONS: dict[str, dict[str, tuple[str, str]]] = {  # math -> key of the operator -> signature and body
    "exact": _EXACT, "relative": _EXACT | _RELATIVE, "fast": _EXACT | _FAST, "approx": _EXACT | _FAST | _APPROX}

"""Splices a cell's scalars into a kernel that is being built with TVM's IRBuilder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ecornn.analysis import Assign, StepGraph
from ecornn.analysis.graph import variables
from ecornn.analysis.scalar import children, transform

MATH = ("exact", "fast", "approx")
MATH_TRADES = ("expf and tanhf to 2 ulp, or ex2, lg2 and rcp of the special function unit (error 2e-7), or "
               "tanh.approx (error 5e-4): accuracy for the latency of the gates")

# approx would be most of the error that float16 may have
MATH_FOR = {"float32": MATH[:1], "float16": MATH[:2], "bfloat16": MATH}

_FAST = {
    "tirx.sigmoid": ("ecornn_sigmoid_fast", """
__device__ __forceinline__ float ecornn_sigmoid_fast(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}"""),
    # 1 - 2 / (1 + exp(2 x)): absolute error 2e-7, also for small x
    "tirx.tanh": ("ecornn_tanh_fast", """
__device__ __forceinline__ float ecornn_tanh_fast(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 2.8853900817779268f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return fmaf(-2.0f, r, 1.0f);
}"""),
    # x log2(e) is rounded: relative error 1e-7 and 6e-8 |x| more
    "tirx.exp": ("ecornn_exp_fast", """
__device__ __forceinline__ float ecornn_exp_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}"""),
    # absolute error 2e-7 where x is between 1/2 and 2, relative error 2e-7 elsewhere
    "tirx.log": ("ecornn_log_fast", """
__device__ __forceinline__ float ecornn_log_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * 0.6931471805599453f;
}"""),
    # to 2 ulp; zero where y is above 2^126
    "Div": ("ecornn_divide_fast", """
__device__ __forceinline__ float ecornn_divide_fast(float x, float y) {
  float q;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
  return q;
}"""),
}
_APPROX = {
    "tirx.sigmoid": ("ecornn_sigmoid_approx", """
__device__ __forceinline__ float ecornn_sigmoid_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(0.5f * x));
  return fmaf(0.5f, y, 0.5f);
}"""),
    "tirx.tanh": ("ecornn_tanh_approx", """
__device__ __forceinline__ float ecornn_tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}"""),
}


def _extremum(name: str) -> tuple[str, str]:
    """Name and source of a maximum or minimum that is NaN where either operand is, as NumPy's and PyTorch's are and
    CUDA's not."""
    return f"ecornn_{name}", f"""
__device__ __forceinline__ float ecornn_{name}(float x, float y) {{
  float z;
  asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}}"""


_EXACT = {
    "Max": _extremum("max"),
    "Min": _extremum("min"),
    # to 2 ulp, which is as exact as CUDA's rsqrtf
    "tirx.rsqrt": ("ecornn_rsqrt", """
__device__ __forceinline__ float ecornn_rsqrt(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}"""),
}
_TABLES: dict[str, dict[str, tuple[str, str]]] = {
    "exact": _EXACT, "fast": _EXACT | _FAST, "approx": _EXACT | _FAST | _APPROX}


def emit(assigns: Iterable[Assign], env: dict[Any, Any], math: str = "exact") -> dict[Any, Any]:
    """Emits ``assigns`` in order and returns ``env`` extended by their variables.

    ``env`` gives an expression for every variable that the assignments read; each assigned
    variable is bound once, so that later uses read a register. ``math`` is one of :data:`MATH`.
    """
    from tvm.tirx.script.builder import ir as T

    env = dict(env)
    for assign in assigns:
        env[assign.var] = T.Bind(_value(assign.value, env, _TABLES[math]))
    return env


def _value(value: Any, env: dict[Any, Any], table: dict[str, tuple[str, str]]) -> Any:
    from tvm.tirx.script.builder import ir as T

    def visit(e: Any) -> Any:
        if type(e).__name__ == "Var":
            return env[e]
        kind = type(e).__name__
        operation = getattr(e.op, "name", "") if kind == "Call" else kind
        if operation in table:
            name, source = table[operation]
            inner = [T.Bind(transform(part, visit)) for part in children(e)]
            return T.cuda.func_call(name, *inner, source_code=source, return_type="float32")
        return None

    return transform(value, visit)


def invariants(graph: StepGraph, vectors: dict[Any, Any], math: str = "exact") -> dict[Any, Any]:
    """Emits what depends on parameters only; ``vectors`` maps each vector's variable to its value."""
    return emit(graph.invariants, vectors, math)


def opening(graph: StepGraph) -> tuple[Assign, ...]:
    """Of the prologue what states and parameters determine, so that it is known before the step's inputs are."""
    unknown, found = {*graph.hoisted_outputs, *graph.row_inputs}, []
    for a in graph.prologue:
        if unknown.isdisjoint(variables(a.value)):
            found.append(a)
        else:
            unknown.add(a.var)
    return tuple(found)


def urgent(graph: StepGraph) -> tuple[tuple[Assign, ...], tuple[str, ...], tuple[Assign, ...], tuple[Assign, ...]]:
    """What the operands of the next step's first product take: of :func:`opening`, the states, and the assignments
    after this step's last exchange; then those that can wait until the operands are on their way."""
    wanted = set(graph.products[0].operands)
    start = _needed(opening(graph), wanted)
    last = graph.phases[-1].assigns
    wanted = {graph.results[name] for name, var in graph.states.items() if var in wanted}
    first = _needed(last, wanted)
    soon = {a.var for a in first}
    late = tuple(a for a in last if a.var not in soon)
    later = {a.var for a in late}
    return start, tuple(n for n, var in graph.results.items() if var not in later), first, late


def _needed(assigns: tuple[Assign, ...], wanted: set[Any]) -> tuple[Assign, ...]:
    """Those that ``wanted`` depends on, which is extended by what they read."""
    found = []
    for a in reversed(assigns):
        if a.var in wanted:
            found.append(a)
            wanted.update(variables(a.value))
    return tuple(reversed(found))


def late_operand(graph: StepGraph) -> str | None:
    """None, or the reason why the first product of a step cannot be prepared in the step before."""
    made = {a.var for a in graph.prologue} - {a.var for a in opening(graph)}
    late = [o for o in (graph.phases[0].operands if graph.phases else ()) if o in made]
    return f"cell {graph.cell!r} multiplies {late[0].name}, which depends on x and a state" if late else None


def vector_sources(graph: StepGraph) -> tuple[tuple[str, int], ...]:
    """Sources of the packed buffer of parameter vectors, (V, H), in the order of ``graph.vectors``."""
    return tuple((v.parameter, v.gate) for v in graph.vectors)

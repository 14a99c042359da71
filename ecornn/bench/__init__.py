"""Timing a layer beside what else computes it: what `ecornn bench` does, and the programs of ``benchmarks/``.

Each side's output is held against a float64 reference first; then sides take turns, on inputs that are new in each."""

"""Faults of one line, each of which a test that needs no GPU must find.

    python tests/mutants.py            all of them, one after the other, in a copy of the checkout
    python tests/mutants.py lengths resets    those whose name has one of these words

Prints what found each; exits with 1 where one survives, or where its line is no longer there."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rooms import ROOT

SECONDS = 600  # a fault may make a kernel hang


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in ``file``, becomes ``new``; ``tests``: pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant("analysis: a subtrahend is added", "ecornn/analysis/row_reductions.py",
           "(total - term if negated else total + term)", "(total + term)",
           "tune/test_tune_oracle.py cells/test_variants.py"),
    Mutant("analysis: any mean serves a sum of squares", "ecornn/analysis/row_reductions.py",
           "return abs(number - count) <= CLOSE * count", "return True", "cells/test_statistics.py"),
    Mutant("lengths on GPUs: a row takes part in one step more", "schedules/timeline.py",
           'T.let("live", self.at(t) < limit)', 'T.let("live", self.at(t) <= limit)',
           "kernels/test_persistent_emulated.py -k lengths"),
    Mutant("lengths on CPUs: a tile ends with its first row", "schedules/cpu/memory.py",
           "most = self.e.tirx.Max(most,", "most = self.e.tirx.Min(most,", "cpu/test_stacks.py -k lengths"),
    Mutant("resets on GPUs: backwards a step too early", "schedules/timeline.py",
           'T.let("step", self.at(t) + 1 if self.traversal.reverse else t)', 'T.let("step", self.at(t))',
           "kernels/test_stacks_cuda.py"),
    Mutant("resets on CPUs: of the row above", "schedules/cpu/memory.py",
           "e.index(0)) * self.batch + last)", "e.index(0)) * self.batch + e.index(0))",
           "cpu/test_stacks.py -k resets"),
    Mutant("training on CPUs: gradients of steps behind a row's end", "schedules/cpu/training/parts.py",
           "(place, o.timeline.masked(live, value, e.splat(0.0)))", "(place, value)",
           "cpu/test_cpu_training.py::test_every_pair_of_choices[rnn_tanh]"),
    Mutant("training on CPUs: in reverse the state before is that after", "schedules/cpu/training/parts.py",
           "at + worker.batch if reverse else at - worker.batch", "at - worker.batch",
           "cpu/test_cpu_training.py::test_every_pair_of_choices[rnn_tanh]"),
    Mutant("training on CPUs: a sequence begins with another state", "schedules/cpu/training/parts.py",
           "mark = e.tirx.Select(inside, after if reverse else t, e.index(0))", "mark = e.index(0)",
           "cpu/test_cpu_training.py::test_every_pair_of_choices[rnn_tanh]"),
    Mutant("float64 on CPUs: ln(2) has float32's digits", "schedules/cpu/emit.py",
           "1.90821492927058770002e-10", "1.908215e-10", "cpu/test_cpu.py::test_errors"),
    Mutant("float64 on CPUs: a layer's sums are those of float32", "ecornn/workload.py",
           'return "float64" if dtype == "float64" else "float32"', 'return "float32"',
           "torch/test_torch_training.py -k gradcheck"),
    Mutant("kept states: of rows that took no part, too", "schedules/scalars/gate_threads.py",
           "value = self.timeline.masked(ended.live, value, T.float32(0))", "value = T.let('value', value)",
           "kernels/test_training_emulated.py -k kept_states"),
    Mutant("kept states: cleared where a sequence starts", "schedules/scalars/gate_threads.py",
           "self.kept.found(ended.new, ended.env)", "self.kept.found(ended.following, ended.env)",
           "kernels/test_training_emulated.py -k kept_states"),
    Mutant("kept states: at y's place, which has two directions", "schedules/elementwise/units.py",
           "if self.kept and width > H:", "if False:", "kernels/test_training_emulated.py -k kept_states"),
    Mutant("adjoints: the last border clears nothing", "schedules/elementwise/units.py",
           "if place.backward else None\n", "if False else None\n",
           "kernels/test_backward_recurrence_emulated.py -k without_recurrent"),
    Mutant("scan: a row that ends early has the states of the last chunk", "schedules/scan/kernels.py",
           "T.max(self.limit - 1, 0)", "self.all_steps - 1", "kernels/test_scan_emulated.py -k hgrn"),
    Mutant("scan: a sequence that starts within a chunk forgets nothing", "schedules/scan/kernels.py",
           "self.timeline.started(fresh, old)", "old", "kernels/test_scan_emulated.py -k lru"),
    Mutant("scan: zero times infinity", "schedules/scan/kernels.py", "T.float32(0), a * b)", "a * b, a * b)",
           "kernels/test_scan_emulated.py -k too_large"),
    Mutant("scan: a coefficient that the state multiplies twice", "ecornn/analysis/affine.py",
           "elif key == \"Mul\" and free[0]:", "elif key == \"Mul\":", "cells/test_affine.py -k square"),
    Mutant("8-bit weights: the scale of another gate", "schedules/persistent/kernel.py",
           "[row * units + unit], [i, row]", "[unit], [i, row]", "kernels/test_precision.py"),
    Mutant("8-bit weights: one is off by one in bfloat16", "schedules/cuda/isa/tensor_core.py",
           '"r"(positive), "r"(0xBF00BF00u)', '"r"(positive), "r"(0xBF01BF00u)', "kernels/test_precision.py"),
    Mutant("fences: blocks that poll acquire nothing", "schedules/persistent/exchange.py",
           "self.acquired(t)\n\n    def write", "pass\n\n    def write",
           "emulator/test_emulation.py"),
    Mutant("lookup: any number of registers will do", "ecornn/tune/lookup.py",
           '("cores", "shared", "registers"))', '("cores", "shared"))', "tune/test_tune_lookup.py"),
    Mutant("lookup: one finalist tells the drift of all", "ecornn/tune/lookup.py",
           "if len(ratios) > 1 else 1.0", "if len(ratios) > 0 else 1.0", "tune/test_tune_lookup.py"),
    Mutant("threads: a forked child waits for the runtime's", "ecornn/build/cpu_openmp.h",
           "if (forked_) return {};", "", "cpu/test_cpu_openmp.py -k forked"),
    Mutant("threads: as many as asked for have come", "ecornn/build/cpu_team.h",
           "size = std::min(of->size, of->openmp.num_threads());", "size = of->size;",
           "cpu/test_cpu_openmp.py -k fewer"),
    Mutant("threads: calls share nothing", "ecornn/build/cpu_team.h",
           "return count_ == 1 ? threads", "return true ? threads", "cpu/test_cpu_openmp.py -k share"),
    Mutant("packing: every gate is the first", "ecornn/build/c_pack.h",
           "const int64_t first = std::max<int64_t>(gate, 0) * rows;", "const int64_t first = 0 * rows;",
           "runtime/test_runtime_packing.py"),
    Mutant("loading: a file cut short is complete", "ecornn/runtime/library.py",
           "return bool(max(ends) <= len(content))", "return True", "runtime/test_runtime_loader.py"),
    Mutant("loading: any checksum will do", "ecornn/runtime/library.py", "if not whole:", "if False:",
           "runtime/test_runtime_loader.py -k one_bit"),
    Mutant("lookup: any time is believed", "ecornn/tune/lookup.py", "return times is None or times.median >=",
           "return True or times.median >=", "tune/test_tune_lookup.py -k not_believed"),
    Mutant("torch: what PyTorch does not count is not looked at", "ecornn/torch/snapshot.py",
           "return self._sample is None or self._sample.holds()", "return True",
           "torch/test_torch_later_calls.py -k leave_no_trace"),
    Mutant("torch: a layer is what it was, whatever its attributes say", "ecornn/torch/engine.py",
           "if kept and engine.options == _options_of(module)", "if kept",
           "torch/test_torch_later_calls.py -k attributes_that"),
    Mutant("onnxruntime: rows without steps end as they began", "ecornn/onnxruntime/kernel.h",
           "if (lengths[n % rows] == 0)", "if (lengths[n % rows] < 0)", "onnx/test_onnxruntime.py -k without_steps"),
    Mutant("onnx: peepholes in the order of W", "ecornn/onnx/node.py", "ordered(p[d], PEEPHOLES)",
           "ordered(p[d], (0, 1, 2))", "onnx/test_onnx.py"),
    Mutant("onnxruntime: Y in the order of y", "ecornn/onnxruntime/replacing.py", "else [0, 2, 1, 3]",
           "else [0, 1, 2, 3]", "onnx/test_onnxruntime.py -k nodes"),
    Mutant("onnxruntime: weights that a call may bring are constants", "ecornn/onnx/constants.py",
           "given = variable if outer is None", "given = () if outer is None",
           "onnx/test_onnxruntime.py -k cannot_be_taken"),
    Mutant("onnxruntime: any module will do", "ecornn/onnxruntime/node.h", "DigestOf(path) != Attribute",
           "DigestOf(path).empty() && DigestOf(path) != Attribute",
           "onnx/test_onnxruntime.py -k were"),
    Mutant("onnxruntime: a part of the rows begins with the first", "ecornn/onnxruntime/tensors.h",
           " + row * static_cast<size_t>(rows_.first)", "", "onnx/test_onnxruntime.py -k more_rows"),
    Mutant("onnxruntime: outputs that begin anywhere are left in the copy", "ecornn/onnxruntime/tensors.h",
           "for (const Copied& copy : back_) copy.ToWhole();", "", "onnx/test_onnxruntime.py -k anywhere"),
    Mutant("torch: batch first is not turned back", "ecornn/torch/modules.py",
           "output = y.transpose(0, 1) if self.batch_first else y", "output = y", "torch/test_torch_layers.py"),
)


def checkout(folder: Path) -> Path:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    package = folder / "build" / "package" / "ecornn"  # as it is installed: schedules/ as ecornn.schedules
    package.mkdir(parents=True)
    for path in (*(folder / "ecornn").iterdir(), folder / "schedules", folder / "tuning_logs"):
        (package / path.name).symlink_to(path)
    return package.parent


def found_by(mutant: Mutant, folder: Path, package: Path) -> str | None:
    """The test that fails with the fault, or how else the tests do not pass; None where they do."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not gpu and not exhaustive", *mutant.tests.split()]
    tests = folder / "tests"  # from there: the checkout's own folder ecornn/ lacks the schedules
    environment = os.environ | {"PYTHONPATH": str(package)}
    try:
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    if done.returncode < 0:  # as where a kernel of the emulation writes beyond its memory
        return f"the tests' process ended by signal {-done.returncode}"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: {' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    failed = [line for line in done.stdout.split("\n") if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if done.returncode else None


def main() -> None:
    survived = []
    with tempfile.TemporaryDirectory(prefix="ecornn-mutants-") as name:
        folder = Path(name)
        package = checkout(folder)
        for mutant in (m for m in MUTANTS if any(word in m.name for word in sys.argv[1:] or [""])):
            file = folder / mutant.file
            right = file.read_text()
            if right.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.name}: {mutant.file} has {right.count(mutant.old)} times {mutant.old!r}")
            file.write_text(right.replace(mutant.old, mutant.new))
            found = found_by(mutant, folder, package)
            file.write_text(right)
            print(f"{mutant.name}: {found or 'SURVIVED'}", flush=True)
            survived += [] if found else [mutant.name]
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()

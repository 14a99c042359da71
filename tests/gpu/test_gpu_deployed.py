"""On a GPU: programs in C and C++, JAX, exported programs in new processes, and ONNX Runtime's CUDA provider."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import c_abi_sample as sample
import numpy as np
import pytest
import torch

import ecornn
from ecornn.build.nvcc import find_nvcc
from ecornn.runtime.loader import Module

# whatever versions of the frameworks the GPU's machine has, they may warn of what they like
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
T, B, I, H = 12, 4, 24, 64
STATES = ("h", "c")


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return ecornn.compile("lstm", hidden=H, input=I, batch=B, seq=T, target="cuda", training=True,
                          out=tmp_path_factory.mktemp("lstm") / "lstm.so")


def toolkit() -> Path | None:
    found = find_nvcc()
    roots = [Path(found).resolve().parent.parent] if found else []
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    return next((root for root in (*roots, Path("/usr/local/cuda")) if (root / "include/cuda_runtime_api.h").is_file()),
                None)


def program(source: str, folder: Path) -> Path:
    root = toolkit()
    if root is None:
        pytest.skip("there is no CUDA toolkit, whose headers the program includes")
    return sample.compiled(sample.HERE / source, folder / "program", f"-isystem{root}/include",
                           last=[f"-L{root}/lib64", f"-Wl,-rpath,{root}/lib64", "-lcudart"])


def test_a_layer_from_c(tmp_path: Path):
    module = ecornn.compile("gru", hidden=H, input=I, batch=B, seq=T, target="cuda", layers=2, bidirectional=True,
                            out=tmp_path / "gru.so")
    here, arrays = tmp_path / "arrays", sample.arrays_of(module, x=(T, B, I), other_x=(T, B, I), h_in=(4, B, H))
    sample.write(here, arrays)
    said = sample.run(program("cuda_program.c", tmp_path), module.path, here, T, B)
    assert said.startswith("5 ") and "x is on DLPack's device (1, 0)" in said
    weights = {p.name: arrays[p.name] for p in module.manifest.parameters}
    y, (h,) = ecornn.reference("gru", arrays["x"], weights, (arrays["h_in"],))
    sample.close(sample.read(here, "y", T, B, 2 * H), y)
    sample.close(sample.read(here, "h_out", 4, B, H), h)
    y, _ = ecornn.reference("gru", arrays["other_x"], weights)
    sample.close(sample.read(here, "other_y", T, B, 2 * H), y)
    sample.close(sample.read(here, "y_after_repack", T, B, 2 * H), y)


def test_threads_and_a_training_step_from_cpp(tmp_path: Path, lstm: Module):
    here, arrays = tmp_path / "arrays", sample.training_arrays(lstm)
    sample.write(here, arrays)
    sample.run(program("cuda_program.cc", tmp_path), lstm.path, here, T, B)
    sample.check_gradients(here, arrays, lstm)


@pytest.fixture(scope="module")
def jax() -> Any:
    found = pytest.importorskip("jax", reason="the extra jax")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found.config.update("jax_platforms", "cuda,cpu")
    try:
        found.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX has no CUDA here: {error}")
    return found


def test_jax(jax: Any, lstm: Module):
    import ecornn.jax

    arrays, layer = sample.training_arrays(lstm), ecornn.jax.recurrent(lstm)
    dh, dc, dy = (jax.numpy.asarray(arrays[name]) for name in ("dh", "dc", "dy"))
    @jax.jit
    def step(weights: Any, x: Any, state: Any) -> Any:
        def loss(weights: Any, x: Any, state: Any) -> Any:
            y, (h, c) = layer(weights, x, state)
            return jax.numpy.vdot(y, dy) + jax.numpy.vdot(h, dh) + jax.numpy.vdot(c, dc), (y, h, c)
        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(weights, x, state)

    for factor in (1, -1, -1):
        signed = arrays | {p.name: factor * arrays[p.name] for p in lstm.manifest.parameters}
        weights = {p.name: jax.numpy.asarray(signed[p.name]) for p in lstm.manifest.parameters}
        state = tuple(jax.numpy.asarray(arrays[f"{s}_in"]) for s in STATES)
        gradients, found = step(weights, jax.numpy.asarray(arrays["x"]), state)
        assert {d.platform for d in found[0].devices()} == {"gpu"}
        y, after = ecornn.reference("lstm", arrays["x"], {n: signed[n] for n in weights}, state)
        for one, exact in zip(found, (y, *after), strict=True):
            sample.close(np.asarray(one), exact)
        dx, dweights, dstate = sample.gradients_of(signed, lstm)
        sample.close(np.asarray(gradients[1]), dx, sample.BACKWARD)
        for one, exact in zip((*gradients[2], *(gradients[0][n] for n in weights)),
                              (*dstate, *(dweights[n] for n in weights)), strict=True):
            sample.close(np.asarray(one), exact, sample.BACKWARD)
    rows = jax.jit(jax.vmap(layer, in_axes=(None, 1), out_axes=(1, 0)))(weights, arrays["x"][:, :, None])
    sample.close(np.asarray(rows[0])[:, :, 0], ecornn.reference("lstm", arrays["x"], weights)[0])


LONELY = """
import sys
sys.modules["tvm"] = None  # import fails, as where there is none
import numpy, torch, ecornn.torch
file, x, y = sys.argv[1:]
torch.backends.cudnn.allow_tf32 = False  # a program computes as the process says that runs it
x = torch.from_numpy(numpy.load(x)).cuda()
program = torch._inductor.aoti_load_package(file) if file.endswith(".aoti.pt2") else torch.export.load(file).module()
with torch.no_grad():
    numpy.save(y, program(x).cpu().numpy())
assert not any(name.startswith("tvm.") for name in sys.modules)
"""


def shares_the_cpp_library(folder: Path) -> bool:
    """Whether a library that AOTInductor's compiler links has the process's C++ library, and not a copy of its own."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    (folder / "said.cc").write_text("#include <iostream>\nvoid said() { std::cout << 1; }\n")
    subprocess.run([get_cpp_compiler(), "-shared", "-fPIC", folder / "said.cc", "-o", folder / "said.so"], check=True)
    return b"libstdc++.so" in (folder / "said.so").read_bytes() or b"libc++.so" in (folder / "said.so").read_bytes()


@pytest.mark.parametrize("ahead", [False, True], ids=["torch.export", "AOTInductor"])
def test_an_exported_program(tmp_path: Path, ahead: bool):
    import ecornn.torch

    if ahead and not shares_the_cpp_library(tmp_path):
        pytest.skip("the C++ compiler has no shared C++ library: PyTorch's loader ends, whatever the program is, in a "
                    "std::regex of the program's own copy")
    class Model(torch.nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.recurrent, self.out = kind(I, H, bidirectional=True), torch.nn.Linear(2 * H, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.recurrent(x)[0])

    torch.manual_seed(0)
    exact = Model(torch.nn.LSTM).double()
    model, x = Model(ecornn.torch.LSTM), torch.randn(T, B, I)
    model.load_state_dict(exact.state_dict())
    model.cuda().eval()
    with torch.no_grad():
        model(x.cuda())
        saved = torch.export.export(model, (x.cuda(),))
        file = tmp_path / ("program.aoti.pt2" if ahead else "program.pt2")
        if ahead:
            torch._inductor.aoti_compile_and_package(saved, package_path=str(file))
        else:
            torch.export.save(saved, file)
    ecornn.torch.save_modules(tmp_path / "modules")
    np.save(tmp_path / "x.npy", x.numpy())
    there = {"PATH": str(tmp_path / "empty"), "ECORNN_CACHE": "off", "ECORNN_MODULES": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", LONELY, *(str(p) for p in (file, tmp_path / "x.npy", tmp_path / "y.npy"))],
                   check=True, env=os.environ | there)
    sample.close(np.load(tmp_path / "y.npy"), exact(x.double()).detach().numpy())


@pytest.fixture(scope="module")
def providers() -> list[Any]:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip(f"onnxruntime {onnxruntime.__version__} has no CUDA provider: onnxruntime-gpu has")
    onnxruntime.preload_dlls()  # CUDA's libraries as pip installs them
    # ONNX Runtime's other nodes have float32's products then, and not those of TF32
    return [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]


def on_gpu(model: Path, providers: list[Any], options: Any = None) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), options, providers=providers)
    if session.get_providers()[0] != providers[0][0]:
        pytest.skip("ONNX Runtime could not load its CUDA provider; its log says why")
    return session


def test_onnxruntime_on_its_cuda_provider(tmp_path: Path, providers: list[Any]):
    from onnxruntime_sample import alike, operators, session, speech

    import ecornn.onnxruntime

    model, fast = tmp_path / "speech.onnx", tmp_path / "fast.onnx"
    speech(model)
    made = ecornn.onnxruntime.rewrite(model, fast, batch=4, seq=40, target="cuda", measure=False)
    assert not made.left and operators(fast).count("CudaRecurrent") == 4
    ours, theirs = on_gpu(fast, providers, ecornn.onnxruntime.session_options(fast)), session(model)
    for steps, rows in ((40, 3), (11, 4), (1, 1), (40, 3)):
        alike(ours, theirs, {"x": np.random.default_rng(steps).standard_normal((steps, rows, 20)).astype(np.float32)})


@pytest.mark.parametrize(("op", "inputs", "attributes"), [
    ("LSTM", ("h0", "c0"), {"direction": "bidirectional"}), ("GRU", ("lens", "h0"), {"linear_before_reset": 1}),
    ("RNN", (), {})])
def test_nodes_of_16_bits_on_its_cuda_provider(tmp_path, providers, op, inputs, attributes):
    import onnx
    from onnxruntime_sample import feeds_of, model_of, session

    import ecornn.onnxruntime

    half, fast = model_of(op, inputs, dtype="float16", **attributes), tmp_path / "fast.onnx"
    onnx.save(half, tmp_path / "half.onnx")
    assert not ecornn.onnxruntime.rewrite(half, fast, batch=3, seq=7, target="cuda", measure=False).left
    feeds = feeds_of(half)
    wide = {n: v if v.dtype == np.int32 else v.astype(np.float32) for n, v in feeds.items()}
    weights = model_of(op, inputs, **attributes)
    for tensor, rounded in zip(weights.graph.initializer, half.graph.initializer, strict=True):
        value = onnx.numpy_helper.to_array(rounded).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, rounded.name))
    exact = session(weights).run(None, wide)
    ours = on_gpu(fast, providers, ecornn.onnxruntime.session_options(fast)).run(None, feeds)
    for one, other, wanted in zip(ours, on_gpu(tmp_path / "half.onnx", providers).run(None, feeds), exact, strict=True):
        assert one.dtype == np.float16
        limit = 2 * max(np.linalg.norm(other.astype(float) - wanted), 2.0**-12 * np.linalg.norm(wanted))
        assert np.linalg.norm(one.astype(float) - wanted) < limit

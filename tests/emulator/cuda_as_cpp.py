"""Generated CUDA source as C++: inline PTX becomes calls of what ``cuda_on_cpu.h`` declares. An instruction that is not
known here fails the test."""

from __future__ import annotations

import re

import pytest

_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+)(, %2)?;")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(?:16|8)\.f32\.(\w+)\.\2 "
                    r".*, ps0, 1, 1(?:, (0, 0|1, 1))?; }")
_WGMMA_A = re.compile(_WGMMA.pattern.replace("1, 1(?:, (0, 0|1, 1))?;", "1, 1, 0;"))  # operand A in registers
_SPECIAL = re.compile(r"mov\.u32 %0, %%(tid|ctaid)\.x;")
_HALF = re.compile(r"\{\.reg \.b16 low, high; mov\.b32 \{low, high\}, %1; cvt\.f32\.f16 %0, (low|high); ?\}")
_WGMMA_KIND = {"f16": 0, "bf16": 1, "tf32": 2}
_FENCES = {"fence.acq_rel.gpu": "fence", "fence.proxy.async.global": "proxy_fence",
           "fence.proxy.async.shared::cta": "proxy_fence_shared",
           "fence.mbarrier_init.release.cluster": "mbarrier_fence"}
_MMA = {"f16.f16": 0, "bf16.bf16": 1, "tf32.tf32": 2}


def instruction(text: str, outs: list[str], ins: list[str]) -> str:
    """C++ that does what one PTX instruction does."""
    name, every = text.split(" ")[0].rstrip(";"), ", ".join(outs + ins)
    if copy := _COPY.fullmatch(text):
        return f"emu::cp_async({ins[0]}, {ins[1]}, {copy[1]}, {ins[2] if copy[2] else copy[1]})"
    if name == "cp.async.commit_group":
        return "emu::commit()"
    if name == "cp.async.wait_group":
        return f"emu::wait_group({text.split(' ')[1].rstrip(';')})"
    if name.startswith("mma.sync.aligned.m16n8k"):
        return f"emu::mma({_MMA['.'.join(name.split('.')[-3:-1])]}, {every})"
    if wgmma := _WGMMA.search(text):
        pointers = ", ".join(f"&{d}" for d in outs)
        across = "true" if wgmma[3] == "1, 1" else "false"
        return f"emu::wgmma({_WGMMA_KIND[wgmma[2]]}, {wgmma[1]}, {', '.join(ins)}, {{{pointers}}}, {across})"
    if wgmma := _WGMMA_A.search(text):
        pointers, held = ", ".join(f"&{d}" for d in outs), ", ".join(ins[:4])
        return (f"emu::wgmma_registers({_WGMMA_KIND[wgmma[2]]}, {wgmma[1]}, {{{held}}}, {', '.join(ins[4:])}, "
                f"{{{pointers}}})")
    if name.startswith("wgmma.wait_group"):
        return f"emu::wgmma_wait({text.split(' ')[1].rstrip(';')})"
    if name.startswith("wgmma.commit_group"):
        return "emu::wgmma_commit()"
    if name.startswith(("wgmma.fence", "setmaxnreg.", "griddepcontrol.")):  # launches come one after the other
        return "(void)0"
    if "mbarrier.try_wait.parity" in text and "@!done bra again" in text:
        return f"emu::mbarrier_wait({every})"
    if "mbarrier.test_wait.parity" in text and "selp.u32 %0, 1, 0, p" in text:
        return f"{outs[0]} = emu::mbarrier_test({', '.join(ins)})"
    if name.startswith("mbarrier.init"):
        return f"emu::mbarrier_init({every})"
    if name.startswith("mapa.shared::cluster.u32"):
        return f"{outs[0]} = emu::mapa({', '.join(ins)})"
    if name.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"):
        return f"emu::send({ins[0]}, {ins[1]}, {ins[3]}), emu::send({ins[0]} + 4, {ins[2]}, {ins[3]})"
    if name.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"):
        return ", ".join(f"emu::send({ins[0]} + {4 * k}, {ins[k + 1]}, {ins[5]})" for k in range(4))
    if name.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"):
        return f"emu::send({every})"
    if name == "barrier.cluster.arrive.release.aligned":
        return "(void)0"
    if name == "barrier.cluster.wait.acquire.aligned":
        return "emu::wait(emu::kCluster)"
    if name.startswith("mbarrier.arrive") and not outs:  # also .expect_tx, with the bytes
        return f"emu::mbarrier_arrive({every})"
    if name.startswith("cp.async.mbarrier.arrive.noinc"):
        return f"emu::cp_async_arrive({every})"
    if name.startswith("cp.async.bulk.shared::cluster.global.mbarrier") and "multicast" in name:
        return f"emu::multicast({every})"
    if name.startswith("createpolicy."):
        return f"{outs[0]} = 1"
    if name.startswith("cp.async.bulk.shared::cluster.global.mbarrier") and "cache_hint" in name:
        return f"emu::bulk_copy({', '.join(ins[:4])})"
    if name.startswith("cp.async.bulk.shared::cluster.global.mbarrier"):
        return f"emu::bulk_copy({every})"
    if name == "cp.async.wait_all":
        return "emu::commit(), emu::wait_group(0)"
    if name in ("bar.sync", "bar.arrive"):
        return f"emu::arrive({every}, {'true' if name == 'bar.sync' else 'false'})"
    if name in _FENCES:
        return f"emu::{_FENCES[name]}()"
    if name.startswith("ld.relaxed.gpu.global.v4"):  # a poll: let others run
        return f"emu::load4({every}), emu::yield()"
    if name.startswith("ld.relaxed.gpu.global.v2"):
        return f"emu::load2({every}), emu::yield()"
    if name.startswith("ld.acquire.gpu.global"):
        return f"{outs[0]} = emu::acquire((unsigned*){ins[0]}), emu::yield()"
    if name.startswith("ld.relaxed.gpu.global"):
        return f"{outs[0]} = *(unsigned*){ins[0]}, emu::yield()"
    if name.startswith("st.relaxed.gpu.global.v4.b32"):
        return f"emu::store4((void*){ins[0]}, {', '.join(ins[1:])})"
    if name.startswith("st.relaxed.gpu.global.v2.b32"):
        return f"emu::store2((void*){every})"
    if name.startswith("st.relaxed.gpu.global.b32"):
        return f"*(unsigned*){ins[0]} = {ins[1]}"
    if name in ("red.release.gpu.global.add.u32", "red.relaxed.gpu.global.add.u32"):
        return f"emu::add((unsigned*){every}, {'true' if 'release' in name else 'false'})"
    if name.startswith("st.shared.v2.b32"):
        return f"emu::store2(emu::at({ins[0]}), {', '.join(ins[1:])})"
    if name == "prmt.b32":
        return f"{outs[0]} = emu::permuted({', '.join(ins)})"
    if name == "sub.rn.f16x2":
        return f"{outs[0]} = emu::both_halves<half>({ins[0]}, 0x3C003C00u, {ins[1]} ^ 0x80008000u, false)"
    if name in ("fma.rn.bf16x2", "fma.rn.relu.bf16x2"):
        return f"{outs[0]} = emu::both_halves<nv_bfloat16>({', '.join(ins)}, {'true' if 'relu' in name else 'false'})"
    if name.startswith("st.shared.v4"):
        return f"emu::store4(emu::at({ins[0]}), {', '.join(ins[1:])})"
    if name in ("ld.shared.f32", "ld.shared.b32"):
        return f"{outs[0]} = *(const {'float' if name.endswith('f32') else 'uint32_t'}*)emu::at({ins[0]})"
    if name.startswith("ld.shared.v2"):
        return f"emu::load2({', '.join(outs)}, emu::at({ins[0]}))"
    if name == "cvt.rna.tf32.f32":
        return f"{outs[0]} = emu::tf32({ins[0]})"
    if name in ("cvt.rn.f16.f32", "cvt.f32.f16"):
        return f"{outs[0]} = emu::{'half_bits' if name.endswith('f32') else 'of_half_bits'}({ins[0]})"
    if name.startswith("cvt.rn.") and "x2.f32" in name:
        kind = "nv_bfloat16" if ".bf16x2" in name else "half"
        ins = [f"emu::finite_half({i})" for i in ins] if "satfinite.f16x2" in name else ins
        return f"{outs[0]} = emu::pack2<{kind}>({', '.join(ins)})"
    if half := _HALF.fullmatch(text):
        return f"{outs[0]} = emu::half_of({ins[0]}, {16 if half[1] == 'high' else 0})"
    if name.startswith("ld.shared.v4"):
        return f"emu::load4({', '.join(outs)}, emu::at({ins[0]}))"
    if name in ("ld.global.u16", "ld.global.b32"):
        return f"{outs[0]} = *({'uint16_t' if name.endswith('u16') else 'uint32_t'}*){ins[0]}"
    if name.startswith("ld.global") and ".v4." in name:
        return f"emu::load4({every})"
    if name.startswith("ld.global.v2."):
        return f"emu::load2({every})"
    if name.startswith("ldmatrix.sync.aligned.m8n8.x4.trans.shared"):
        return f"emu::ldmatrix_transposed({every})"
    if name.startswith("ldmatrix.sync.aligned.m8n8.x4.shared"):
        return f"emu::ldmatrix({every})"
    if name == "st.global.v4.f32":
        return f"emu::store4((void*){ins[0]}, {', '.join(f'emu::as_word({v})' for v in ins[1:])})"
    if name == "st.global.v4.b32":
        return f"emu::store4((void*){every})"
    if name == "st.global.v2.f32":
        return f"((float*){ins[0]})[0] = {ins[1]}, ((float*){ins[0]})[1] = {ins[2]}"
    if name == "st.global.v2.b32":
        return f"emu::store2((void*){every})"
    if name == "st.global.b32":
        return f"*(unsigned*){ins[0]} = {ins[1]}"
    simple = {"ex2.approx.ftz.f32": f"{outs and outs[0]} = exp2f({ins and ins[0]})",
              "lg2.approx.ftz.f32": f"{outs and outs[0]} = log2f({ins and ins[0]})",
              "rcp.approx.ftz.f32": f"{outs and outs[0]} = 1.0f / ({ins and ins[0]})",
              "div.approx.ftz.f32": f"{outs and outs[0]} = ({ins and ins[0]}) / ({ins and ins[-1]})",
              "rsqrt.approx.f32": f"{outs and outs[0]} = 1.0f / sqrtf({ins and ins[0]})",
              "max.NaN.f32": f"{outs and outs[0]} = emu::extremum<true>({', '.join(ins)})",
              "min.NaN.f32": f"{outs and outs[0]} = emu::extremum<false>({', '.join(ins)})",
              "tanh.approx.f32": f"{outs and outs[0]} = emu::tanh_approx({ins and ins[0]})"}
    if name in simple:
        return simple[name]
    if not text:  # pins a value
        return "(void)0"
    if text == "mov.u32 %0, %%clock;":
        return f"{outs[0]} = emu::clock()"
    if special := _SPECIAL.fullmatch(text):
        return f"{outs[0]} = {'threadIdx' if special[1] == 'tid' else 'blockIdx'}.x"
    if name.startswith("prefetch"):
        return "(void)0"
    pytest.fail(f"the emulation does not know {text}")


def _replace(match: re.Match[str]) -> str:
    parts = re.split(r"(?<!:):(?!:)", match[2])
    operands = [re.findall(r'"[=+]?\w"\s*\(((?:[^()]|\([^()]*\))*)\)', p) for p in [*parts, "", ""][:3]]
    return instruction(match[1], operands[1], operands[2]) + ";"


def translate(source: str) -> str:
    """Generated CUDA source as C++ for ``cuda_on_cpu.h``, without the headers of CUDA."""
    text = source.split("#define ushort unsigned short", 1)[1].split("#endif", 1)[1]
    text = re.sub(r'\basm(?: volatile)?\("([^"]*)"((?:[^;"]|"[^"]*")*)\);', _replace, text)
    assert not re.search(r"\basm\b", text), "inline assembly that was not translated"
    return re.sub(r"extern __shared__ \S+ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)emu::shared;", text)

"""Generated CUDA source as C++: inline PTX becomes calls of ``cuda_on_cpu.h``. An unknown instruction is an error."""

import re

import pytest

_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+)(, %2)?;")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(?:16|8)\.f32\.(\w+)\.\2 "
                    r".*, ps0, 1, 1(?:, (0, 0|1, 1))?; }")
_WGMMA_A = re.compile(_WGMMA.pattern.replace("1, 1(?:, (0, 0|1, 1))?;", "1, 1, 0;"))  # operand A in registers
_SPECIAL = re.compile(r"mov\.u32 %0, %%(tid|ctaid)\.x;")
_HALF = re.compile(r"\{\.reg \.b16 low, high; mov\.b32 \{low, high\}, %1; cvt\.f32\.f16 %0, (low|high); ?\}")
_KIND = {"f16": 0, "bf16": 1, "tf32": 2}
_SEND, _BULK = "st.async.shared::cluster.mbarrier::complete_tx::bytes", "cp.async.bulk.shared::cluster.global.mbarrier"

# Patterns of the names of instructions, the first that fits, and C++ that does the same: of numbered inputs, all of
# them, those but the first, outputs, both, and the word at the end.
_RULES = {re.compile(pattern): does for pattern, does in {
    "cp.async.commit_group": "emu::commit()",
    "cp.async.wait_group": "emu::wait_group({end})",
    "cp.async.wait_all": "emu::commit(), emu::wait_group(0)",
    "wgmma.wait_group.*": "emu::wgmma_wait({end})",
    "wgmma.commit_group.*": "emu::wgmma_commit()",
    "(wgmma.fence|setmaxnreg.|griddepcontrol.|prefetch).*": "(void)0",  # launches come one after the other
    "mbarrier.init.*": "emu::mbarrier_init({every})",
    "mapa.shared::cluster.u32.*": "{out} = emu::mapa({ins})",
    f"{_SEND}.v2.b32.*": "emu::send({0}, {1}, {3}), emu::send({0} + 4, {2}, {3})",
    f"{_SEND}.v4.b32.*": ", ".join(f"emu::send({{0}} + {4 * k}, {{{k + 1}}}, {{5}})" for k in range(4)),
    f"{_SEND}.b32.*": "emu::send({every})",
    "barrier.cluster.arrive.release.aligned": "(void)0",
    "barrier.cluster.wait.acquire.aligned": "emu::wait(emu::kCluster)",
    "cp.async.mbarrier.arrive.noinc.*": "emu::cp_async_arrive({every})",
    f"{_BULK}.*multicast.*": "emu::multicast({every})",
    f"{_BULK}.*cache_hint.*": "emu::bulk_copy({0}, {1}, {2}, {3})",
    f"{_BULK}.*": "emu::bulk_copy({every})",
    "createpolicy..*": "{out} = 1",
    "bar.sync": "emu::arrive({every}, true)",
    "bar.arrive": "emu::arrive({every}, false)",
    "fence.acq_rel.gpu": "emu::fence()",
    "fence.proxy.async.global": "emu::proxy_fence()",
    "fence.proxy.async.shared::cta": "emu::proxy_fence_shared()",
    "fence.mbarrier_init.release.cluster": "emu::mbarrier_fence()",
    "ld.relaxed.gpu.global.v4.*": "emu::load4({every}), emu::yield()",  # a poll: let others run
    "ld.relaxed.gpu.global.v2.*": "emu::load2({every}), emu::yield()",
    "ld.acquire.gpu.global.*": "{out} = emu::acquire((unsigned*){0}), emu::yield()",
    "ld.relaxed.gpu.global.*": "{out} = *(unsigned*){0}, emu::yield()",
    "st.(relaxed.gpu.global.v4.b32.*|global.v4.b32)": "emu::store4((void*){every})",
    "st.(relaxed.gpu.global.v2.b32.*|global.v2.b32)": "emu::store2((void*){every})",
    "st.(relaxed.gpu.global.b32.*|global.b32)": "*(unsigned*){0} = {1}",
    "st.global.v4.f32": "emu::store4((void*){0}, " + ", ".join(f"emu::as_word({{{k}}})" for k in range(1, 5)) + ")",
    "st.global.v2.f32": "((float*){0})[0] = {1}, ((float*){0})[1] = {2}",
    "red.release.gpu.global.add.u32": "emu::add((unsigned*){every}, true)",
    "red.relaxed.gpu.global.add.u32": "emu::add((unsigned*){every}, false)",
    "st.shared.v2.b32.*": "emu::store2(emu::at({0}), {rest})",
    "st.shared.v4.*": "emu::store4(emu::at({0}), {rest})",
    "ld.shared.f32": "{out} = *(const float*)emu::at({0})",
    "ld.shared.b32": "{out} = *(const uint32_t*)emu::at({0})",
    "ld.shared.v2.*": "emu::load2({outs}, emu::at({0}))",
    "ld.shared.v4.*": "emu::load4({outs}, emu::at({0}))",
    "ld.global.u16": "{out} = *(uint16_t*){0}",
    "ld.global.b32": "{out} = *(uint32_t*){0}",
    r"ld.global.*\.v4\..*": "emu::load4({every})",
    r"ld.global.v2\..*": "emu::load2({every})",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.*": "emu::ldmatrix_transposed({every})",
    "ldmatrix.sync.aligned.m8n8.x4.shared.*": "emu::ldmatrix({every})",
    "prmt.b32": "{out} = emu::permuted({ins})",
    "sub.rn.f16x2": "{out} = emu::both_halves<half>({0}, 0x3C003C00u, {1} ^ 0x80008000u, false)",
    "fma.rn.bf16x2": "{out} = emu::both_halves<nv_bfloat16>({ins}, false)",
    "fma.rn.relu.bf16x2": "{out} = emu::both_halves<nv_bfloat16>({ins}, true)",
    "cvt.rna.tf32.f32": "{out} = emu::tf32({0})",
    "cvt.rn.f16.f32": "{out} = emu::half_bits({0})",
    "cvt.f32.f16": "{out} = emu::of_half_bits({0})",
    "cvt.rn.*satfinite.f16x2.f32.*": "{out} = emu::pack2<half>(emu::finite_half({0}), emu::finite_half({1}))",
    r"cvt.rn.*\.bf16x2.f32.*": "{out} = emu::pack2<nv_bfloat16>({ins})",
    "cvt.rn..*x2.f32.*": "{out} = emu::pack2<half>({ins})",
    "ex2.approx.ftz.f32": "{out} = exp2f({0})",
    "lg2.approx.ftz.f32": "{out} = log2f({0})",
    "rcp.approx.ftz.f32": "{out} = 1.0f / ({0})",
    "div.approx.ftz.f32": "{out} = ({0}) / ({1})",
    "rsqrt.approx.f32": "{out} = 1.0f / sqrtf({0})",
    "max.NaN.f32": "{out} = emu::extremum<true>({ins})",
    "min.NaN.f32": "{out} = emu::extremum<false>({ins})",
    "tanh.approx.f32": "{out} = emu::tanh_approx({0})"}.items()}


def instruction(text: str, outs: list[str], ins: list[str]) -> str:
    name, every = text.split(" ")[0].rstrip(";"), ", ".join(outs + ins)
    if copy := _COPY.fullmatch(text):
        return f"emu::cp_async({ins[0]}, {ins[1]}, {copy[1]}, {ins[2] if copy[2] else copy[1]})"
    if name.startswith("mma.sync.aligned.m16n8k"):
        kind, other = name.split(".")[-3:-1]
        assert kind == other, name
        return f"emu::mma({_KIND[kind]}, {every})"
    if wgmma := _WGMMA.search(text):
        pointers = ", ".join(f"&{d}" for d in outs)
        across = "true" if wgmma[3] == "1, 1" else "false"
        return f"emu::wgmma({_KIND[wgmma[2]]}, {wgmma[1]}, {', '.join(ins)}, {{{pointers}}}, {across})"
    if wgmma := _WGMMA_A.search(text):
        pointers, held = ", ".join(f"&{d}" for d in outs), ", ".join(ins[:4])
        return (f"emu::wgmma_registers({_KIND[wgmma[2]]}, {wgmma[1]}, {{{held}}}, {', '.join(ins[4:])}, "
                f"{{{pointers}}})")
    if "mbarrier.try_wait.parity" in text and "@!done bra again" in text:
        return f"emu::mbarrier_wait({every})"
    if "mbarrier.test_wait.parity" in text and "selp.u32 %0, 1, 0, p" in text:
        return f"{outs[0]} = emu::mbarrier_test({', '.join(ins)})"
    if name.startswith("mbarrier.arrive") and not outs:  # also .expect_tx, with the bytes
        return f"emu::mbarrier_arrive({every})"
    if half := _HALF.fullmatch(text):
        return f"{outs[0]} = emu::half_of({ins[0]}, {16 if half[1] == 'high' else 0})"
    if not text:  # pins a value
        return "(void)0"
    if text == "mov.u32 %0, %%clock;":
        return f"{outs[0]} = emu::clock()"
    if special := _SPECIAL.fullmatch(text):
        return f"{outs[0]} = {'threadIdx' if special[1] == 'tid' else 'blockIdx'}.x"
    for pattern, does in _RULES.items():
        if pattern.fullmatch(name):
            return does.format(*ins, every=every, ins=", ".join(ins), rest=", ".join(ins[1:]), outs=", ".join(outs),
                               out=outs[0] if outs else "", end=text.split(" ")[-1].rstrip(";"))
    pytest.fail(f"the emulation does not know {text}")


def _replace(match: re.Match[str]) -> str:
    parts = re.split(r"(?<!:):(?!:)", match[2])
    operands = [re.findall(r'"[=+]?\w"\s*\(((?:[^()]|\([^()]*\))*)\)', p) for p in [*parts, "", ""][:3]]
    return instruction(match[1], operands[1], operands[2]) + ";"


def translate(source: str) -> str:
    text = source.split("#define ushort unsigned short", 1)[1].split("#endif", 1)[1]
    text = re.sub(r'\basm(?: volatile)?\("([^"]*)"((?:[^;"]|"[^"]*")*)\);', _replace, text)
    assert not re.search(r"\basm\b", text), "inline assembly that was not translated"
    return re.sub(r"extern __shared__ \S+ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)emu::shared;", text)

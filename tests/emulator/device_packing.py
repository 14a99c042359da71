"""The kernel that packs weights on a GPU, emulated on the CPU."""

import ctypes
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from cuda_as_cpp import translate
from cuda_on_cpu import compiled

from ecornn.build.cuda import PACK_SYMBOL

PARAMETERS = 128  # that one launch takes
MARK = "#define ushort unsigned short\n#endif\n"  # where the text begins that is translated


@cache
def kernel() -> Any:
    source = resources.files("ecornn.build").joinpath("pack_weights.cu").read_text()
    library = compiled(translate(MARK + source), [PACK_SYMBOL], Path(tempfile.mkdtemp()))
    function = getattr(library, f"emu_{PACK_SYMBOL}")
    function.restype = ctypes.c_char_p
    return function


def pack(device: int, queue: int, works: int, jobs: int, sources: int, places: int, count: int, kind: int,
         *parameters: int) -> None:
    pointers = [ctypes.c_uint64(p) for p in (works, jobs, sources, places)]
    values = [ctypes.c_int32(count), ctypes.c_int32(kind)]
    given = [*pointers, *values, (ctypes.c_uint64 * PARAMETERS)(*parameters)]
    array = (ctypes.c_void_p * len(given))(*(ctypes.addressof(g) for g in given))
    fault = kernel()((count + 7) // 8, 256, array, ctypes.c_bool(True), ctypes.c_bool(False), 1)
    assert fault is None, fault

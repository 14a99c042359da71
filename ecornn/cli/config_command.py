"""``ecornn config``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from ecornn.cli.common import plain_errors


@click.command()
@click.option("--cflags", is_flag=True, help="Flags of a compiler: where ecornn.h, ecornn.hpp and DLPack's header are.")
@click.option("--libs", is_flag=True, help="Flags of a linker: libtvm_ffi, and where it is when the program runs.")
@plain_errors
def config(cflags: bool, libs: bool) -> None:
    """Prints the flags with which C and C++ programs that open module files are compiled and linked.

    \b
      cc main.c $(ecornn config --cflags --libs) -o main
    """
    if not (cflags or libs):
        raise click.UsageError("say --cflags, --libs or both")
    from tvm_ffi import libinfo

    flags = []
    if cflags:
        folders = [str(resources.files("ecornn").joinpath("include")), libinfo.find_dlpack_include_path()]
        flags += [f"-I{folder}" for folder in folders]
    if libs:
        library = Path(libinfo.find_libtvm_ffi())
        # the module needs it, the program does not: the linker must keep it all the same
        flags += [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-Wl,--no-as-needed", "-ltvm_ffi",
                  "-Wl,--as-needed", "-ldl"]
    click.echo(" ".join(flags))

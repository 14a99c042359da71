"""Help that fits its terminal: what click writes as it stands, such as examples, is folded where that is narrow."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import click

NARROW, NAMES = 70, 12  # columns; below NARROW names of options have so many, and stand above what they mean if longer
GAP = re.compile(r"( *)(\S.*?) {2,}(\S.*)")  # a command, or a word, and what it does
TOGETHER = re.compile(r"(?<= )--?[a-z][a-z-]* (?!-)|'[^']*'")  # an option with its value, and what is quoted


def folded(paragraph: str, room: int) -> Iterator[str]:
    """Lines of a paragraph that stands as it is, in ``room`` columns. Lines of text are wrapped; commands, which are
    indented, go on behind a backslash, so that they can still be pasted, and what they do goes below all of them."""
    lines = paragraph.splitlines()
    below = any(len(line) > room for line in lines if GAP.fullmatch(line))
    for line in lines:
        parts = GAP.fullmatch(line) if below else None
        indent, text, does = parts.groups() if parts else (" " * (len(line) - len(line.lstrip())), line.strip(), "")
        command, glued = bool(indent), TOGETHER.sub(lambda m: m[0].replace(" ", "\0"), text)
        wrapped = textwrap.wrap(glued, room - 2 * command, break_long_words=False, break_on_hyphens=False,
                                initial_indent=indent, subsequent_indent=indent + "    " * command) or [line]
        yield "\n".join(part + " \\" * (command and part is not wrapped[-1]) for part in wrapped).replace("\0", " ")
        yield from textwrap.wrap(does, room, initial_indent=indent + "    ", subsequent_indent=indent + "    ")


class Formatter(click.HelpFormatter):
    """Click's, for narrow terminals, too."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Options or commands with what they mean."""
        super().write_dl(rows, col_max if self.width >= NARROW else NAMES, col_spacing)

    def write_text(self, text: str) -> None:
        """Paragraphs; those that begin with a backspace stand as they are."""
        room = self.width - self.current_indent
        super().write_text("\n\n".join("\n".join(folded(part, room)) if part.startswith("\b") else part
                                       for part in text.split("\n\n")))


class Context(click.Context):
    """The context of a command whose help fits its terminal."""

    formatter_class = Formatter


class Commands(click.Group):
    """A group whose commands' help fits, and whose own says of each what it does in a whole sentence."""

    context_class = Context

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Adds a command, whose help is made to fit."""
        cmd.context_class = Context
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

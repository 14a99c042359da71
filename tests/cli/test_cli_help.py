"""Help of every command: that it is there, fits a narrow terminal, and that its examples can be pasted from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from ecornn.cli import main
from ecornn.cli.common import folded


def every(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    """The names of each command, as they are typed."""
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from every(command, *names, name)


COMMANDS = [(), *every(main)]


def help_of(names: tuple[str, ...], columns: int) -> str:
    done = CliRunner().invoke(main, [*names, "--help"], terminal_width=columns)
    assert done.exit_code == 0 and not done.stderr
    return done.stdout


def typed(text: str) -> list[list[str]]:
    """The commands in a help text, as a shell reads them; what stands behind one with a gap is left out."""
    lines = [re.split(r"(?<=\S) {2,}(?=\S)", line)[0] for line in re.sub(r" \\\n *", " ", text).splitlines()]
    return [shlex.split(line) for line in lines if re.match(r" +([A-Z_]+=\S+ )?(ecornn|python)[ -]", line)]


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_fits_its_terminal(names):
    for columns in (60, 80):
        for line in help_of(names, columns).splitlines():
            assert len(line) <= columns, line


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_command_is_shown_by_examples_or_has_few_options(names):
    text = help_of(names, 80)
    assert "Usage:" in text and (len(typed(text)) or len(re.findall(r"^  -", text, re.MULTILINE)) <= 5)


def test_commands_of_a_group_are_said_in_whole_sentences():
    for columns in (60, 80):
        assert "..." not in help_of((), columns).replace("[ARGS]...", "")
        assert "..." not in help_of(("log",), columns).replace("[ARGS]...", "")


def test_examples_can_be_pasted_at_any_width():
    """A command that is folded is the same command to a shell."""
    line = "  ecornn compile --cell 'lstm(peepholes, clip=3)' --hidden 8 --lengths -o out.so"
    for room in range(24, 90):
        out = "\n".join(folded(f"\b\nExamples:\n{line}    what it does, and in which order\n  ecornn doctor", room))
        (command,) = (text for text in typed(out) if text[1] == "compile")
        assert command == shlex.split(line)
        assert "what it does" in " ".join(out.split()) and "\0" not in out
        assert all(len(part) <= max(room, 40) for part in out.splitlines())  # --cell has 40

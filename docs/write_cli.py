"""Writes docs/cli.md from the commands' own --help; a test keeps the two equal."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

INTRODUCTION = """\
# Command line

Written by `make docs` from the commands' own help. Answers and JSON go to stdout, everything else to stderr.
Exit codes: 0 done, 1 unexpected failure, 2 bad input (one line names the cause and the mend), 130 interrupted.
"""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and, in the order of the help, those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def page() -> str:
    """docs/cli.md as it should be."""
    os.environ["COLUMNS"] = "100"  # argparse wraps to the terminal's width
    from reader_rag.cli import build_parser

    sections = [f"\n## {p.prog}\n\n```\n{p.format_help()}```\n" for p in parsers(build_parser())]
    return INTRODUCTION + "".join(sections)


if __name__ == "__main__":
    target = Path(__file__).with_name("cli.md")
    target.write_text(page(), encoding="utf-8")
    print(target)

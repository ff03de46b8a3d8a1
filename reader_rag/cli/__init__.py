"""The command `reader-rag`: demo, index, ask, bench, doctor.

Answers and JSON go to stdout, everything else to stderr. Exit codes: 0 done, 1 an unexpected failure,
2 bad input (one line says cause and mend), 130 interrupted with Ctrl-C.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from reader_rag.bench import cli as bench
from reader_rag.cli import ask, demo, doctor, index
from reader_rag.errors import ReaderError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

_NO_PLACE = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)
"""A disk that is full, or a place that may not be written: no fault of the program."""

_EPILOG = """\
exit codes: 0 done, 1 unexpected failure, 2 bad input, 130 interrupted
answers and JSON are written to stdout, everything else to stderr"""


class Parser(argparse.ArgumentParser):
    """argparse, with every error in one line that ends in the mend."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"reader-rag: error: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; building it imports neither torch nor a framework."""
    parser = Parser(
        prog="reader-rag",
        description="A local LLM answers RAG questions several times faster, and not one token changes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands",
        metavar="COMMAND",
        required=True,
        parser_class=_Command,
    )
    demo.add_parser(commands)
    index.add_parser(commands)
    ask.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    codecs.register_error("reader_rag.escape", _escape)
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):  # not so where a notebook or a test took its place
            out.reconfigure(errors="reader_rag.escape")
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ReaderError as error:
        print(f"reader-rag: error: {_one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\nreader-rag: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_PLACE:
            print(f"reader-rag: error: {_one_line(error)}; free it, or name another place", file=sys.stderr)
            return FAILED
        traceback.print_exc()
        print(f"reader-rag: unexpected failure: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return FAILED


class _Command(Parser):
    def __init__(self, **options: object) -> None:
        super().__init__(**(options | {"allow_abbrev": False}))  # type: ignore[arg-type]


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from reader_rag import __version__

        print(f"reader-rag {__version__}")
        parser.exit()


def _escape(error: UnicodeError) -> tuple[str, int]:
    """What a terminal's encoding lacks, as JSON writes it: an answer is not cut off there, and a document stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

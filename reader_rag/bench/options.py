"""What the benches' commands share: options, and one JSON line behind a table."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from reader_rag.errors import SettingsError
from reader_rag.settings import SOURCES

if TYPE_CHECKING:
    from reader_rag.load import Loaded
    from reader_rag.reader import Reader


def parser_of(kinds: Any, name: str, short: str, long: str) -> argparse.ArgumentParser:
    """The parser of one kind of bench, with --json."""
    one: argparse.ArgumentParser = kinds.add_parser(
        name, help=short, description=long, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    one.add_argument("--json", action="store_true", help="one JSON document as the last line of stdout")
    return one


def add_questions(one: argparse.ArgumentParser, limit: str = "the first N questions") -> None:
    """--data, --limit and --max-tokens: questions that the model answers."""
    one.add_argument("--data", required=True, metavar="FILE", help="JSON lines of questions")
    one.add_argument("--limit", type=int, metavar="N", help=limit)
    one.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens per answer")


def add_set(one: argparse.ArgumentParser) -> None:
    one.add_argument("--set", dest="only", metavar="NAME", help="only this set, e.g. rag")


def add_sets(one: argparse.ArgumentParser) -> None:
    one.add_argument("--sets", metavar="NAMES", help="only these sets, separated by commas, e.g. rag,qa")


def add_model(one: argparse.ArgumentParser, *, dtype: bool = True) -> None:
    """--model, and --dtype where the model runs."""
    one.add_argument(
        "--model", metavar="M", help="hub id, folder or .gguf file; the demo model when left out"
    )
    if dtype:
        one.add_argument("--dtype", default="auto", metavar="D", help="float32, bfloat16, float16 or auto")


def add_width(one: argparse.ArgumentParser, default: int | None) -> None:
    words = "tokens of a pass" if default else "tokens of a pass (measured when left out)"
    one.add_argument("--width", type=int, default=default, metavar="W", help=words)


def names_of(text: str | None) -> list[str]:
    """The names of a comma-separated option."""
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


def add_contexts(one: argparse.ArgumentParser, default: str) -> None:
    one.add_argument(
        "--contexts", default=default, metavar="LENGTHS", help="tokens of the prompts, separated by commas"
    )


def lengths_of(contexts: str) -> list[int]:
    """The lengths that --contexts names; SettingsError where they mean nothing."""
    lengths = names_of(contexts)
    if not lengths or not all(length.isdecimal() and int(length) > 1 for length in lengths):
        raise SettingsError(f"--contexts is {contexts!r}; give lengths of 2 tokens and more, as in 512,2048")
    return [int(length) for length in lengths]


def load_weights(args: argparse.Namespace) -> Loaded:
    """The model that --model and --dtype name; a bad --max-tokens is refused before it loads."""
    from reader_rag.load import load_model
    from reader_rag.settings import Sampling

    Sampling(max_tokens=args.max_tokens)
    return load_model(args.model, dtype=args.dtype, progress=True)


def load_reader(args: argparse.Namespace) -> Reader:
    """The Reader that --model, --dtype, --width and, where there is one, --sources name. It keeps nothing between prompts."""
    from reader_rag.reader import Reader
    from reader_rag.settings import Drafting

    drafting = Drafting(
        sources=tuple(names_of(args.sources)) if "sources" in args else SOURCES, persist=False
    )
    # Every system reads every prompt itself.
    return Reader(load_weights(args), width=args.width, drafting=drafting, prefix_bytes=0)


def put_out(args: argparse.Namespace, result: dict[str, Any], table: str) -> int:
    """The table to stderr, with --json the result as the last line of stdout; the exit code."""
    print(table, file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0

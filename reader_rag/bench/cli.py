"""`reader-rag bench`: the subcommands and their options."""

from __future__ import annotations

import argparse
from typing import Any

from reader_rag.bench import commands
from reader_rag.bench.options import (
    add_contexts,
    add_model,
    add_questions,
    add_set,
    add_width,
    lengths_of,
    load_reader,
    load_weights,
    parser_of,
    put_out,
)


def add_parser(subparsers: Any) -> None:
    """Registers `bench` and its subcommands; each sets `run`, a function of the parsed arguments that returns an exit code."""
    bench = subparsers.add_parser(
        "bench", help="measure speed on this machine", description="Measurements on this machine."
    )
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_speed(kinds)
    commands.add_record(kinds)
    commands.add_replay(kinds)
    commands.add_peers(kinds)
    commands.add_curve(kinds)
    _add_fit(kinds)
    _add_batch(kinds)
    _add_passes(kinds)
    _add_conversation(kinds)
    commands.add_drafting(kinds)


def _add_speed(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "speed",
        "READER beside transformers' generate on real questions",
        "Runs every question through transformers' generate, its prompt lookup, our engine with drafting off, and READER, "
        "in turns in one process. Learned statistics start empty and are not saved. Run it on a quiet machine.",
    )
    add_questions(one)
    add_set(one)
    add_width(one, None)
    add_model(one)
    one.set_defaults(run=_speed)


def _speed(args: argparse.Namespace) -> int:
    from reader_rag.bench.speed import report, speed

    result = speed(load_reader(args), args.data, only=args.only, limit=args.limit, max_tokens=args.max_tokens)
    return put_out(args, result, report(result))


def _add_fit(kinds: Any) -> None:
    one = kinds.add_parser(
        "fit",
        help="the reliability table that drafting begins with, fitted on recorded answers",
        description="Replays answers position by position and writes how often each source was right at each level, as a JSON "
        "table. The answers are the recordings of `bench record`, or those of a file: its recorded responses (hard evidence "
        "only), or else the model's own, which takes as long as answering all questions does.",
    )
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="FILE", help="JSON lines of questions")
    what.add_argument("--recordings", metavar="FOLDER", help="recordings of `bench record`")
    one.add_argument("--responses", metavar="NAME", help="with --data: the answers recorded under this name")
    add_model(one, dtype=False)
    one.add_argument("--limit", type=int, metavar="N", help="the first N questions of each set")
    one.add_argument(
        "--out", default="priors.json", metavar="FILE", help="where the table goes (priors.json)"
    )
    one.set_defaults(run=_fit)


def _fit(args: argparse.Namespace) -> int:
    from reader_rag.bench.fit import run

    return run(args)


def _add_batch(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "batch",
        "many requests at once beside transformers' batched generate",
        "Sends all questions at once through transformers' generate in batches, through READER with rows, and through READER one "
        "at a time, in one process. Learned statistics start empty and are not saved. Run it on a quiet machine.",
    )
    add_questions(one)
    add_set(one)
    one.add_argument("--rows", type=int, default=8, metavar="R", help="requests that share a pass")
    add_width(one, None)
    one.add_argument("--throughput", action="store_true", help="throughput mode instead of exact mode")
    one.add_argument("--sweep", action="store_true", help="adds a table over 1 to 16 rows in both modes")
    add_model(one)
    one.set_defaults(run=_batch)


def _batch(args: argparse.Namespace) -> int:
    from reader_rag.bench.batch import batch, report

    result = batch(
        load_weights(args),
        args.data,
        rows=args.rows,
        width=args.width,
        only=args.only,
        limit=args.limit,
        max_tokens=args.max_tokens,
        exact=not args.throughput,
        sweep=args.sweep,
    )
    return put_out(args, result, report(result))


def _add_passes(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "passes",
        "where the time of a decoding pass goes",
        "Times passes behind prompts of several lengths: the model, drafting, and the bookkeeping between two forward passes; and "
        "plain decoding beside transformers' generate. Needs no data. Run it on a quiet machine.",
    )
    one.add_argument("--rows", type=int, default=8, metavar="R", help="requests that share a pass")
    add_contexts(one, "512,2048,8192")
    one.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens per answer")
    one.add_argument(
        "--profile", action="store_true", help="adds the functions that take the most time at one row"
    )
    add_width(one, None)
    add_model(one)
    one.set_defaults(run=_passes)


def _passes(args: argparse.Namespace) -> int:
    from reader_rag.bench.passes import passes, report

    contexts = lengths_of(args.contexts)
    result = passes(
        load_weights(args),
        rows=args.rows,
        width=args.width,
        contexts=contexts,
        max_tokens=args.max_tokens,
        profile=args.profile,
    )
    return put_out(args, result, report(result))


def _add_conversation(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "conversation",
        "the second turn of a conversation beside its first",
        "Seconds to the first token of a first turn, of the second, and of the second with everything forgotten; and whether both "
        "second answers are equal. Needs no data. Run it on a quiet machine.",
    )
    one.add_argument("--tokens", type=int, default=2000, metavar="N", help="tokens of the first prompt")
    one.add_argument("--rounds", type=int, default=3, metavar="N", help="conversations; medians are shown")
    one.add_argument("--max-tokens", type=int, default=48, metavar="N", help="tokens per answer")
    add_width(one, None)
    add_model(one)
    one.set_defaults(run=_conversation)


def _conversation(args: argparse.Namespace) -> int:
    from reader_rag.bench.conversation import conversation, report

    result = conversation(
        load_weights(args),
        tokens=args.tokens,
        rounds=args.rounds,
        width=args.width,
        max_tokens=args.max_tokens,
    )
    return put_out(args, result, report(result))

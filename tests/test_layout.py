"""The package's shape: which module may import which, what importing costs, and what is public."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "reader_rag"
LANGCHAIN = ROOT / "integrations" / "langchain_reader_rag"
LLAMA_INDEX = ROOT / "integrations" / "llama_index"
FRAMEWORKS = {"langchain", "langchain_core", "langchain_reader_rag", "llama_index"}

# Each part of the core, and the parts it must not know.
FORBIDDEN = {
    "store": {"draft", "verify", "reader", "engine", "memory", "load", "prompt", "stream", "bench", "cli"},
    "draft": {"store", "verify", "reader", "engine", "memory", "load", "prompt", "stream", "bench", "cli"},
    "verify": {"store", "draft", "reader", "engine", "memory", "load", "prompt", "stream", "bench", "cli"},
    "prompt": {"store", "draft", "verify", "reader", "engine", "memory", "load", "bench", "cli"},
    "stream": {"store", "draft", "verify", "reader", "engine", "memory", "load", "bench", "cli"},
    "settings": {"store", "draft", "verify", "reader", "engine", "memory", "load", "bench", "cli"},
    "structured": {"store", "verify", "reader", "engine", "memory", "load", "prompt", "bench", "cli"},
    "load": {"store", "draft", "verify", "reader", "engine", "memory", "bench", "cli"},
    "reader": {"bench", "cli"},
    "bench": {"cli"},
}
MODELS = {"torch", "transformers", "tokenizers"}


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether importing this file imports it); type-checking blocks are left out."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from walk(child, at_import)
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or "", at_import
            yield from ((f"{node.module}.{alias.name}", at_import) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not inside)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), True)


def part(module: str) -> str | None:
    """`reader_rag.store.chunk` is of the part `store`."""
    names = module.split(".")
    return names[1] if names[0] == "reader_rag" and len(names) > 1 else None


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_imports_run_one_way(name: str) -> None:
    home = CORE / name
    for file in files(home) if home.is_dir() else [CORE / f"{name}.py"]:
        for module, _ in imports(file):
            assert part(module) not in FORBIDDEN[name], f"{file.relative_to(ROOT)} imports {module}"


def test_no_framework_in_the_core_but_for_the_demo() -> None:
    for file in files(CORE):
        for module, at_import in imports(file):
            if module.partition(".")[0] in FRAMEWORKS:
                assert file == CORE / "cli" / "demo.py", f"{file.relative_to(ROOT)} imports {module}"
                assert not at_import, f"{file.relative_to(ROOT)} imports {module} before the demo runs"


def test_store_and_draft_know_no_model() -> None:
    for file in [*files(CORE / "store"), *files(CORE / "draft")]:
        for module, at_import in imports(file):
            # The embedder quietens transformers while it loads sentence-transformers; a speculator is a model.
            allowed = file.name in ("embed.py", "speculator.py") and not at_import
            assert allowed or module.partition(".")[0] not in MODELS, (
                f"{file.relative_to(ROOT)} imports {module}"
            )


def test_draft_knows_neither_text_nor_settings() -> None:
    for file in files(CORE / "draft"):
        assert not {part(module) for module, _ in imports(file)} & {"prompt", "stream", "spans"}, file


def test_each_integration_knows_one_framework() -> None:
    for folder, other in (
        (LANGCHAIN, {"llama_index"}),
        (LLAMA_INDEX, {"langchain", "langchain_core", "langchain_reader_rag"}),
    ):
        for file in files(folder):
            for module, _ in imports(file):
                assert module.partition(".")[0] not in other, f"{file.relative_to(ROOT)} imports {module}"


def test_llama_index_stays_a_namespace_package() -> None:
    assert not (LLAMA_INDEX / "__init__.py").exists()
    assert not (LLAMA_INDEX / "llms" / "__init__.py").exists()
    assert not (ROOT / "integrations" / "__init__.py").exists()


def test_importing_the_package_or_its_command_loads_no_model_library_and_is_quick() -> None:
    script = (
        "import sys, time; start = time.perf_counter()\n"
        "import reader_rag; took = time.perf_counter() - start\n"
        "import reader_rag.cli; reader_rag.cli.build_parser()\n"
        "heavy = {'torch', 'transformers', 'faiss', 'sentence_transformers', 'langchain_core', 'llama_index'}\n"
        "print(took, *sorted(heavy & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")])}
    took = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        seconds, *heavy = done.stdout.split()
        assert heavy == []
        took.append(float(seconds))
        if took[-1] < 1:
            break
        time.sleep(1)  # a busy machine: the import itself is the same each time
    assert min(took) < 1


def test_public_names_are_sorted_and_all_there() -> None:
    import reader_rag

    assert list(reader_rag.__all__) == sorted(reader_rag.__all__)
    for name in reader_rag.__all__:
        assert getattr(reader_rag, name) is not None
        assert name in dir(reader_rag)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = reader_rag.no_such_name


def test_modules_are_named_by_role() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc", "core"}
    for folder in (CORE, LANGCHAIN, LLAMA_INDEX):
        assert not {file.stem for file in files(folder)} & vague


def test_no_file_grows_beyond_one_screenful_of_screens() -> None:
    long = {str(f.relative_to(ROOT)): n for f in files(CORE) if (n := len(f.read_text().splitlines())) > 450}
    assert long == {}


def test_every_import_root_is_typed_and_shipped() -> None:
    for folder in (CORE, LANGCHAIN, LLAMA_INDEX / "llms" / "reader_rag"):
        assert (folder / "py.typed").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert shipped == ["reader_rag", "integrations/langchain_reader_rag", "integrations/llama_index"]

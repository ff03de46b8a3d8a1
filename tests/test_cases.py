"""Failures that users met elsewhere: every test that docs/cases.md names exists; here are those that had no other place."""

from __future__ import annotations

import ast
import random
import re
import time
from pathlib import Path

import pytest

from reader_rag import Reader, Sampling
from reader_rag.draft import make_drafter

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)


def defined_in(file: str) -> set[str]:
    path = ROOT / "tests" / file
    assert path.exists(), f"docs/cases.md names tests of {file}, which is not there"
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_the_page_names_exists(file: str) -> None:
    assert {name for where, name in NAMED if where == file} <= defined_in(file)


def test_every_row_of_the_page_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| (?!Failure|---)", line)]
    assert len(rows) > 40
    assert [row for row in rows if not re.search(r"`test_\w+\.py::\w+`", row)] == []


def test_a_tokenizer_without_a_padding_token_serves_batches_and_is_left_as_it_is(
    tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    before = dict(tokenizer.special_tokens_map)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    reader = Reader.load(model, tokenizer=tokenizer, width=4, cache_dir=tmp_path)
    prompts = ["Why?", "What is a chunk of text, and what is a span?", "for name"]
    sampling = Sampling(max_tokens=8)
    answers = reader.generate_batch(prompts, sampling=sampling)
    assert [answer.tokens for answer in answers] == [
        reader.generate(prompt, sampling=sampling).tokens for prompt in prompts
    ]
    assert tokenizer.pad_token is None
    assert dict(tokenizer.special_tokens_map) == before


@pytest.mark.parametrize(
    "roles",
    ["assistant", "user assistant", "system assistant", "assistant user", "user user assistant system"],
)
def test_messages_may_come_in_any_order_that_the_template_takes(reader: Reader, roles: str) -> None:
    messages = [{"role": role, "content": f"Number {n}."} for n, role in enumerate(roles.split())]
    answer = reader.generate(messages, sampling=Sampling(max_tokens=4))
    assert 1 <= len(answer.tokens) <= 4
    prompt = reader.tokenizer.decode(reader.encode_prompt(messages))
    assert [f"Number {n}." in prompt for n in range(len(messages))] == [True] * len(messages)


def test_a_hundred_times_longer_context_costs_about_the_same_per_step() -> None:
    def seconds(length: int) -> float:
        """Of one step: draft, then observe a token; the median of forty."""
        rng = random.Random(0)
        text = [int(rng.paretovariate(0.6)) % 32_000 for _ in range(length)]  # a few tokens are everywhere
        drafter = make_drafter(["context"])
        drafter.observe_prompt(text, None, None)
        taken = []
        for token in rng.choices(text, k=40):
            began = time.process_time()
            drafter.draft([], 16, 16)
            drafter.observe([token], [[token]], [[0.9]])
            taken.append(time.process_time() - began)
        return sorted(taken)[len(taken) // 2]

    assert seconds(100_000) < 5 * seconds(1_000) + 0.001

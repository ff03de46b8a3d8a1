"""Constraints: every answer is of the language, and drafting changes no token of it."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("llguidance")

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from reader_rag import Drafting, Reader, Sampling
from reader_rag.errors import SettingsError
from reader_rag.structured import Constraint
from reader_rag.structured.matching import Grammars
from reader_rag.structured.source import GrammarSource

OFF = Drafting(sources=())
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["chunk", "span", "日本語"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "size", "flags"],
}


class Person(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["chunk", "span"]


@pytest.fixture(scope="module")
def shared(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader.load(tiny_model, dtype="float32", width=8, cache_dir=tmp_path_factory.mktemp("fp32"))


def ask(reader: Reader, constraint: Constraint, **options: Any) -> Any:
    """The answer with drafts, after it was seen to be the one without."""
    sampling = Sampling(max_tokens=120, constraint=constraint, **options)
    drafted = reader.generate("what is a chunk?", sampling=sampling)
    plain = reader.generate("what is a chunk?", sampling=sampling, drafting=OFF)
    assert drafted.tokens == plain.tokens
    return drafted


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}])
def test_json_is_of_its_schema_with_and_without_drafts(shared: Reader, options: dict[str, Any]) -> None:
    answer = ask(shared, Constraint.json_schema(PERSON), **options)
    value = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert list(value) == ["name", "kind", "size", "flags"]
    assert len(value["name"]) <= 8
    assert value["kind"] in ("chunk", "span", "日本語")
    assert 0 <= value["size"] <= 99
    assert set(map(type, value["flags"])) == {bool}
    assert answer.tokens[-1] in shared.eos
    assert answer.stats.accepted_by_source["grammar"] > 5
    assert answer.stats.tokens_per_pass > 1.3


def test_forced_tokens_are_drafted_from_the_first_pass_on(shared: Reader) -> None:
    sampling = Sampling(
        max_tokens=120, constraint=Constraint.choice(["a chunk is a retrieved piece of text"])
    )
    answer = shared.generate("q", sampling=sampling, drafting=Drafting(sources=("context",)))
    assert answer.text == "a chunk is a retrieved piece of text"
    assert answer.stats.accepted_by_source["grammar"] >= answer.stats.tokens - 1 - answer.stats.passes


def test_regex_and_choice_and_grammar(shared: Reader) -> None:
    assert re.fullmatch(r"[a-c]{3}-\d{2}", ask(shared, Constraint.regex(r"[a-c]{3}-[0-9]{2}")).text)
    assert ask(shared, Constraint.choice(["yes", "no", "日本"])).text in ("yes", "no", "日本")
    assert ask(shared, Constraint.lark('start: "<" /[xy]{2}/ ">"')).text[1:3].strip("xy") == ""


def test_schemas_of_pydantic_typed_dicts_and_dataclasses(shared: Reader) -> None:
    class Named(TypedDict):
        kind: Literal["chunk", "span"]

    @dataclass
    class Sized:
        size: Literal[3, 4]

    assert Person.model_validate_json(ask(shared, Constraint.json_schema(Person)).text)
    assert json.loads(ask(shared, Constraint.json_schema(Named)).text)["kind"] in ("chunk", "span")
    assert json.loads(ask(shared, Constraint.json_schema(Sized)).text)["size"] in (3, 4)
    assert Constraint.json_schema(json.dumps(PERSON)) == Constraint.json_schema(PERSON)


def test_objects_have_the_properties_they_list_and_no_others() -> None:
    nested = {"type": "object", "properties": {"properties": {"type": "object", "properties": {}}}}
    grammar = Constraint.json_schema(nested).grammar
    assert grammar.count('"additionalProperties') + grammar.count('\\"additionalProperties') == 2
    open_ = {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}]}
    assert "additionalProperties" not in Constraint.json_schema(open_).grammar


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Constraint.json_schema({"type": "nothing"}), "json schema cannot be compiled"),
        (lambda: Constraint.json_schema({"type": "string", "format": "no-such"}), "no-such"),
        (lambda: Constraint.json_schema("{"), "not JSON"),
        (lambda: Constraint.json_schema(3), "is a int"),
        (lambda: Constraint.json_schema({"enum": [{1, 2}]}), "not JSON"),
        (lambda: Constraint.regex("(?=a)b"), "regex cannot be compiled"),
        (lambda: Constraint.regex(""), "use a pattern"),
        (lambda: Constraint.choice([]), "non-empty"),
        (lambda: Constraint.choice(["a", ""]), "non-empty"),
        (lambda: Constraint.lark("start: ("), "grammar cannot be compiled"),
        (lambda: Sampling(constraint={"type": "object"}), r"use reader_rag\.structured\.Constraint"),
        (lambda: Sampling(logprobs=21), "from 0 to 20"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_call(make: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make()


def test_without_the_extra_the_error_names_the_command() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from reader_rag.structured import Constraint\n"
        "try:\n    Constraint.choice(['a'])\n"
        "except ImportError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "reader-rag[structured]"' in run.stdout


def test_a_matching_is_a_function_of_the_answer_alone(shared: Reader) -> None:
    """Jumping about between answers gives what a fresh matching gives."""
    grammars = Grammars(shared.tokenizer, len(shared.tokenizer), shared.eos)
    constraint = Constraint.json_schema(PERSON)
    text = '{"name": "chunk", "kind": "span", "size": 7, "flags": [true, false]}'
    tokens = [*shared.encode(text), *shared.eos]
    chance = random.Random(0)
    scores = torch.rand(len(shared.tokenizer), generator=torch.Generator().manual_seed(0))
    wandering = grammars.match(constraint)
    for _ in range(60):
        length = chance.randrange(len(tokens))
        answer = tokens[:length]
        if chance.random() < 0.5:  # somebody drafts what the grammar does not admit
            assert wandering.forced([*answer, chance.randrange(3, 300), 5]) is not None
        fresh = grammars.match(constraint)
        greedy = chance.random() < 0.5
        assert wandering.forced(answer) == fresh.forced(answer)
        restricted = wandering.restrict(scores, answer, greedy=greedy)
        assert torch.equal(restricted, fresh.restrict(scores, answer, greedy=greedy))
        full = fresh.restrict(scores, answer, greedy=False)
        assert torch.isfinite(full[tokens[length]])
        assert int(restricted.argmax()) == int(full.argmax())


def test_forced_tokens_follow_one_another_without_asking_again(shared: Reader) -> None:
    matching = Grammars(shared.tokenizer, len(shared.tokenizer), shared.eos).match(
        Constraint.choice(["a chunk of text"])
    )
    source = GrammarSource(matching)
    source.observe(shared.encode("what?"), [], prompt=True)
    state, found = source.root(), []
    while evidence := source.predict(state):
        (token,) = evidence[0].hard
        found.append(token)
        state = source.advance(state, token)
    assert shared.tokenizer.decode(found) == "a chunk of text"
    source.observe(found[:2], [None, None], prompt=False)
    assert list(source.predict(source.root())[0].hard) == [found[2]]
    assert source.predict(source.advance(source.root(), 300)) == []


def test_stop_strings_and_the_budget_still_end_a_constrained_answer(shared: Reader) -> None:
    constraint = Constraint.json_schema(PERSON)
    cut = shared.generate("q", sampling=Sampling(constraint=constraint, stop=('"kind"',)))
    assert cut.text.startswith('{"name": "')
    assert "kind" not in cut.text
    short = shared.generate("q", sampling=Sampling(constraint=constraint, max_tokens=4))
    assert (short.finish_reason, len(short.tokens)) == ("length", 4)


def test_banning_what_the_grammar_forces_says_so(shared: Reader) -> None:
    first = shared.encode("zzz")[0]
    sampling = Sampling(constraint=Constraint.choice(["zzz"]), logit_bias={first: float("-inf")})
    with pytest.raises(Exception, match="the constraint allows"):
        shared.generate("q", sampling=sampling)
    assert shared.generate("q", sampling=Sampling(max_tokens=3)).tokens


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float32", "exact": False}])
def test_rows_that_share_passes_keep_to_their_own_grammars(
    tiny_model: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    reader = Reader.load(tiny_model, width=8, rows=4, cache_dir=tmp_path, **options)
    constraints = [
        Constraint.json_schema(PERSON),
        Constraint.regex("[a-f]{9}"),
        None,
        Constraint.choice(["a chunk of text", "a chunk"]),
    ]
    sampling = [Sampling(max_tokens=90, constraint=constraint) for constraint in constraints]
    alone = [reader.generate("what is a chunk?", sampling=each, drafting=OFF).tokens for each in sampling]
    together = reader.generate_batch(["what is a chunk?"] * 4, sampling=sampling)
    assert [answer.tokens for answer in together] == alone
    assert json.loads(together[0].text)["kind"] in PERSON["properties"]["kind"]["enum"]


# Log-probabilities


def test_logprobs_are_the_models_own_with_and_without_drafts(shared: Reader) -> None:
    question = "The reader looks up how a text goes on. How does a text go on?"
    sampling = Sampling(max_tokens=60, logprobs=3)
    drafted = shared.generate(question, sampling=sampling)
    plain = shared.generate(question, sampling=sampling, drafting=OFF)
    assert drafted.stats.accepted > 0
    assert drafted.logprobs == plain.logprobs
    assert [entry.token for entry in drafted.logprobs] == list(drafted.tokens)
    ids = torch.tensor([[*shared.encode_prompt(question), *drafted.tokens]])
    logits = shared.model(ids).logits[0, -len(drafted.tokens) - 1 : -1].float().log_softmax(-1)
    for entry, row in zip(drafted.logprobs, logits, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        assert len(entry.top) == 3
        assert entry.top[0][1] == pytest.approx(float(row.max()), abs=1e-3)
    assert shared.generate(question, sampling=Sampling(max_tokens=2)).logprobs is None
    assert shared.generate(question, sampling=Sampling(max_tokens=2, logprobs=0)).logprobs[0].top == ()

"""Facts drawn from real texts by the demo model, as JSON: every answer validates, and is the same without drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema

from reader_rag import Drafting, Reader, Sampling
from reader_rag.structured import Constraint

TEXTS = (
    "Python is a high-level programming language that Guido van Rossum began in the late 1980s. Version 3.0 came in 2008.",
    "The Amazon river in South America is about 6,400 km long and carries more water than any other river.",
    "Marie Curie, born in Warsaw in 1867, won the Nobel Prize in physics in 1903 and in chemistry in 1911.",
    "A context manager sets something up when a with block begins and cleans up when it ends, even after an exception.",
    "Our store opens at 9 and closes at 18, Monday to Friday. Returns are free within 30 days.",
    "The blue whale weighs up to 150 tonnes, eats krill, and lives in every ocean but the Arctic.",
    "Flight LH454 leaves Frankfurt at 10:05 and lands in San Francisco at 12:30. Gate B42 closes 20 minutes before.",
    "Mix 250 g of flour, 2 eggs and half a litre of milk; let it rest for 20 minutes and fry thin pancakes in butter.",
    "東京 is the capital of Japan. About 14 million people live in it, and 37 million in the whole region.",
    "SQLite keeps a database in one file. It is in the public domain, needs no server, and is tested very thoroughly.",
)
SHORT = {"type": "string", "maxLength": 40}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"topic": SHORT, "kind": {"enum": ["person", "place", "thing", "event"]}},
        "required": ["topic", "kind"],
    },
    {
        "type": "object",
        "properties": {
            "title": SHORT,
            "keywords": {
                "type": "array",
                "items": {"type": "string", "maxLength": 15},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["title", "keywords"],
    },
    {
        "type": "object",
        "properties": {
            "number": {"type": ["integer", "null"], "minimum": 0, "maximum": 100000},
            "unit": {"type": ["string", "null"], "maxLength": 10},
            "certain": {"type": "boolean"},
        },
        "required": ["number", "unit", "certain"],
    },
    {
        "type": "object",
        "properties": {
            "facts": {"type": "array", "items": {"$ref": "#/$defs/fact"}, "minItems": 1, "maxItems": 2}
        },
        "required": ["facts"],
        "$defs": {
            "fact": {
                "type": "object",
                "properties": {"subject": {"type": "string", "maxLength": 20}, "says": SHORT},
                "required": ["subject", "says"],
            }
        },
    },
    {
        "type": "object",
        "properties": {
            "year": {"type": "string", "pattern": "^[0-9]{4}$"},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "language": {"const": "en"},
        },
        "required": ["score", "language"],
    },
)
CASES = [(text, schema) for text in TEXTS for schema in SCHEMAS]


def check(reader: Reader, text: str, schema: dict[str, Any]) -> None:
    prompt = f"Text: {text}\n\nDescribe the text as JSON with the fields {', '.join(schema['properties'])}."
    sampling = Sampling(max_tokens=200, constraint=Constraint.json_schema(schema))
    answer = reader.generate(prompt, sampling=sampling, chunks=[text])
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    plain = reader.generate(prompt, sampling=sampling, drafting=Drafting(sources=()))
    assert answer.tokens == plain.tokens
    assert answer.stats.passes < plain.stats.passes


def test_there_are_fifty_cases() -> None:
    assert len(CASES) == 50


@pytest.mark.parametrize("case", [1, 17, 43])
def test_json_of_real_texts_validates_and_is_the_same_without_drafts(demo_reader: Reader, case: int) -> None:
    check(demo_reader, *CASES[case])


@pytest.mark.exact
@pytest.mark.parametrize("case", range(50))
def test_json_of_fifty_real_texts_validates_and_is_the_same_without_drafts(
    demo_reader: Reader, case: int
) -> None:
    check(demo_reader, *CASES[case])

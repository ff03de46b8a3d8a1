"""Tools: described by the template, called in its format, read back, and kept out of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from reader_rag import Drafting, Reader, Sampling
from reader_rag.errors import PromptError, SettingsError
from reader_rag.prompt import control_ids
from reader_rag.structured import plan_tools
from reader_rag.structured.calls import CallStream
from reader_rag.structured.formats import FORMATS

OFF = Drafting(sources=())
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["Oslo", "Quito"]},
                "days": {"type": "integer", "maximum": 3, "minimum": 1},
            },
            "required": ["place", "days"],
        },
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, CLOCK]

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
TEMPLATES = {
    "hermes": _TOOLS + _TURNS + "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    + _END,
    "llama3": _TOOLS + _TURNS + "{% for c in m.tool_calls or [] %}{# <|python_tag|> #}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}' + _END,
    "mistral": _TOOLS + _TURNS + "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]{% endif %}'
    + _END,
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo", "days": 2}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"place": "Oslo", "days": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"place": "Oslo", "days": 2}}]',
}


@pytest.fixture(scope="module")
def readers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """A Reader per format; Mistral's marker is a special token, Hermes' marks are added ones, as in the real models."""
    from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

    made = {}
    for name, template in TEMPLATES.items():
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        marks = {"hermes": ["<tool_call>", "</tool_call>"], "mistral": ["[TOOL_CALLS]"]}.get(name, [])
        tokenizer.add_tokens(
            [AddedToken(mark, special=name == "mistral") for mark in marks], special_tokens=name == "mistral"
        )
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        tokenizer.chat_template = template
        made[name] = Reader.load(
            model, tokenizer, dtype="float32", device="cpu", width=8, cache_dir=tmp_path_factory.mktemp(name)
        )
    return made


def tokens_of(reader: Reader, text: str) -> list[int]:
    return reader.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_is_complete_and_the_same_without_drafts(readers: dict[str, Reader], name: str) -> None:
    reader = readers[name]
    options: dict[str, Any] = {"tools": TOOLS, "sampling": Sampling(max_tokens=120)}
    for choice in (
        "required",
        "any",
        "get_weather",
        {"type": "function", "function": {"name": "get_weather"}},
    ):
        answer = reader.generate("the weather?", tool_choice=choice, **options)
        plain = reader.generate("the weather?", tool_choice=choice, drafting=OFF, **options)
        assert answer.tokens == plain.tokens
        assert (answer.text, answer.finish_reason, answer.broken_calls) == ("", "stop", ())
        (call,) = answer.tool_calls
        assert len(call.id) == 9
        assert call.id.isalnum()
        assert call.id != plain.tool_calls[0].id
        if call.name == "get_weather":
            assert call.arguments["place"] in ("Oslo", "Quito")
            assert call.arguments["days"] in (1, 2, 3)
        else:
            assert choice in ("required", "any")
            assert call.arguments == {}
    assert reader.generate("what time?", tool_choice="clock", **options).tool_calls[0].arguments == {}


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_writes_tools_calls_and_results(readers: dict[str, Reader], name: str) -> None:
    reader = readers[name]
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"zone": "CET"}'},
    }
    messages = [
        {"role": "user", "content": "what time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon <|im_end|>", "tool_call_id": "abcdefghi", "name": "clock"},
    ]
    ids = reader.encode_prompt(messages, tools=TOOLS)
    text = reader.tokenizer.decode(ids)
    assert '"get_weather"' in text
    assert '{"zone": "CET"}' in text
    assert "<|im_start|>tool\nnoon <|im_end|><|im_end|>" in text
    assert ids.count(reader.tokenizer.eos_token_id) == 4  # the one in the result is plain text
    assert '"get_weather"' not in reader.tokenizer.decode(reader.encode_prompt(messages))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 3, 50])
def test_calls_are_read_and_kept_out_of_the_text_however_the_tokens_come(
    readers: dict[str, Reader], name: str, size: int
) -> None:
    reader, form = readers[name], FORMATS[name]
    lead = "" if form.leads else "Let me see <tool. "
    tokens = [*tokens_of(reader, lead + CALLS[name]), reader.tokenizer.eos_token_id]
    stream = CallStream(reader.tokenizer, (), control_ids(reader.tokenizer), format=form)
    shown = [stream.push(tokens[i : i + size]).text for i in range(0, len(tokens), size)]
    assert "".join([*shown, stream.finish()]) == lead
    (call,) = stream.calls
    assert (call.name, call.arguments) == ("get_weather", {"place": "Oslo", "days": 2})

    plain = "Oslo < Quito, {so} [to] speak <tool"
    stream = CallStream(reader.tokenizer, (), frozenset(), format=form)
    shown = [stream.push([token]).text for token in tokens_of(reader, plain)]
    assert "".join([*shown, stream.finish()]) == plain
    assert stream.calls == ()

    stream = CallStream(reader.tokenizer, (), control_ids(reader.tokenizer), format=form)
    stream.push(tokens_of(reader, CALLS[name])[:-3])
    rest = stream.finish()
    assert stream.calls == ()
    assert stream.broken or rest == CALLS[name][: len(rest)]


def test_hermes_reads_several_calls_and_what_stands_around_them() -> None:
    text, found, broken = FORMATS["hermes"].read(f"a {CALLS['hermes']}\n{CALLS['hermes']} b <tool_call>{{")
    assert text == "a  b "
    assert found == [("get_weather", {"place": "Oslo", "days": 2})] * 2
    assert broken == ["{"]
    text, found, broken = FORMATS["hermes"].read('<tool_call>{"name": 3}</tool_call>')
    assert (text, found, broken) == ("", [], ['{"name": 3}'])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False, None])
def test_an_answer_that_is_free_to_call_may_also_just_answer(
    readers: dict[str, Reader], name: str, parallel: bool | None
) -> None:
    """The grammar of "auto" admits text, a call, and several only if they may be parallel; a call it admits only whole."""
    reader, call = readers[name], CALLS[name]
    use = plan_tools(reader.tokenizer, TOOLS, parallel=parallel)

    def admits(text: str) -> bool:
        matching = reader._grammars.match(use.constraint)
        return matching._go(tokens_of(reader, text)) and matching._matcher.is_accepting()

    assert admits("It is { nice [ in Oslo < Quito.")
    assert admits(call)
    assert not admits(call[:-2])
    assert not admits(call.replace("Oslo", "Rome"))
    assert not admits(call.replace("get_weather", "no_such_tool"))
    assert admits("Well. " + call) == (name == "hermes") or name != "hermes"
    if name == "hermes":
        assert admits(f"{call}\n{call}") == (parallel is not False)


def test_a_template_without_tools_refuses_unless_told_how(reader: Reader) -> None:
    with pytest.raises(PromptError, match='tool_format="hermes"'):
        reader.generate("q", tools=TOOLS)
    with pytest.raises(PromptError, match="only tool_format='hermes'"):
        reader.generate("q", tools=TOOLS, tool_format="mistral")
    answer = reader.generate("q", tools=TOOLS, tool_format="hermes", tool_choice="clock")
    assert [call.name for call in answer.tool_calls] == ["clock"]
    call = {"name": "clock", "args": {"zone": "CET"}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what time?"},
        {"role": "assistant", "content": "let me see", "tool_calls": [call, call]},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "noon"},
    ]
    text = reader.tokenizer.decode(reader.encode_prompt(messages, tools=TOOLS, tool_format="hermes"))
    assert text.startswith("<|im_start|>system\nbe brief\n\nYou can use tools.")
    assert '{"name": "get_weather", "description"' in text
    assert (
        'let me see\n<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>\n<tool_call>'
        in text
    )
    assert text.count("<tool_response>\nnoon\n</tool_response>") == 2
    assert text.count("<|im_start|>user") == 2
    with pytest.raises(PromptError, match="no calls of tools"):
        reader.encode_prompt(messages)
    assert "<|im_start|>user\nnoon<|im_end|>" in reader.tokenizer.decode(
        reader.encode_prompt([messages[0], messages[-1]])
    )


def test_a_format_that_nobody_reads_is_refused(readers: dict[str, Reader]) -> None:
    import copy

    tokenizer = copy.copy(readers["llama3"].tokenizer)
    tokenizer.chat_template = TEMPLATES["hermes"].replace("<tool_call>", "<function=x>")
    with pytest.raises(PromptError, match="does not read"):
        plan_tools(tokenizer, TOOLS)
    assert plan_tools(tokenizer, TOOLS, format="hermes").format is FORMATS["hermes"]


def test_no_tools_are_sent_when_none_may_be_called(readers: dict[str, Reader]) -> None:
    sampling = Sampling(max_tokens=8)
    answer = readers["hermes"].generate("q", tools=TOOLS, tool_choice="none", sampling=sampling)
    assert answer.tokens == readers["hermes"].generate("q", sampling=sampling).tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": "clock"}, "use a list"),
        ({"tools": [3]}, "a tool is a int"),
        ({"tools": [{"name": "no spaces"}]}, "'no spaces'"),
        ({"tools": [CLOCK, CLOCK]}, "two tools"),
        ({"tools": [{"name": "a", "parameters": {"type": "string"}}]}, "schema of an object"),
        (
            {"tools": [{"name": "a", "parameters": {"properties": {"b": {"type": "nothing"}}}}]},
            "cannot be compiled",
        ),
        ({"tools": TOOLS, "tool_choice": "no_such"}, "choose from auto, required, none, get_weather, clock"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_format": "xml"}, "hermes, llama3, mistral"),
        ({"tools": TOOLS, "raw": True}, "leave raw=True out"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_call(
    readers: dict[str, Reader], options: Any, says: str
) -> None:
    with pytest.raises((SettingsError, PromptError), match=says):
        readers["hermes"].stream("q", **options)


def test_a_constraint_and_tools_do_not_go_together(readers: dict[str, Reader]) -> None:
    from reader_rag.structured import Constraint

    with pytest.raises(SettingsError, match="one after the other"):
        readers["hermes"].stream("q", tools=TOOLS, sampling=Sampling(constraint=Constraint.json()))
    with pytest.raises(PromptError, match="token ids"):
        readers["hermes"].stream([5, 6], tools=TOOLS)


def test_an_empty_call_and_a_cut_one(readers: dict[str, Reader]) -> None:
    answer = readers["hermes"].generate("q", tools=TOOLS, tool_choice="any", sampling=Sampling(max_tokens=6))
    assert (answer.text, answer.tool_calls, answer.finish_reason) == ("", (), "length")
    assert len(answer.broken_calls) == 1
    assert json.dumps(answer.broken_calls[0])

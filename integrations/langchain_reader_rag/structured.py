"""Structured output: schemas and formats of LangChain as constraints, and parsers that refuse what was cut off."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from reader_rag.errors import SettingsError
from reader_rag.structured import Constraint

Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS = ("json_schema", "function_calling", "json_mode")


class _WholeAnswer:
    """A parser that takes no answer which max_tokens cut off: LangChain's own would mend it in silence."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message = getattr(result[0], "message", None)
        if getattr(message, "response_metadata", {}).get("finish_reason") == "length":
            raise OutputParserException(
                "the answer was cut off by max_tokens before it was complete: allow more, or bound the schema's texts and lists "
                "by maxLength and maxItems",
                llm_output=str(message.content) if message is not None else None,
            )
        return super().parse_result(result, partial=partial)  # type: ignore[misc]


class JsonAnswerParser(_WholeAnswer, JsonOutputParser):
    """JSON text as Python values."""


class PydanticAnswerParser(_WholeAnswer, PydanticOutputParser):  # type: ignore[type-arg]
    """JSON text as an instance of a pydantic model, 1 or 2."""


class PydanticCallParser(_WholeAnswer, PydanticToolsParser):
    """The call of a tool as an instance of its pydantic model."""


class KeyedCallParser(_WholeAnswer, JsonOutputKeyToolsParser):
    """The arguments of a call."""


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic model, a TypedDict, an OpenAI function or tool, or itself."""
    if isinstance(schema, Mapping) and not {"title", "name", "function"} & set(schema):
        return dict(schema)  # an anonymous schema is a schema all the same
    try:
        return dict(convert_to_json_schema(schema))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"this is no schema: {error}") from error


def structured(
    bind: Callable[..., Runnable[Any, Any]],
    bind_tools: Callable[..., Runnable[Any, Any]],
    schema: Any,
    method: str,
    include_raw: bool,
    options: dict[str, Any],
) -> Runnable[Any, Any]:
    """The chain of `with_structured_output`: a bound model, then the parser of its answers."""
    if method not in METHODS:
        raise SettingsError(f"method is {method!r}; choose from {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise SettingsError('give a schema, or method="json_mode" for any JSON object')
    is_model = isinstance(schema, type) and is_basemodel_subclass(schema)
    shape = {"type": "object"} if schema is None else json_schema(schema)
    traced = {"kwargs": {"method": method}, "schema": shape if schema is None else schema}
    parser: Runnable[Any, Any]
    if method == "function_calling":
        tool = convert_to_openai_tool(schema)
        name = tool["function"]["name"]
        model = bind_tools([tool], tool_choice=name, ls_structured_output_format=traced, **options)
        if is_model:
            parser = PydanticCallParser(tools=[schema], first_tool_only=True)
        else:
            parser = KeyedCallParser(key_name=name, first_tool_only=True)
    else:
        constraint = Constraint.json_schema(shape)
        model = bind(constraint=constraint, ls_structured_output_format=traced, **options)
        parser = PydanticAnswerParser(pydantic_object=schema) if is_model else JsonAnswerParser()
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def response_constraint(response_format: Any) -> Constraint | None:
    """OpenAI's `response_format` as a constraint: {"type": "text" | "json_object" | "json_schema", ...}."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json()
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is not None:
            return Constraint.json_schema(schema)
    raise SettingsError(
        f'response_format is {response_format!r}; use {{"type": "json_object"}} or '
        '{"type": "json_schema", "json_schema": {"schema": ...}}'
    )


def openai_tools(tools: Sequence[Any], strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools, functions, pydantic models and TypedDicts as OpenAI function dicts."""
    return [convert_to_openai_tool(tool, strict=strict) for tool in tools]

"""Structured output and tools (the extra `structured`, which installs llguidance).

    Sampling(constraint=Constraint.json_schema(Person))           # also .json(), .regex(pattern), .choice(options), .lark(grammar)
    answer = reader.generate(messages, tools=[...], tool_choice="auto")
    answer.tool_calls                                             # (ToolCall(id, name, arguments), ...); answer.text is without them

A constraint is applied to the target's own choice, along the walk and with the walk's own prefix, so drafting changes no token of a
constrained answer; what the grammar forces is drafted by the source `grammar`. An answer with finish_reason "length" was cut off by
max_tokens and need not be complete.

`tools` are OpenAI function dicts, and go through the chat template's own `tools`. tool_choice is "auto", "required" (or "any"), "none" or
a tool's name. tool_format="hermes" serves models whose template knows no tools, by describing them in the system message. A message
of the conversation may hold "tool_calls" (OpenAI's dicts; arguments as JSON text or dict), and results come as {"role": "tool",
"content", "tool_call_id", "name"}. Calls are read when the answer ends; `answer.broken_calls` are those that were cut off.

Raises SettingsError (a schema, a pattern, a tool that cannot be meant), PromptError (the model has no format for tools) and
MissingExtraError at the call, before anything runs.
"""

from reader_rag.structured.constraint import Constraint, json_schema_of
from reader_rag.structured.formats import template_has_tools
from reader_rag.structured.tools import ToolCall, plan_tools

__all__ = ["Constraint", "ToolCall", "json_schema_of", "plan_tools", "template_has_tools"]

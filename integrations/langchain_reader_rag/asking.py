"""One call of a face: what is asked, the one path to its steps, and what comes back."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from time import monotonic
from typing import Any

from langchain_core.messages.ai import UsageMetadata
from langchain_core.runnables import RunnableConfig, ensure_config

import reader_rag
from langchain_reader_rag.errors import CallTimeoutError, langchain_errors
from langchain_reader_rag.handoff import driven
from reader_rag import Answer, Chunk, Drafting, Sampling, Step
from reader_rag.errors import SettingsError

GIVEN = ("sampling", "chunks", "drafting", "scope", "raw")
"""What a Request hands on to the Reader under the same name."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call, ready for `Reader.stream` or `Reader.submit`; `tools` are that call's options about tools.

    `load` gives the Reader; the first time that takes seconds, so it is called by who runs the request.
    """

    load: Callable[[], "reader_rag.Reader"]
    prompt: str | list[dict[str, Any]]
    sampling: Sampling
    chunks: Sequence[Chunk]
    drafting: Drafting | None
    scope: str
    raw: bool = False
    tools: Mapping[str, Any] = field(default_factory=dict)


def steps(
    requests: Sequence[Request], *, timeout: float | None, streamed: bool
) -> Generator[Step, None, None]:
    """The steps of some requests, one request after the other: what every way to ask, sync and async, streamed or not, consumes.

    Requests that are not streamed start together and share passes. Closing the generator frees all of them.
    """
    started = monotonic()
    running: list[Any] = []
    try:
        with langchain_errors():
            for request in requests:
                reader = request.load()
                ask: Callable[..., Any] = reader.stream if streamed else reader.submit
                given = {name: getattr(request, name) for name in GIVEN}
                running.append(ask(request.prompt, **given, **request.tools))
        for answering in running:
            for step in answering:
                yield step
                if step.answer is None and timeout is not None and monotonic() - started > timeout:
                    raise CallTimeoutError(
                        f"the answer was not complete after timeout={timeout} seconds: allow more, or lower max_tokens"
                    )
    finally:
        for answering in running:
            answering.close() if streamed else answering.cancel()


def answers(found: Iterable[Step]) -> list[Answer]:
    """The answers that the steps end in."""
    return [step.answer for step in found if step.answer is not None]


async def answers_of(found: Generator[Step, None, None]) -> list[Answer]:
    """`answers`, computed in worker threads."""
    async with driven(found) as taken:
        return [step.answer async for step in taken if step.answer is not None]


def scoped(method: Callable[..., Any]) -> Callable[..., Any]:
    """A Runnable's method that names the config's scope among its options: read here, in the caller's own context."""

    @wraps(method)
    def call(self: Any, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        return method(self, input, config, **with_scope(config, options))

    return call


def with_scope(config: RunnableConfig | None, options: dict[str, Any]) -> dict[str, Any]:
    """Options with the scope that the request's config names, unless they name one."""
    scope = configured_scope(config)
    return options if scope is None or "scope" in options else {**options, "scope": scope}


def configured_scope(config: RunnableConfig | None) -> str | None:
    """`config["configurable"]["reader_scope"]`, of this config or of the chain that is running."""
    scope = ensure_config(config).get("configurable", {}).get("reader_scope")
    if scope == "":  # a tenant whose name got lost must not end up among the others
        raise SettingsError("reader_scope is empty: name the scope, or leave it out for the face's own")
    return None if scope is None else str(scope)


def response_metadata(answer: Answer, reader: "reader_rag.Reader") -> dict[str, Any]:
    """What every response says: model, finish reason, logprobs if wanted, and under "reader" the stats and spans."""
    facts = {
        "model_name": reader.name,
        "finish_reason": answer.finish_reason,
        "reader": {**answer.stats.to_dict(), "spans": [span.to_dict() for span in answer.spans]},
    }
    if answer.logprobs is not None:
        facts["logprobs"] = {
            "content": [
                {
                    **_token(reader, entry.token, entry.logprob),
                    "top_logprobs": [_token(reader, *likely) for likely in entry.top],
                }
                for entry in answer.logprobs
            ]
        }
    return facts


def usage(answer: Answer) -> UsageMetadata:
    """Token counts under LangChain's names."""
    given, made = answer.prompt_tokens, len(answer.tokens)
    return UsageMetadata(input_tokens=given, output_tokens=made, total_tokens=given + made)


def _token(reader: "reader_rag.Reader", token: int, logprob: float) -> dict[str, Any]:
    text = reader.tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}

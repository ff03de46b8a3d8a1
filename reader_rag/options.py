"""Options that a caller got wrong: each is refused with its mend, also under the names that other libraries gave it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from reader_rag.errors import PromptError, SettingsError
from reader_rag.settings import Drafting, Sampling

__all__ = ["check_request", "count_prompts", "hint", "refuse_unknown"]

SAMPLING = tuple(field.name for field in fields(Sampling))
REQUEST = (
    "sampling",
    "chunks",
    "drafting",
    "drafter",
    "scope",
    "raw",
    "tools",
    "tool_choice",
    "tool_format",
    "parallel_tool_calls",
)
"""What a request to a Reader takes beside its prompt."""

OURS: Mapping[str, tuple[str, ...]] = {
    "context": ("context_window",),
    "context_window": ("context",),
    "llm": ("reader",),
    "max_length": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "model_id": ("model",),
    "model_name": ("model",),
    "n_ctx": ("context", "context_window"),
    "num_ctx": ("context", "context_window"),
    "num_output": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "repeat_penalty": ("repetition_penalty",),
    "repo_id": ("model",),
    "request_timeout": ("timeout",),
    "stop_sequences": ("stop",),
    "stop_strings": ("stop",),
    "tokenizer_name": ("tokenizer",),
    "torch_dtype": ("dtype",),
}
"""Names of HuggingFacePipeline, HuggingFaceLLM, ChatOllama and transformers -> ours; the first that is known counts."""

_LOADING = (
    "attn_implementation",
    "device_map",
    "quantization_config",
    "revision",
    "token",
    "trust_remote_code",
)
_SAMPLED = "give temperature=0 (the default) for False, temperature above 0 for True"
_FLAT = "give what is in it as options by themselves, such as max_tokens= and temperature="
_ALONE = "leave it out: the answer comes without the prompt, always"
MENDS: Mapping[str, tuple[str, str]] = {
    **{name: ("model_kwargs", f"pass model_kwargs={{{name!r}: ...}}") for name in _LOADING},
    "batch_size": ("rows", "give rows=, the requests that share a pass"),
    "do_sample": ("temperature", _SAMPLED),
    "format": ("constraint", "pass constraint=Constraint.json_schema(...) of reader_rag.structured"),
    "generate_kwargs": ("max_tokens", _FLAT),
    "pipeline": ("tokenizer", "pass model=pipeline.model and tokenizer=pipeline.tokenizer"),
    "pipeline_kwargs": ("max_tokens", _FLAT),
    "return_full_text": ("max_tokens", _ALONE),
    "skip_prompt": ("max_tokens", _ALONE),
    "stopping_ids": (
        "stop",
        "give the texts as stop=; a template's end-of-turn tokens end an answer by themselves",
    ),
    "task": ("max_tokens", "leave it out: a model here generates text"),
}
"""What has no name here -> (an option that must be known for the mend to fit, the mend)."""


def refuse_unknown(options: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise SettingsError for the first option that `where` does not have, with the mend and the options that it has."""
    names = sorted(known)
    for name in options:
        if name not in names:
            raise SettingsError(
                f"{where} has no option {name!r}{hint(name, names)}; it has: {', '.join(names)}"
            )


def check_request(unknown: Iterable[str], *, sampling: Any, drafting: Any, scope: Any) -> None:
    """Raise SettingsError for a request's options that are unknown, or of another kind than they must be."""
    for name in unknown:
        for ours in (name, *OURS.get(name, ())):
            if ours in SAMPLING:
                raise SettingsError(
                    f"a request has no option {name!r} of its own; pass sampling=Sampling({ours}=...)"
                )
    refuse_unknown(unknown, REQUEST, "a request")
    if not isinstance(sampling, Sampling):
        raise SettingsError(f"sampling is {sampling!r}; pass a Sampling, as in Sampling(max_tokens=100)")
    if not isinstance(drafting, Drafting):
        raise SettingsError(
            f"drafting is {drafting!r}; pass a Drafting, as in Drafting(sources=()) for no drafts"
        )
    if (
        not isinstance(scope, str) or not scope
    ):  # a tenant whose name got lost must not end up among the others
        raise SettingsError(f"scope is {scope!r}; name it by a text, or leave it out")


def count_prompts(prompts: Any) -> int:
    """How many prompts a batch has; a text or a single message list is not taken apart."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        raise PromptError(f"a batch is a {type(prompts).__name__}; pass a list of prompts")
    return len(prompts)


def hint(name: str, known: Collection[str]) -> str:
    """In parentheses what was probably meant by an unknown option; empty if nobody can tell."""
    if name in MENDS and MENDS[name][0] in known:
        return f" ({MENDS[name][1]})"
    ours = [other for other in OURS.get(name, ()) if other in known]
    near = ours or get_close_matches(str(name), sorted(known), n=1, cutoff=0.75)
    return f" (did you mean {near[0]!r}?)" if near else ""

"""Prompts become token ids. The only place where control tokens are decided.

A control token (`<|im_end|>`, `<think>`) steers the model, so it may come from the chat template, never out of a question or a
document: there its characters are encoded as the plain text that they are.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from reader_rag.errors import PromptError
from reader_rag.structured.formats import ToolFormat, template_has_tools
from reader_rag.structured.written import native_messages, talks_of_tools, written_messages

__all__ = ["ROLES", "chunk_encodings", "control_ids", "encode_prompt", "encode_text", "refuse_surrogates"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Templates paste a role between control characters, so no other text is let through."""
MERGED_ROLES = ("system", "developer", "user", "assistant")

_OPEN, _CLOSE = "\ue00e", "\ue00f"
"""Private-use characters around a control string while it passes through a template."""


def encode_prompt(
    tokenizer: Any,
    prompt: Any,
    *,
    raw: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_format: ToolFormat | None = None,
) -> list[int]:
    """Token ids of a prompt.

    prompt: a text, which becomes one user message of the chat template; messages ({"role", "content"}); or token ids.
    With `raw=True` a text is taken as a prompt that is already in the model's format: its control strings are read as
    control tokens. A text for a tokenizer without template is plain text. Tools go into the template, or, where it knows none, are
    written into the messages in `tool_format`. Raises PromptError.
    """
    if tools and (raw or not getattr(tokenizer, "chat_template", None)):
        raise PromptError("tools need messages and a chat template; leave raw=True out, or the tools")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise PromptError("the question is empty; pass a text to answer")
        refuse_surrogates(prompt, "the prompt")
        if raw:
            return _after_prefix(tokenizer, _ordinary(tokenizer, prompt))
        if not getattr(tokenizer, "chat_template", None):
            return _after_prefix(tokenizer, encode_text(tokenizer, prompt))
        return _encode_chat(tokenizer, [{"role": "user", "content": prompt}], tools, tool_format)
    items = _items(prompt)
    if all(isinstance(item, Mapping) for item in items):
        if raw:
            raise PromptError("raw=True is for a text in the model's own format; pass messages without it")
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                "this tokenizer has no chat template, so messages have no format; pass one text, or set tokenizer.chat_template"
            )
        return _encode_chat(tokenizer, _normalise(items), tools, tool_format)
    if tools:
        raise PromptError("tools cannot be put into token ids; pass messages")
    return _checked_ids(tokenizer, items)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text: no special token is added, and no control string in it is read as a token.

    White space that a tokenizer holds as added tokens (runs of spaces, "\\n\\n") is ordinary text and encoded as ever.
    """
    control = _control_pattern(tokenizer)
    if control.search(text) is None:
        return _ordinary(tokenizer, text)
    pieces: list[tuple[str, bool]] = []
    end = 0
    for match in control.finditer(text):
        pieces += [(text[end : match.start()], False), (match.group(), True)]
        end = match.end()
    return _encode_pieces(tokenizer, [*pieces, (text[end:], False)])


def chunk_encodings(tokenizer: Any, text: str) -> list[list[int]]:
    """The ways in which a chunk's tokens may stand in an answer: alone, after a space, after a newline; each once."""
    newline = encode_text(tokenizer, "\n")
    after_newline = encode_text(tokenizer, "\n" + text)
    if after_newline[: len(newline)] == newline:
        after_newline = after_newline[len(newline) :]
    ways = [encode_text(tokenizer, text), encode_text(tokenizer, " " + text), after_newline]
    return [list(way) for way in dict.fromkeys(map(tuple, ways)) if way]


def control_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of all special and added tokens; added white space is ordinary text and not among them."""
    return frozenset(_control_tokens(tokenizer).values())


# Messages


def _items(prompt: Any) -> list[Any]:
    """The items of a sequence, array or tensor."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise PromptError(
            f"a prompt is a {type(prompt).__name__}; pass a text, a list of messages or a list of token ids"
        )
    if not len(prompt):
        raise PromptError("the prompt is empty; pass a question")
    return list(prompt)


def _normalise(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages, blank ones dropped, neighbours of the same role joined by an empty line."""
    merged: list[dict[str, Any]] = []
    last_user: str | None = None
    for message in messages:
        role, content = message.get("role"), _text(message)
        if role not in ROLES:
            raise PromptError(f"a message has the role {role!r}; use one of {', '.join(ROLES)}")
        if role == "user":
            last_user = content
        more = {
            key: value
            for key, value in message.items()
            if key not in ("role", "content") and value is not None
        }
        if not content.strip() and not more and role in MERGED_ROLES:
            continue
        before = merged[-1] if merged else None
        if before and role in MERGED_ROLES and before["role"] == role and not more and len(before) == 2:
            before["content"] += "\n\n" + content
        else:
            merged.append({"role": role, "content": content, **more})
    if not merged or (last_user is not None and not last_user.strip()):
        raise PromptError("the question is empty; pass a text to answer")
    return merged


def _text(message: Mapping[str, Any]) -> str:
    """A message's content: a text, or text parts as in {"type": "text", "text": "..."}."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        refuse_surrogates(content, "a message")
        return content
    parts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise PromptError(
                f"a message's content is {_short(part)}; this model reads text only, pass a text"
            )
        refuse_surrogates(text, "a message")
        parts.append(text)
    return "".join(parts)


def refuse_surrogates(text: str, what: str) -> None:
    """Raise PromptError for half a surrogate pair, which bytes of another encoding leave behind: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} holds half a surrogate pair at character {error.start}, which is no text; was it decoded from "
            'another encoding? Repair it with text.encode("utf-8", "replace").decode()'
        ) from error


def _fold_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System text at the head of the first user message, for templates that know no system role."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] in ("system", "developer"))
    rest = [dict(m) for m in messages if m["role"] not in ("system", "developer")]
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return rest
    return _normalise([{"role": "user", "content": system}, *rest])


def _takes(tokenizer: Any, role: str) -> bool:
    """Whether the template writes out a first message of this role, instead of refusing or dropping it."""
    probe = [{"role": role, "content": "system-probe"}, {"role": "user", "content": "user-probe"}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
    except Exception:  # whatever a template raises
        return False
    return "system-probe" in text


# The template


def _encode_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_format: ToolFormat | None,
) -> list[int]:
    if tools or talks_of_tools(messages):
        if template_has_tools(tokenizer):
            messages = native_messages(messages)
        else:
            messages, tools = _normalise(written_messages(messages, tools, tool_format)), ()
    roles = {message["role"] for message in messages}
    if any(role in roles and not _takes(tokenizer, role) for role in ("system", "developer")):
        messages = _normalise(_fold_system(messages))
    try:
        if "sanitize_control_tokens" in inspect.signature(tokenizer.apply_chat_template).parameters:
            return _sanitised_by_transformers(tokenizer, messages, tools)
        return _sanitised_here(tokenizer, messages, tools)
    except Exception as error:  # jinja2 raises what the template asks for, and many kinds besides
        raise PromptError(
            f"the chat template of this model refuses the messages: {error}; "
            "change their roles or order, or pass one text with raw=True"
        ) from error


def _sanitised_by_transformers(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """transformers' own sanitiser, told to watch every control token and not only those that the template mentions."""
    watching = copy.copy(tokenizer)  # shares vocabulary and state; the caller's object keeps its attribute
    watching.chat_control_tokens = list(_control_tokens(tokenizer))
    try:
        ids = watching.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            sanitize_control_tokens=True,
            **({"tools": list(tools)} if tools else {}),
        )
    except (
        ValueError
    ):  # it gives up where the vocabulary itself spells a control token; `_spelled` cuts there
        return _sanitised_here(tokenizer, messages, tools)
    return _single_bos(tokenizer, [int(i) for i in ids])


def _sanitised_here(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """The same for tokenizers without that option: marked strings travel through the template and are split off after it."""
    control = _control_pattern(tokenizer)
    text = tokenizer.apply_chat_template(
        _mark(messages, control),
        tokenize=False,
        add_generation_prompt=True,
        **({"tools": _mark(tools, control)} if tools else {}),
    )
    pieces = re.split(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}", text)
    marked = [(piece.replace(_OPEN, "").replace(_CLOSE, ""), i % 2 == 1) for i, piece in enumerate(pieces)]
    return _single_bos(tokenizer, _encode_pieces(tokenizer, marked))


def _mark(value: Any, control: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return control.sub(f"{_OPEN}\\g<0>{_CLOSE}", value.replace(_OPEN, "").replace(_CLOSE, ""))
    if isinstance(value, Mapping):
        return {key: _mark(item, control) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, control) for item in value]
    return value


# Token ids


def _ordinary(tokenizer: Any, text: str) -> list[int]:
    """transformers' encoding without added specials; control strings become control tokens."""
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def _after_prefix(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` after the special tokens that the tokenizer puts before a text; nothing is put behind it."""
    alone, dressed = _ordinary(tokenizer, "a"), [int(i) for i in tokenizer.encode("a")]
    start = next((i for i in range(len(dressed)) if dressed[i : i + len(alone)] == alone), 0)
    prefix = dressed[:start]
    return _single_bos(tokenizer, ids if ids[:start] == prefix else prefix + ids)


def _single_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Drops a begin-of-sequence token that stands twice at the start."""
    bos = getattr(tokenizer, "bos_token_id", None)
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def _encode_pieces(tokenizer: Any, pieces: Iterable[tuple[str, bool]]) -> list[int]:
    """Encodes pieces of one text in turn; a piece marked True is a control string to be spelled out.

    From the second piece on a newline is put before a piece and taken off again, because SentencePiece tokenizers add a
    space at the start of a text.
    """
    newline = _ordinary(tokenizer, "\n")
    ids: list[int] = []
    for piece, spelled in pieces:
        if not piece:
            continue
        encode = _spelled if spelled else _ordinary
        if ids:
            piece_ids = encode(tokenizer, "\n" + piece)
            ids += (
                piece_ids[len(newline) :]
                if piece_ids[: len(newline)] == newline
                else encode(tokenizer, piece)
            )
        else:
            ids += encode(tokenizer, piece)
    return ids


def _spelled(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` without any of the added tokens: the tokenizer's pipeline, less its table of added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    control = control_ids(tokenizer)
    if backend is None:
        ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)]
    else:
        plain = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        splits = [plain]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(plain)]
        ids = [token.id for split in splits for token in backend.model.tokenize(split)]
    if control.isdisjoint(ids) or len(text) < 2:
        return ids
    # The vocabulary itself spells a control token; cut the text until it cannot.
    middle = len(text) // 2
    return _spelled(tokenizer, text[:middle]) + _spelled(tokenizer, text[middle:])


def _checked_ids(tokenizer: Any, items: list[Any]) -> list[int]:
    size = len(tokenizer)
    ids = []
    for item in items:
        try:
            if isinstance(item, bool | float | str):
                raise TypeError
            token = int(item.__index__())
        except (TypeError, AttributeError):
            raise PromptError(
                f"a prompt holds {_short(item)}; pass a text, a list of messages or a list of token ids"
            ) from None
        if token < 0 or (token >= size and tokenizer.convert_ids_to_tokens(token) is None):
            raise PromptError(
                f"token id {token} is not in this tokenizer's vocabulary of {size}; encode the text with the model's own tokenizer"
            )
        ids.append(token)
    return ids


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Control tokens


def _control_tokens(tokenizer: Any) -> dict[str, int]:
    """Text -> id of every special token and of every added token that is not white space."""
    tokens: dict[str, int] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special or not token.content.isspace():
            tokens[token.content] = int(token_id)
    for text, token_id in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True):
        if token_id is not None:
            tokens.setdefault(str(text), int(token_id))
    tokens.pop("", None)
    return tokens


def _control_pattern(tokenizer: Any) -> re.Pattern[str]:
    return _compiled(tuple(_control_tokens(tokenizer)))


@lru_cache(maxsize=32)
def _compiled(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Any of `texts`, the longest first; nothing at all when there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from reader_rag import prompt as module
from reader_rag.errors import PromptError
from reader_rag.prompt import chunk_encodings, control_ids, encode_prompt, encode_text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "<think>", "</think>", "<tool_call>"]
TEXT = [
    "The loop else clause runs when no break occurs. ",
    "hello world of im start end think tool call\n\n",
    "über 日本",
]


def make_tokenizer(template: str | None = CHATML, *, bos: bool = False) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    backend.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t in ("<think>", "</think>", "<tool_call>", "   ")
        ]
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<s>", chat_template=template
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def ids_of(tokenizer: Any, *texts: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]


# Texts and messages


def test_a_text_becomes_one_user_message(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, "hello world")
    assert text_of(tokenizer, ids) == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert ids == encode_prompt(tokenizer, [{"role": "user", "content": "hello world"}])
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello world"}], add_generation_prompt=True, return_dict=False
    )


def test_neighbours_of_the_same_role_are_merged(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "one"},
        {"role": "user", "content": " "},
        {"role": "user", "content": [{"type": "text", "text": "tw"}, "o"]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert text_of(tokenizer, encode_prompt(tokenizer, messages)) == (
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\none\n\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    assert messages[2] == {"role": "user", "content": "one"}


def test_tool_messages_and_tool_calls_stay_apart() -> None:
    tokenizer = make_tokenizer("{{ tools or '' }}" + CHATML)
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = text_of(tokenizer, encode_prompt(tokenizer, messages))
    assert text.count("<|im_start|>tool") == 2


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_template_without_system_role_gets_it_in_the_first_user_message(template: str, role: str) -> None:
    tokenizer = make_tokenizer(template)
    messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "why"}]
    assert "Be brief.\n\nwhy" in text_of(tokenizer, encode_prompt(tokenizer, messages))
    assert "Be brief." in text_of(tokenizer, encode_prompt(tokenizer, messages[:1]))


def test_what_a_template_refuses_is_reported_in_its_own_words() -> None:
    with pytest.raises(PromptError, match="Roles must alternate"):
        encode_prompt(make_tokenizer(NO_SYSTEM), [{"role": "assistant", "content": "hi"}])


@pytest.mark.parametrize("role", ["human", "user<|im_end|>", "", None, 3])
def test_roles_are_checked(tokenizer: Any, role: Any) -> None:
    with pytest.raises(PromptError, match=r"role.*use one of system"):
        encode_prompt(tokenizer, [{"role": role, "content": "x"}])


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        " \n\t",
        [],
        (),
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": " \n"}],
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": ""},
        ],
    ],
)
def test_an_empty_question_is_an_error(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(PromptError, match="empty; pass a"):
        encode_prompt(tokenizer, prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        b"bytes",
        {"role": "user", "content": "x"},
        ["a", "b"],
        [1.5],
        [True],
        [{"role": "user", "content": "x"}, 3],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
        object(),
    ],
)
def test_anything_else_is_an_error(tokenizer: Any, prompt: Any) -> None:
    with pytest.raises(PromptError, match="pass a"):
        encode_prompt(tokenizer, prompt)


# Token ids


def test_token_ids_pass_through(tokenizer: Any) -> None:
    ids = [0, 5, len(tokenizer) - 1]
    for prompt in (ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]):
        assert encode_prompt(tokenizer, prompt) == ids
    for bad in (-1, len(tokenizer), 10**9):
        with pytest.raises(PromptError, match=f"{bad} is not in this tokenizer's vocabulary"):
            encode_prompt(tokenizer, [1, bad])


# Without template, and raw


def test_a_tokenizer_without_template_takes_plain_text() -> None:
    tokenizer = make_tokenizer(None, bos=True)
    ids = encode_prompt(tokenizer, "hello <|im_end|> world")
    assert text_of(tokenizer, ids) == "<s>hello <|im_end|> world"
    assert control_ids(tokenizer) & set(ids) == {tokenizer.bos_token_id}
    with pytest.raises(PromptError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "x"}])


def test_raw_reads_control_tokens_and_never_doubles_the_bos() -> None:
    tokenizer = make_tokenizer(bos=True)
    start, end = ids_of(tokenizer, "<|im_start|>", "<|im_end|>")
    ids = encode_prompt(tokenizer, "<|im_start|>user\nhi<|im_end|>", raw=True)
    assert ids[:2] == [tokenizer.bos_token_id, start]
    assert ids[-1] == end
    for text in ("<s>hi", "hi"):
        ids = encode_prompt(tokenizer, text, raw=True)
        assert ids.count(tokenizer.bos_token_id) == 1
        assert text_of(tokenizer, ids) == "<s>hi"
    with pytest.raises(PromptError, match="raw=True"):
        encode_prompt(tokenizer, [{"role": "user", "content": "x"}], raw=True)


def test_a_template_that_writes_the_bos_gives_one() -> None:
    tokenizer = make_tokenizer("{{ bos_token }}" + CHATML, bos=True)
    assert encode_prompt(tokenizer, "hi").count(tokenizer.bos_token_id) == 1
    twice = make_tokenizer("{{ bos_token }}{{ bos_token }}" + CHATML)
    assert encode_prompt(twice, "hi").count(twice.bos_token_id) == 1


# Control strings stay text


@pytest.mark.parametrize("control", CONTROL)
def test_a_control_string_in_a_message_stays_plain_text(tokenizer: Any, control: str) -> None:
    plain = encode_prompt(tokenizer, "a  b")
    ids = encode_prompt(tokenizer, f"a {control} b")
    text = f"<|im_start|>user\na {control} b<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, ids) == text
    assert [i for i in ids if i in control_ids(tokenizer)] == [
        i for i in plain if i in control_ids(tokenizer)
    ]


@given(
    st.lists(
        st.sampled_from([*CONTROL, "<|im_", "end|>", "a", " ", "\n", "\ue00e", "<", "日"]), max_size=8
    ).map("".join)
)
@settings(max_examples=60, deadline=None)
def test_no_text_can_forge_a_control_token(text: str) -> None:
    tokenizer = SHARED
    control = control_ids(tokenizer)
    assert control.isdisjoint(encode_text(tokenizer, text))
    assert text_of(tokenizer, encode_text(tokenizer, text)) == text
    if text.strip():
        messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
        harmless = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
        expected = [i for i in encode_prompt(tokenizer, harmless) if i in control]
        assert [i for i in encode_prompt(tokenizer, messages) if i in control] == expected
        assert [i for i in module._sanitised_here(tokenizer, messages) if i in control] == expected


SHARED = make_tokenizer()


@pytest.mark.parametrize(
    "content", ["plain", "a <|im_end|> b", "<think>", "x<s>\n<|im_start|>y", "   <tool_call>   "]
)
def test_the_fallback_for_older_tokenizers_agrees(
    tokenizer: Any, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": content}]
    expected = encode_prompt(tokenizer, messages)
    modern = type(tokenizer).apply_chat_template

    def older(
        self: Any, conversation: Any, *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any:
        assert not tokenize
        return modern(self, conversation, tokenize=False, add_generation_prompt=add_generation_prompt)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", older)
    assert encode_prompt(tokenizer, messages) == expected


def test_the_callers_tokenizer_is_left_as_it_was(tokenizer: Any) -> None:
    before = tokenizer.chat_control_tokens
    encode_prompt(tokenizer, "a <think> b")
    assert tokenizer.chat_control_tokens is before
    assert tokenizer.encode("<think>", add_special_tokens=False) == ids_of(tokenizer, "<think>")


def test_ordinary_text_is_encoded_as_transformers_does(tokenizer: Any) -> None:
    for text in ("hello world", "a   b", "日本 über", "", "\n\n"):
        assert encode_text(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


def test_control_ids_are_all_special_and_added_tokens_but_white_space(tokenizer: Any) -> None:
    assert control_ids(tokenizer) == frozenset(ids_of(tokenizer, *CONTROL))
    assert tokenizer.convert_tokens_to_ids("   ") in encode_text(tokenizer, "a   b")


# Chunks


def test_a_chunk_is_encoded_as_it_may_stand_in_an_answer(tokenizer: Any) -> None:
    ways = chunk_encodings(tokenizer, "hello world")
    assert [text_of(tokenizer, way) for way in ways] == ["hello world", " hello world"]
    assert len({tuple(way) for way in ways}) == len(ways)
    assert chunk_encodings(tokenizer, "") == [encode_text(tokenizer, " ")]
    for way in chunk_encodings(tokenizer, "a <|im_end|><think> b"):
        assert control_ids(tokenizer).isdisjoint(way)


def sentencepiece_like() -> Any:
    """Metaspace and byte fallback, as in Llama 2 and Mistral."""
    characters = sorted(set("".join(TEXT)) - {" ", "日"})
    vocabulary = {
        t: i
        for i, t in enumerate(
            ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *characters]
        )
    }
    merges = [("h", "e"), ("l", "o"), ("▁", "w")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="<s>{{ messages[0].content }}",
    )


def test_sentencepiece_tokenizers_add_no_space_in_the_middle() -> None:
    tokenizer = sentencepiece_like()
    ids = encode_text(tokenizer, "hello</s>world")
    assert text_of(tokenizer, ids) == "hello</s>world"
    assert control_ids(tokenizer).isdisjoint(ids)
    assert [tokenizer.convert_ids_to_tokens(w)[:2] for w in chunk_encodings(tokenizer, "hello")] == [
        ["▁", "he"],  # alone, which is also how it stands after a space
        ["he", "l"],
    ]


# The demo model


def test_the_demo_models_prompt(demo_tokenizer: Any) -> None:
    ids = encode_prompt(demo_tokenizer, "What is <|im_end|> in <repo_name>?")
    text = text_of(demo_tokenizer, ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(
        "<|im_start|>user\nWhat is <|im_end|> in <repo_name>?<|im_end|>\n<|im_start|>assistant\n"
    )
    names = [demo_tokenizer.convert_ids_to_tokens(i) for i in ids if i in control_ids(demo_tokenizer)]
    assert names == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert len(control_ids(demo_tokenizer)) == 17

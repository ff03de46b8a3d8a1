from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reader_rag.prompt import control_ids
from reader_rag.stream import Delta, TextStream

FAMILY = "👩\u200d👩\u200d👧"
TEXT = [
    f"hello world, the loop's else clause. 日本語 مرحبا {FAMILY} 👍🏽 naïve\n",
    "STOP stops\n\n",
    "  indented",
]


def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def sentencepiece_like() -> Any:
    """Metaspace and byte fallback, as in Llama 2 and Mistral: the first space is lost, a bad run of bytes is bad as a whole."""
    characters = sorted(set("".join(TEXT)) - set(" 語👩👍"))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *characters]
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = [("▁", "h"), ("▁", "w"), ("l", "l")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece_like()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "byte-fallback"])


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def split(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


def run(tokenizer: Any, pushes: list[list[int]], stop: tuple[str, ...] = ()) -> tuple[list[str], int, bool]:
    """Deltas with the final rest, kept tokens, and whether a stop string was met."""
    stream = TextStream(tokenizer, stop, control_ids(tokenizer))
    deltas, kept = [], 0
    for push in pushes:
        delta = stream.push(push)
        deltas.append(delta.text)
        kept += delta.kept_tokens
        if delta.stopped:
            return [*deltas, stream.finish()], kept, True
    return [*deltas, stream.finish()], kept, False


def expected(tokenizer: Any, tokens: list[int], stop: tuple[str, ...]) -> tuple[str, int, bool]:
    """The definition: the first token after which a stop string stands in the decoding is the last; cut at the earliest stop.

    Without one, the whole decoding but for what a character that was cut in two leaves at the end.
    """
    for count in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:count]).rstrip("\ufffd")
        found = [at for s in stop if (at := text.find(s)) >= 0]
        if found:
            return text[: min(found)], count, True
    text = decode(tokenizer, tokens)
    for _ in range(3):
        text = text.removesuffix("\ufffd")
    return text, len(tokens), False


# Whole characters


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        "日本語",
        FAMILY,
        "مرحبا",
        "👍🏽 naïve",
        "語語語 語",
        f"a{FAMILY}b 語",
        "  two  spaces ",
        "hello\n\n\nworld",
    ],
)
def test_token_by_token_no_character_is_broken(tokenizer: Any, text: str) -> None:
    tokens = encode(tokenizer, text)
    deltas, kept, stopped = run(tokenizer, [[t] for t in tokens])
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == decode(tokenizer, tokens)
    assert (kept, stopped) == (len(tokens), False)


def test_text_comes_as_soon_as_it_is_whole() -> None:
    stream = TextStream(BYTE_LEVEL, (), control_ids(BYTE_LEVEL))
    assert stream.push(encode(BYTE_LEVEL, "hello")).text == "hello"
    euro = [byte_token(BYTE_LEVEL, b) for b in "€".encode()]
    assert [stream.push([t]).text for t in euro] == ["", "", "€"]
    assert stream.finish() == ""


def byte_token(tokenizer: Any, byte: int) -> int:
    if tokenizer is SENTENCEPIECE:
        return int(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>"))
    # the byte-level alphabet in the order of bytes_to_unicode
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    symbol = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return int(tokenizer.convert_tokens_to_ids(symbol))


@BOTH
def test_a_character_that_the_end_cuts_in_two_is_left_out(tokenizer: Any) -> None:
    whole = encode(tokenizer, "hello 日")
    start = [*encode(tokenizer, "hello"), byte_token(tokenizer, 0xE6), byte_token(tokenizer, 0x97)]
    for pushes in ([start], [[t] for t in start]):
        assert "".join(run(tokenizer, pushes)[0]) == "hello"
    assert "".join(run(tokenizer, [[t] for t in whole])[0]) == decode(tokenizer, whole)


@BOTH
def test_bytes_that_are_no_text_appear_where_more_follows(tokenizer: Any) -> None:
    tokens = [byte_token(tokenizer, 0xE6), *encode(tokenizer, "hello")]
    assert "".join(run(tokenizer, [[t] for t in tokens])[0]) == decode(tokenizer, tokens)
    assert "\ufffd" in decode(tokenizer, tokens)


@BOTH
def test_special_tokens_count_but_show_nothing(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    tokens = [end, *encode(tokenizer, "hello"), end, *encode(tokenizer, "world"), end]
    deltas, kept, _ = run(tokenizer, [[t] for t in tokens])
    assert "".join(deltas) == decode(tokenizer, tokens)
    assert kept == len(tokens)
    assert tokenizer.eos_token not in "".join(deltas)


def test_an_added_token_that_is_not_special_is_text() -> None:
    tokens = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.convert_tokens_to_ids("<think>"), *BYTE_LEVEL.encode("b")]
    assert "".join(run(BYTE_LEVEL, [tokens])[0]) == "a<think>b" == decode(BYTE_LEVEL, tokens)


# Stop strings


def test_a_stop_string_inside_a_block_cuts_text_and_tokens() -> None:
    tokens = encode(BYTE_LEVEL, "hello STOP world")
    stream = TextStream(BYTE_LEVEL, ("STOP",), control_ids(BYTE_LEVEL))
    upto = next(n for n in range(len(tokens)) if "STOP" in decode(BYTE_LEVEL, tokens[:n]))
    assert stream.push(tokens) == Delta("hello ", True, upto)
    assert stream.push(tokens) == Delta("", True, 0)
    assert stream.finish() == ""


def test_a_stop_string_across_blocks_is_held_back() -> None:
    tokens = encode(BYTE_LEVEL, "hello S") + encode(BYTE_LEVEL, "TOP world")
    for size in (1, 2, 3, 5):
        deltas, _, stopped = run(
            BYTE_LEVEL, [tokens[i : i + size] for i in range(0, len(tokens), size)], ("STOP",)
        )
        assert ("".join(deltas), stopped) == ("hello ", True)
    deltas, _, stopped = run(
        BYTE_LEVEL, [[t] for t in encode(BYTE_LEVEL, "hello STO") + encode(BYTE_LEVEL, "RE")], ("STOP",)
    )
    assert ("".join(deltas), stopped) == ("hello STORE", False)


def test_the_beginning_of_a_stop_string_is_shown_when_the_answer_ends_there() -> None:
    stream = TextStream(BYTE_LEVEL, ("\n\nEND",), control_ids(BYTE_LEVEL))
    assert stream.push(encode(BYTE_LEVEL, "hello\n\nEN")).text == "hello"
    assert stream.finish() == "\n\nEN"


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    tokens = encode(BYTE_LEVEL, "one two three")
    assert "".join(run(BYTE_LEVEL, [tokens], ("three", "two"))[0]) == "one "
    assert "".join(run(BYTE_LEVEL, [tokens], ("one",))[0]) == ""


# Any split


PIECES = st.sampled_from(["hello", " ", "  ", "STOP", "ST", "OP", "日", "語", FAMILY, "ï", "\n", "."])
STOPS = st.lists(st.sampled_from(["STOP", "OP", "語", " ", "\n\n", "o", "日語", "👩"]), max_size=3).map(tuple)


@st.composite
def answers(draw: st.DrawFn, tokenizer: Any) -> list[int]:
    """Token sequences of real text, stray bytes, special tokens and arbitrary ids."""
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["text", "text", "byte", "special", "any"]))
        if kind == "text":
            tokens += encode(tokenizer, draw(PIECES))
        elif kind == "byte":
            tokens += [
                byte_token(tokenizer, b)
                for b in draw(st.lists(st.sampled_from(b"\xe6\x97\xa5\xf0\x9fA"), max_size=4))
            ]
        elif kind == "special":
            tokens.append(tokenizer.eos_token_id)
        else:
            tokens += draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4))
    return tokens


@BOTH
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_split_gives_the_text_of_the_final_decoding(tokenizer: Any, data: st.DataObject) -> None:
    tokens = data.draw(answers(tokenizer))
    stop = data.draw(STOPS)
    text, count, stopped = expected(tokenizer, tokens, stop)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    for pushes in ([tokens], [[t] for t in tokens], split(tokens, cuts)):
        deltas, kept, was_stopped = run(tokenizer, pushes, stop)
        assert "".join(deltas) == text
        assert (kept, was_stopped) == (count, stopped)


@BOTH
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_real_text_never_shows_a_replacement_character(tokenizer: Any, data: st.DataObject) -> None:
    text = data.draw(st.lists(PIECES, max_size=8).map("".join))
    tokens = encode(tokenizer, text)
    deltas, _, _ = run(tokenizer, split(tokens, data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))))
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("tail", [[0x97], [0xE6], [0xF0, 0x9F], [0xEF, 0xBF, 0xBD]])
def test_endless_broken_bytes_are_exact_and_stay_cheap(tail: list[int]) -> None:
    tokens = [byte_token(BYTE_LEVEL, b) for b in tail] * 120 + encode(BYTE_LEVEL, "語 end")
    stream = TextStream(BYTE_LEVEL, ("never",), control_ids(BYTE_LEVEL))
    text, longest = "", 0
    for token in tokens:
        text += stream.push([token]).text
        longest = max(longest, len(stream._kept) - stream._context)
    assert text + stream.finish() == decode(BYTE_LEVEL, tokens)
    assert longest < 40


def test_a_long_answer_costs_the_same_per_token_at_its_end() -> None:
    tokens = encode(BYTE_LEVEL, TEXT[0]) * 60
    stream = TextStream(BYTE_LEVEL, ("never",), control_ids(BYTE_LEVEL))
    fifth = len(tokens) // 5
    seconds = []
    for part in range(5):
        began = time.perf_counter()
        stream.push(tokens[part * fifth : (part + 1) * fifth])
        seconds.append(time.perf_counter() - began)
    assert seconds[-1] < 4 * min(seconds)


def test_the_demo_tokenizer_streams_real_text(demo_tokenizer: Any) -> None:
    text = f"The `for` loop: 日本語, naïve, {FAMILY} مرحبا\n\n    indented()  # done"
    tokens = demo_tokenizer.encode(text, add_special_tokens=False)
    deltas, _, _ = run(demo_tokenizer, [[t] for t in tokens])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)

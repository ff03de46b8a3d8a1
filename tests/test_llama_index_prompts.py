"""What the LlamaIndex face asks the reader: templates, roles, system prompts, and documents to draft from."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.base.llms.types import ImageBlock, MessageRole
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index_fakes import ALL, USER, FakeReader

from llama_index.llms.reader_rag import ReaderLLM
from reader_rag.errors import PromptError, SettingsError
from reader_rag.store import Chunk


@pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
def test_a_plain_prompt_enters_the_template_as_one_user_message(
    llm: ReaderLLM, fake: FakeReader, method: str
) -> None:
    ALL[method](llm)
    assert fake.asked.prompt == [{"role": "user", "content": "Why?"}]
    assert not fake.asked.raw


@pytest.mark.parametrize("options", [{"raw": True}, {"formatted": True}])
@pytest.mark.parametrize("method", ["complete", "stream_complete", "acomplete", "astream_complete"])
def test_a_raw_or_formatted_prompt_stays_as_it_is(
    fake: FakeReader, method: str, options: dict[str, bool]
) -> None:
    ALL[method](ReaderLLM(reader=fake, system_prompt="Be brief."), **options)
    assert (fake.asked.prompt, fake.asked.raw) == ("Why?", True)


def test_raw_of_the_constructor_is_a_default_that_a_call_overrides(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, raw=True)
    llm.complete("Why?")
    assert fake.asked.raw
    llm.complete("Why?", raw=False)
    assert not fake.asked.raw


def test_a_system_prompt_leads_complete_and_chat_once(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Why?"}
    llm.complete("Why?")
    assert fake.asked.prompt == [system, question]
    llm.chat(USER)
    assert fake.asked.prompt == [system, question]
    llm.predict(PromptTemplate("Why?"))
    assert fake.asked.prompt == [system, question]
    own = ChatMessage(role="system", content="Rhyme.")
    llm.chat([own, *USER])
    assert fake.asked.prompt == [{"role": "system", "content": "Rhyme."}, question]


def test_completion_to_prompt_formats_instead_of_the_template(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, completion_to_prompt=lambda text: f"Q: {text}\nA:")
    llm.complete("Why?")
    assert (fake.asked.prompt, fake.asked.raw) == ("Q: Why?\nA:", True)
    list(llm.stream_complete("Why?"))
    assert fake.asked.prompt == "Q: Why?\nA:"
    llm.complete("Q: given\nA:", formatted=True)
    assert fake.asked.prompt == "Q: given\nA:"


def test_messages_to_prompt_formats_instead_of_the_template(fake: FakeReader) -> None:
    llm = ReaderLLM(reader=fake, messages_to_prompt=lambda messages: "|".join(m.content for m in messages))
    llm.chat([ChatMessage(role="system", content="S"), *USER])
    assert (fake.asked.prompt, fake.asked.raw) == ("S|Why?", True)


def test_a_model_without_template_gets_llama_index_text_without_documents() -> None:
    fake = FakeReader(template=False)
    llm = ReaderLLM(reader=fake, system_prompt="Be brief.")
    assert not llm.metadata.is_chat_model
    llm.complete("Why?")
    assert (fake.asked.prompt, fake.asked.raw) == ("Be brief.\n\nWhy?", False)
    llm.chat([ChatMessage(role="user", content="Why?", additional_kwargs={"documents": ["A secret text."]})])
    assert (fake.asked.prompt, fake.asked.raw) == ("system: Be brief.\nuser: Why?\nassistant: ", False)
    assert [chunk.text for chunk in fake.asked.chunks] == ["A secret text."]
    llm.predict(PromptTemplate("Say {x}."), x="why")
    # Not raw: control strings in the documents of a query engine must stay text.
    assert (fake.asked.prompt, fake.asked.raw) == ("Be brief.\n\nSay why.", False)
    llm.complete("<s>Why?", raw=True)
    assert (fake.asked.prompt, fake.asked.raw) == ("<s>Why?", True)
    own = ReaderLLM(reader=fake, completion_to_prompt=lambda text: f"<s>{text}</s>")
    own.predict(PromptTemplate("Why?"))
    assert (fake.asked.prompt, fake.asked.raw) == ("<s>Why?</s>", True)


@pytest.mark.parametrize("role", list(MessageRole))
def test_every_role_has_a_name_that_templates_know(
    llm: ReaderLLM, fake: FakeReader, role: MessageRole
) -> None:
    llm.chat([ChatMessage(role=role, content="x"), *USER])
    assert fake.asked.prompt[0]["role"] in {"system", "user", "assistant", "tool"}


def test_images_are_refused_and_no_message_is_an_error(llm: ReaderLLM) -> None:
    with pytest.raises(PromptError, match="ImageBlock"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])])
    with pytest.raises(PromptError, match="no message"):
        llm.chat([])


def test_documents_of_a_call_and_of_messages_reach_the_drafter_alone(
    llm: ReaderLLM, fake: FakeReader
) -> None:
    node = TextNode(id_="n1", text="A loop may end.", metadata={"file": "for.md"})
    scored = NodeWithScore(node=TextNode(id_="n2", text="Break skips else."), score=0.5)
    message = ChatMessage(role="user", content="Why?", additional_kwargs={"documents": [node, scored]})
    llm.chat([message], documents=[Chunk("c", "A chunk."), "A text."])
    assert fake.asked.prompt == [{"role": "user", "content": "Why?"}]
    assert [chunk.text for chunk in fake.asked.chunks] == [
        "A loop may end.",
        node.get_content(MetadataMode.LLM),
        "Break skips else.",
        "A chunk.",
        "A text.",
    ]
    assert [chunk.id for chunk in fake.asked.chunks][::2] == ["n1", "n2", Chunk.from_text("A text.").id]
    llm.complete("Why?", documents=node)
    assert fake.asked.chunks[0].id == "n1"


def test_what_cannot_be_drafted_from_is_refused(llm: ReaderLLM) -> None:
    for documents in ([3], 3):
        with pytest.raises(SettingsError, match="int"):
            llm.complete("Why?", documents=documents)

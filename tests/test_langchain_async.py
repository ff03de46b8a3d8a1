"""The LangChain models on an event loop: it stays free, and leaving stops the work."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_fakes import ANSWER, FakeReader, collect, faces, text_of, ticks


async def closed(fake: FakeReader) -> None:
    """Returns once the reader's stream is closed, which nobody but the event loop need wait for."""
    async with asyncio.timeout(5):
        while not fake.closed:
            await asyncio.sleep(0.01)


@faces
async def test_the_event_loop_stays_free(face: Any) -> None:
    model = face(reader=FakeReader(seconds=0.05))
    for work in (model.ainvoke("q"), collect(model.astream("q")), model.abatch(["q"])):
        count, result = await ticks(work)
        assert count > 20
        assert text_of(result[0] if isinstance(result, list) else result) == ANSWER


@faces
async def test_an_error_reaches_the_async_consumer(face: Any) -> None:
    model = face(reader=FakeReader(fail_at=2))
    with pytest.raises(RuntimeError, match="the model broke"):
        await model.ainvoke("q")
    with pytest.raises(RuntimeError, match="the model broke"):
        await collect(model.astream("q"))


@faces
async def test_closing_an_async_stream_stops_the_work(face: Any) -> None:
    fake = FakeReader(seconds=0.01)
    stream = face(reader=fake).astream("q")
    await anext(stream)
    await stream.aclose()
    await closed(fake)
    assert fake.made == 1


@faces
@pytest.mark.parametrize("streamed", [True, False])
async def test_cancelling_stops_the_work_within_one_step(face: Any, streamed: bool) -> None:
    fake = FakeReader(seconds=0.05)
    model = face(reader=fake)
    task = asyncio.create_task(collect(model.astream("q")) if streamed else model.ainvoke("q"))
    await asyncio.sleep(0.12)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    made = fake.made
    await closed(fake)
    assert fake.made <= made + 1


@faces
async def test_a_slow_consumer_is_not_run_ahead_of(face: Any) -> None:
    fake = FakeReader()
    stream = face(reader=fake).astream("q")
    await anext(stream)
    await asyncio.sleep(0.1)
    assert fake.made <= 2
    await stream.aclose()


@faces
async def test_many_requests_at_once_all_answer(face: Any) -> None:
    model = face(reader=FakeReader(seconds=0.001))
    answers = await asyncio.gather(*(model.ainvoke(str(n)) for n in range(40)))
    assert {text_of(answer) for answer in answers} == {ANSWER}

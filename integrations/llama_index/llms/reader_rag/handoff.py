"""Generators of blocking work, consumed with and without an event loop.

No thread lives between two items: whoever wants the next item lends one. So a slow consumer slows the work,
an exception reaches the consumer by itself, and a consumer who leaves ends the work within one item.
"""

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_opened: ContextVar[list[Any] | None] = ContextVar("reader_rag_opened", default=None)


def each(items: Generator[T, None, None], build: Callable[[T], R]) -> Generator[R, None, None]:
    """`build(item)` of every item; closing it closes `items`."""
    return _noted(_each(items, build))


def each_off_loop(items: Generator[T, None, None], build: Callable[[T], R]) -> AsyncGenerator[R, None]:
    """`each`, every item made in a worker thread."""
    return _noted(_each_off_loop(items, build))


def last(items: Generator[T, None, None]) -> T:
    """The last of at least one item."""
    with contextlib.closing(items):
        item = next(items)
        for item in items:  # noqa: B007 - only the last one counts
            pass
    return item


async def last_off_loop(start: Callable[[], Generator[T, None, None]]) -> T:
    """`last(start())` in one worker thread; a cancelled caller stops it after the item that it is making."""
    left = threading.Event()

    def until_left() -> Generator[T, None, None]:
        with contextlib.closing(start()) as items:
            for item in items:
                yield item
                if left.is_set():
                    return

    try:
        return await asyncio.to_thread(lambda: last(until_left()))
    finally:
        left.set()


def closes_source(method: Callable[..., Any]) -> Callable[..., Any]:
    """For a streaming method under LlamaIndex's callbacks: closing its stream closes what `each` opened in it.

    The callbacks' own generators leave that to the garbage collector, and a handler that keeps exceptions, as
    LlamaDebugHandler does, keeps them from it.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(*args: Any, **options: Any) -> Any:
            opened: list[Any] = []
            token = _opened.set(opened)
            try:
                stream = await method(*args, **options)
            finally:
                _opened.reset(token)
            return _relay_off_loop(stream, opened)

        return awaited

    @functools.wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        opened: list[Any] = []
        token = _opened.set(opened)
        try:
            stream = method(*args, **options)
        finally:
            _opened.reset(token)
        return _relay(stream, opened)

    return called


def _noted(responses: T) -> T:
    opened = _opened.get()
    if opened is not None:
        opened.append(responses)
    return responses


def _each(items: Generator[T, None, None], build: Callable[[T], R]) -> Generator[R, None, None]:
    with contextlib.closing(items):
        for item in items:
            yield build(item)


async def _each_off_loop(items: Generator[T, None, None], build: Callable[[T], R]) -> AsyncGenerator[R, None]:
    loop = asyncio.get_running_loop()
    making: asyncio.Future[T | None] | None = None
    try:
        while True:
            making = loop.run_in_executor(None, next, items, None)
            # Shielded: a cancelled consumer must not lose sight of a thread that is inside the generator.
            item = await asyncio.shield(making)
            if item is None:
                return
            yield build(item)
    finally:
        if making is None or making.done():
            items.close()
        else:
            making.add_done_callback(lambda made: _close_after(made, items))


def _close_after(made: "asyncio.Future[T | None]", items: Generator[T, None, None]) -> None:
    if not made.cancelled():
        made.exception()  # nobody is left to hear of it
    items.close()


def _relay(stream: Generator[T, None, None], opened: list[Any]) -> Generator[T, None, None]:
    try:
        yield from stream
    finally:
        for source in opened:
            source.close()


async def _relay_off_loop(stream: AsyncGenerator[T, None], opened: list[Any]) -> AsyncGenerator[T, None]:
    try:
        async with contextlib.aclosing(stream):
            async for response in stream:
                yield response
    finally:
        for source in opened:
            await source.aclose()

"""Errors of a call, caught under our own names and under LangChain's."""

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)

from reader_rag.errors import ContextError, LoadError, PromptError, SettingsError

__all__ = [
    "CallRefusedError",
    "CallTimeoutError",
    "ModelMissingError",
    "PromptRefusedError",
    "PromptTooLongError",
]


class PromptTooLongError(ContextError, ContextOverflowError):
    """The prompt is longer than the model's context."""


class PromptRefusedError(PromptError, ModelInvalidRequestError):
    """Messages or documents that the model cannot be given."""


class CallRefusedError(SettingsError, ModelInvalidRequestError):
    """An option of the call is unknown, or has a value that cannot be used."""


class ModelMissingError(LoadError, ModelNotFoundError):
    """The model could not be loaded."""


class CallTimeoutError(TimeoutError, ModelTimeoutError):
    """The answer took longer than the face's `timeout`."""

    is_retryable = False
    """The same request takes as long again."""


# The first that fits counts: subclasses stand before their parents.
_UNDER_BOTH_NAMES = (
    (ContextError, PromptTooLongError),
    (PromptError, PromptRefusedError),
    (SettingsError, CallRefusedError),
    (LoadError, ModelMissingError),
)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """What goes wrong inside is raised under LangChain's name too, so that code for any provider catches it."""
    try:
        yield
    except (PromptError, SettingsError, LoadError) as error:
        if isinstance(error, tuple(both for _, both in _UNDER_BOTH_NAMES)):
            raise
        both = next(both for ours, both in _UNDER_BOTH_NAMES if isinstance(error, ours))
        raise both(*error.args) from error

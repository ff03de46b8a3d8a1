"""The few errors that a user can act on. Every message names the cause and the mend."""

from __future__ import annotations

__all__ = [
    "ContextError",
    "LoadError",
    "MissingExtraError",
    "PromptError",
    "ReaderError",
    "SettingsError",
    "StoreError",
]


class ReaderError(Exception):
    """Whatever reader_rag raises on purpose."""


class SettingsError(ReaderError, ValueError):
    """An option has a value that cannot be used."""


class LoadError(ReaderError):
    """A model, tokenizer or embedder could not be loaded."""


class PromptError(ReaderError, ValueError):
    """A prompt is empty, malformed or longer than the context."""


class ContextError(PromptError):
    """A prompt is longer than the context."""


class StoreError(ReaderError):
    """A store, or a file or chunk meant for it, cannot be used as asked; the store is as it was."""


class MissingExtraError(ReaderError, ImportError):
    """An optional package is not installed; the message holds the command that installs it."""

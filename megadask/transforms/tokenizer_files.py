"""Tokenizers of Hugging Face's package, from files, objects and JSON."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from megadask.planner.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers


def load(tokenizer: Any) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer, without padding and truncation."""
    if isinstance(tokenizer, str | os.PathLike):
        path = os.fspath(tokenizer)
        path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        try:
            with open(path, encoding="utf-8") as file:
                return load_json(file.read())
        except FileNotFoundError as error:
            raise ConfigError(
                "Tokenizer(tokenizer=)",
                got=f"{path!r}, which does not exist",
                limit="a tokenizer, or the path of a tokenizer.json",
            ) from error
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise ConfigError(
            "Tokenizer(tokenizer=)",
            got=type(tokenizer).__name__,
            limit="a tokenizer of tokenizers or transformers, or the path of a tokenizer.json",
        )
    return load_json(backend.to_str())


def load_json(text: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a text in JSON, without padding and truncation."""
    try:
        from tokenizers import Tokenizer as Built
    except ImportError as error:
        raise ConfigError(
            "transforms.Tokenizer needs the package tokenizers",
            remedy="pip install 'megadask[tokenizers]'",
        ) from error
    try:
        built = Built.from_str(text)
    except Exception as error:  # the package raises Exception itself
        raise ConfigError(f"this is not the JSON of a tokenizer: {error}") from error
    built.no_padding()
    built.no_truncation()
    return built


def token_id(built: tokenizers.Tokenizer, eos: str | int | None, vocab_size: int) -> int | None:
    """Return the id of the token that ends documents, given by name or id; None for none."""
    found = built.token_to_id(eos) if isinstance(eos, str) else eos
    if eos is not None and (found is None or not 0 <= found < vocab_size):
        raise ConfigError(
            "Tokenizer(eos=)", got=repr(eos), limit=f"a token, or an id below {vocab_size}"
        )
    return found

"""Transforms: from a record of a reader to a sample, or to None, which drops the record.

transform.py     what a transform is, and what is asked of every one
bytes.py         the bytes of a text as tokens
tokenizer.py     tokens of Hugging Face's tokenizers
instruct.py      prompts and responses, chats, preference pairs, groups
images.py        images as patches
audio.py         recordings as log-mel frames
video.py         frames of a video as patches
placeholders.py  tokens that stand for items of other modalities
chain.py         several transforms, one after another
batched.py       functions of several records at once

columns.py           which columns a transform reads
tokenizer_files.py   tokenizers from files, objects and JSON
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadask.transforms.audio import LogMel
    from megadask.transforms.batched import Batched
    from megadask.transforms.bytes import Bytes
    from megadask.transforms.chain import Chain
    from megadask.transforms.images import DecodeImage
    from megadask.transforms.instruct import CHATML, Chat, Group, Preference, PromptResponse, Turn
    from megadask.transforms.placeholders import Placeholders
    from megadask.transforms.tokenizer import Tokenizer
    from megadask.transforms.transform import (
        Record,
        Sample,
        TextEncoder,
        Transform,
        TransformError,
        wants_rng,
    )
    from megadask.transforms.video import Frames

__all__ = [
    "CHATML",
    "Batched",
    "Bytes",
    "Chain",
    "Chat",
    "DecodeImage",
    "Frames",
    "Group",
    "LogMel",
    "Placeholders",
    "Preference",
    "PromptResponse",
    "Record",
    "Sample",
    "TextEncoder",
    "Tokenizer",
    "Transform",
    "TransformError",
    "Turn",
    "wants_rng",
]

_HOMES = {
    "Batched": "batched",
    "Bytes": "bytes",
    "CHATML": "instruct",
    "Chain": "chain",
    "Chat": "instruct",
    "DecodeImage": "images",
    "Frames": "video",
    "Group": "instruct",
    "LogMel": "audio",
    "Placeholders": "placeholders",
    "Preference": "instruct",
    "PromptResponse": "instruct",
    "Record": "transform",
    "Sample": "transform",
    "TextEncoder": "transform",
    "Tokenizer": "tokenizer",
    "Transform": "transform",
    "TransformError": "transform",
    "Turn": "instruct",
    "wants_rng": "transform",
}

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)

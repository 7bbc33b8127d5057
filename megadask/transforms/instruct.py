"""Transforms for instruction data: prompts with responses, conversations, pairs, and groups.

All of them tokenise part by part and put the tokens together, so that a mask begins and ends
exactly where its part does: no token spans two parts, as one could if the whole text were tokenised
at once. Whoever lets the model answer tokenises the prompt by itself, too, and so sees the same
tokens. What a tokenizer would add to a whole text (a beginning, say) is not added to parts: name it
in ``start``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.errors import ConfigError
from megadask.transforms.transform import (
    NeedsColumns,
    Record,
    Sample,
    TextEncoder,
    TransformError,
    column_of,
    text_of,
)


@dataclass(frozen=True)
class Turn:
    """What stands around the content of one role's message in a conversation.

    Attributes
    ----------
    prefix, suffix
        Before and after the content.
    learned
        Whether the content, and the suffix that ends it, count in the loss.
    """

    prefix: str
    suffix: str
    learned: bool = False


#: ``<|im_start|>role\\ncontent<|im_end|>\\n`` for each message, as ChatML has it.
CHATML: Mapping[str, Turn] = {
    role: Turn(f"<|im_start|>{role}\n", "<|im_end|>\n", learned=role == "assistant")
    for role in ("system", "user", "assistant", "tool")
}


class _Encoding(NeedsColumns):
    """What all of them have: an encoder, and what stands around everything."""

    encoder: TextEncoder
    eos: bool
    start: str

    def __post_init__(self) -> None:
        if not isinstance(self.encoder, TextEncoder):
            raise ConfigError(
                f"{type(self).__name__}(encoder)",
                got=type(self.encoder).__name__,
                limit="md.transforms.Bytes, Tokenizer, or an object with encode(text) and eos_id",
            )
        for name, kind in (("eos", bool), ("start", str)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{type(self).__name__}({name}=)", got=repr(value), limit=f"a {kind.__name__}"
                )

    def fingerprint(self) -> str:
        """Return a text that differs where results would: the encoder by its own fingerprint."""
        fields = {name: value for name, value in vars(self).items() if name != "encoder"}
        return f"{type(self).__name__}({fingerprint(self.encoder)}, {fields})"


@dataclass(frozen=True)
class PromptResponse(_Encoding):
    """Make a sample of a prompt and a response, of which the response alone counts in the loss.

    Parameters
    ----------
    encoder
        Makes tokens of texts: `Bytes` or `Tokenizer`. Its own column plays no part.
    prompt, response
        Columns that hold the texts.
    eos
        Whether the encoder's end token follows the response, and counts, where it has one.
    start
        A text before everything, such as ``"<s>"``; it does not count.
    """

    encoder: TextEncoder
    prompt: str = "prompt"
    response: str = "response"
    _: KW_ONLY
    eos: bool = True
    start: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.prompt, self.response)

    def __call__(self, record: Record) -> Sample | None:
        """Return tokens and mask; None where the response is empty and nothing ends it."""
        prompt = _prompt(self, record)
        return _answered(self, prompt, text_of(record, self.response))


@dataclass(frozen=True)
class Chat(_Encoding):
    """Make a sample of a conversation, in which only what the assistant says counts in the loss.

    Parameters
    ----------
    encoder
        Makes tokens of texts. A tokenizer should know the template's own tokens (such as
        ``<|im_start|>``) as special ones; it takes them for that in contents as well. If it does
        not know them, they are tokenised like any text.
    column
        Holds a list of ``{"role": ..., "content": ...}``, first message first.
    template
        Role to what stands around its messages.
    eos
        Whether the encoder's end token follows the last message, where it has one; it counts if
        that message does.
    start
        A text before everything, such as ``"<s>"``; it does not count.
    """

    encoder: TextEncoder
    column: str = "messages"
    _: KW_ONLY
    template: Mapping[str, Turn] = field(default_factory=lambda: dict(CHATML), hash=False)
    eos: bool = True
    start: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.template
        is_template = isinstance(given, Mapping) and all(
            isinstance(role, str) and isinstance(turn, Turn) for role, turn in given.items()
        )
        if not is_template or not given:
            raise ConfigError(
                "Chat(template=)",
                got=repr(given),
                limit='a dict such as {"user": Turn("User: ", "\\n"), ...}',
            )
        if not any(turn.learned for turn in given.values()):
            raise ConfigError(
                "Chat(template=)", got="no role to learn from", limit="Turn(learned=True) for one"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.column,)

    def __call__(self, record: Record) -> Sample | None:
        """Return tokens and mask; None where no message counts in the loss.

        Raises TransformError where there is no such conversation.
        """
        parts: list[tuple[NDArray[Any], bool]] = [(self.encoder.encode(self.start), False)]
        learned = False
        for role, content in self._messages(record):
            turn = self.template[role]
            learned = turn.learned
            parts.append((self.encoder.encode(turn.prefix), False))
            parts.append((self.encoder.encode(content), learned))
            parts.append((self.encoder.encode(turn.suffix), learned))
        if self.eos:
            parts.append((_end(self.encoder), learned))
        return _sample(parts)

    def _messages(self, record: Record) -> list[tuple[str, str]]:
        messages = column_of(record, self.column)
        if not isinstance(messages, list | tuple | np.ndarray):
            raise TransformError(
                f"column {self.column!r} is not a conversation",
                got="null" if messages is None else type(messages).__name__,
                limit='a list of {"role": ..., "content": ...}',
            )
        found = []
        for number, message in enumerate(messages):
            what = f"message {number} of column {self.column!r}"
            if not isinstance(message, Mapping):
                raise TransformError(
                    f"{what} is not a message",
                    got=type(message).__name__,
                    limit='{"role": ..., "content": ...}',
                )
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or role not in self.template:
                raise TransformError(
                    f"{what}: role", got=repr(role), limit=f"one of {sorted(self.template)}"
                )
            if not isinstance(content, str):
                raise TransformError(
                    f"{what}: content is not a text",
                    got="null" if content is None else type(content).__name__,
                )
            found.append((role, content))
        return found


@dataclass(frozen=True)
class Preference(_Encoding):
    """Make a pair of sequences of a prompt: with the response that was chosen, and the other.

    They stay together; batching needs ``Packed(sequences=2)`` or more. The first sequence is the
    chosen one. In both, the response alone counts in the loss.

    Parameters
    ----------
    encoder
        As in `PromptResponse`.
    prompt, chosen, rejected
        Columns that hold the texts.
    eos, start
        As in `PromptResponse`.
    """

    encoder: TextEncoder
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    _: KW_ONLY
    eos: bool = True
    start: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.prompt, self.chosen, self.rejected)

    def __call__(self, record: Record) -> Sample | None:
        """Return the pair; None where one of the responses is empty and nothing ends it."""
        prompt = _prompt(self, record)
        responses = [text_of(record, column) for column in (self.chosen, self.rejected)]
        return _together(self, prompt, responses)


@dataclass(frozen=True)
class Group(_Encoding):
    """Make a group of sequences of a prompt, one for each of several responses.

    They stay together; batching needs ``Packed(sequences=)`` of as many. In all of them, the
    response alone counts in the loss.

    Parameters
    ----------
    encoder
        As in `PromptResponse`.
    prompt
        Column that holds the text of the prompt.
    responses
        Column that holds a list of texts.
    eos, start
        As in `PromptResponse`.
    """

    encoder: TextEncoder
    prompt: str = "prompt"
    responses: str = "responses"
    _: KW_ONLY
    eos: bool = True
    start: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.prompt, self.responses)

    def __call__(self, record: Record) -> Sample | None:
        """Return the group; None where there is no response, or one is empty and nothing ends it.

        Raises TransformError where the column holds no list of texts.
        """
        responses = column_of(record, self.responses)
        is_list = isinstance(responses, list | tuple | np.ndarray)
        if not is_list or not all(isinstance(one, str) for one in responses):
            raise TransformError(
                f"column {self.responses!r} is not a list of texts",
                got="null" if responses is None else type(responses).__name__,
            )
        prompt = _prompt(self, record)
        return _together(self, prompt, list(responses))


def _end(encoder: TextEncoder) -> NDArray[np.int64]:
    """Return the token that ends a document, or none."""
    return np.array([] if encoder.eos_id is None else [encoder.eos_id], np.int64)


def _prompt(made: PromptResponse | Preference | Group, record: Record) -> NDArray[Any]:
    text = text_of(record, made.prompt)
    return np.concatenate([made.encoder.encode(made.start), made.encoder.encode(text)])


def _answered(
    made: PromptResponse | Preference | Group, prompt: NDArray[Any], response: str
) -> Sample | None:
    parts = [(prompt, False), (made.encoder.encode(response), True)]
    if made.eos:
        parts.append((_end(made.encoder), True))
    return _sample(parts)


def _together(
    made: Preference | Group, prompt: NDArray[Any], responses: Sequence[str]
) -> Sample | None:
    """Return the sequences of all responses, None unless there are any and all have targets."""
    sequences = [_answered(made, prompt, response) for response in responses]
    if not sequences or any(one is None for one in sequences):
        return None
    return {"sequences": sequences}


def _sample(parts: Sequence[tuple[NDArray[Any], bool]]) -> Sample | None:
    """Return the parts put together, and what of them counts; None if nothing does."""
    lengths = [len(tokens) for tokens, _ in parts]
    mask = np.repeat([learned for _, learned in parts], lengths).astype(bool)
    if not mask.any():
        return None
    tokens = np.concatenate([tokens for tokens, _ in parts])
    return {"tokens": tokens.astype(np.int32), "loss_mask": mask}

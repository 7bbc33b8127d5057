"""The documents that every system of a cell goes through once: made by a seed, in Arrow files.

Their lengths follow the mix ``"mixed"`` of `megadask.lengths`, their texts are pieces of the source
code and the prose that come with Python, their images pieces of photographs.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import megadask as md
from megadask.demo import documents
from megadask.planner.metadata import Metadata

Rows = tuple[list[dict[str, Any]], NDArray[np.int64]]

#: Tokens of an image are its patches of so many pixels a side.
PATCH = 16
#: Token of a patch, behind the 256 bytes and the end of a text.
IMAGE = 257
#: Record batches of a source, so that it has more shards than lanes.
SHARDS = 32
#: Bytes of each kind of text that pieces are cut from, and that a tokenizer is trained on.
TEXT_BYTES, TRAINED_BYTES = 12_000_000, 1_000_000
VOCABULARY = 8192
_MARKER = "<image>"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents on disk, and how they become samples.

    Attributes
    ----------
    files
        Source name to its Arrow file.
    lengths
        Source name to the tokens of each of its documents, in the order of the file.
    transform
        Makes a sample of a record.
    modalities
        Lists of items that samples hold.
    """

    files: dict[str, str]
    lengths: dict[str, NDArray[np.int64]]
    transform: Callable[[Any], Any]
    modalities: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(sum(length_N.sum() for length_N in self.lengths.values()))

    @property
    def documents(self) -> int:
        """Number of all documents."""
        return sum(map(len, self.lengths.values()))


def make(kind: str, folder: Path, tokens: int, context: int, seed: int = 0) -> Corpus:
    """Write documents of about so many tokens in all, none longer than the context.

    kind: "bytes", "bpe", "jpeg", or "equal" for documents that all fill the context.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    sources, shares = md.lengths.mix("mixed", context)
    if kind == "equal":
        tables = {"alike": Metadata({"tokens": np.full(-(-tokens // context), context)})}
    else:
        law = np.random.default_rng(0)
        mean = sum(
            share * float(sources[name].sample(law, 20_000)["tokens"].mean())
            for name, share in shares.items()
        )
        count = tokens / mean
        tables = {
            name: sources[name].sample(rng, max(1, round(count * share)))
            for name, share in shares.items()
        }
    writer = writer_of(kind, rng, context)
    files, lengths = {}, {}
    for law_name, table in tables.items():
        name = "code" if law_name == "image-text" and kind != "jpeg" else law_name
        rows, lengths[name] = writer.rows(name, table)
        files[name] = str(folder / f"{name}.arrow")
        _write(files[name], rows)
    return Corpus(
        files=files, lengths=lengths, transform=writer.transform, modalities=writer.modalities
    )


def writer_of(kind: str, rng: np.random.Generator, context: int) -> _Bytes:
    """Return what makes the records of a corpus, see `make`, and has their transform."""
    return {"bpe": _Bpe, "jpeg": _Jpeg}.get(kind, _Bytes)(rng, context)


class _Bytes:
    """Texts of an exact number of bytes, one of which ends them."""

    transform: Callable[[Any], Any] = md.transforms.Bytes("text")
    modalities: tuple[str, ...] = ()

    def __init__(self, rng: np.random.Generator, context: int) -> None:
        self.rng, self.context = rng, context

    def rows(self, name: str, table: Metadata) -> Rows:
        """Return records whose lengths are those of the table, and their lengths."""
        texts = self.texts(name, (table["tokens"] - 1).tolist())
        return [{"text": text} for text in texts], table["tokens"]

    def texts(self, name: str, sizes: Sequence[int]) -> list[str]:
        """Return pieces of so many characters."""
        text = _text(name in ("code", "alike"))
        starts = self.rng.integers(0, len(text) - max(sizes, default=0), len(sizes))
        return [text[s : s + n] for s, n in zip(starts.tolist(), sizes, strict=True)]


class _Bpe(_Bytes):
    """Texts of about so many tokens of a tokenizer that is trained on them, cut to the context."""

    def __init__(self, rng: np.random.Generator, context: int) -> None:
        super().__init__(rng, context)
        self.tokenizer = _trained()
        self.transform = md.transforms.Tokenizer(self.tokenizer, "text", eos="<eos>")
        sample = _text(False)[:200_000]
        self.characters = len(sample) / len(self.tokenizer.encode(sample).ids)

    def rows(self, name: str, table: Metadata) -> Rows:
        sizes = np.maximum(table["tokens"] * self.characters, 1).astype(int).tolist()
        texts = self.texts(name, sizes)
        for _ in range(100):
            encoded = self.tokenizer.encode_batch_fast(texts)
            length_N = np.array([len(found.ids) for found in encoded], np.int64) + 1
            long = np.flatnonzero(length_N > self.context)
            if not len(long):
                return [{"text": text} for text in texts], length_N
            for n in long.tolist():
                texts[n] = texts[n][: int(len(texts[n]) * 0.98 * self.context / length_N[n])]
        raise RuntimeError("texts do not become short enough")


class _Jpeg(_Bytes):
    """Image-text documents hold JPEG files, of as many patches as the law says, and a text."""

    transform = md.transforms.Chain(
        md.transforms.DecodeImage("image", patch=PATCH, max_patches=4096),
        md.transforms.Placeholders("image", IMAGE, md.transforms.Bytes("text")),
    )
    modalities = ("image",)

    def rows(self, name: str, table: Metadata) -> Rows:
        if name != "image-text":
            rows, length_N = super().rows(name, table)
            return [{**row, "image": []} for row in rows], length_N
        images = table.ragged["image"]
        text_N = (table["tokens"] - images.sum()).tolist()
        texts = self.texts(name, [max(n - 1, 0) for n in text_N])
        rows, lengths, offsets = [], [], images.offsets.tolist()
        for n, text in enumerate(texts):
            grids = [_grid(int(k)) for k in images.lengths_I[offsets[n] : offsets[n + 1]]]
            rows.append(
                {
                    "image": [_photo(self.rng, *grid) for grid in grids],
                    "text": _MARKER * len(grids) + text,
                }
            )
            lengths.append(len(text) + 1 + sum(down * across for down, across in grids))
        return rows, np.array(lengths, np.int64)


def _grid(patches: int) -> tuple[int, int]:
    """Return patches down and across, almost as many as asked for."""
    down = max(1, round(patches**0.5))
    return down, max(1, patches // down)


@functools.cache
def _photos() -> list[Any]:
    """Return photographs that come with scikit-image, large enough for any piece."""
    import skimage
    from PIL import Image

    folder = Path(skimage.__file__).parent / "data"
    names = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
    side = 2 * PATCH * 64
    return [Image.open(folder / name).convert("RGB").resize((side, side)) for name in names]


def _photo(rng: np.random.Generator, down: int, across: int) -> bytes:
    """Return a JPEG file of a piece of so many patches."""
    image = _photos()[int(rng.integers(len(_photos())))]
    width, height = across * PATCH, down * PATCH
    left = int(rng.integers(0, image.width - width + 1))
    top = int(rng.integers(0, image.height - height + 1))
    data = io.BytesIO()
    image.crop((left, top, left + width, top + height)).save(data, "JPEG", quality=90)
    return data.getvalue()


@functools.cache
def _text(is_code: bool) -> str:
    """Return ASCII text, always the same on one installation."""
    accept = documents.is_code if is_code else documents.is_prose
    files = documents.choose(documents.find(documents.installed_roots(), accept), TEXT_BYTES)
    read: Callable[..., Iterator[documents.Document]]
    read = documents.texts if is_code else documents.prose
    text = "\n".join(document.text for document in read(files)).encode("ascii", "ignore").decode()
    text = text.replace(_MARKER, "")
    return text if len(text) > 2**20 else text * (2**20 // max(len(text), 1) + 1)


@functools.cache
def _trained() -> Any:
    """Return a byte-level BPE tokenizer, trained on a part of the text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [_text(is_code)[:TRAINED_BYTES] for is_code in (False, True)]
    tokenizer.train_from_iterator("\n".join(lines).splitlines(), trainer)
    return tokenizer


def _write(path: str, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=-(-len(rows) // SHARDS))

"""Lengths of documents that follow a law, to try a pipeline on before there is data.

Axes: N documents, I images.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer, check_number
from megadask.planner.errors import ConfigError
from megadask.planner.metadata import Metadata, Ragged


@runtime_checkable
class Distribution(Protocol):
    """A law that lengths follow."""

    def sample(self, rng: np.random.Generator, size: int) -> Metadata:
        """Return a table of ``size`` documents: ``tokens`` (N,) int64 >= 1, perhaps modalities."""
        ...


@dataclass(frozen=True)
class Lognormal:
    """Lengths whose logarithms follow a normal law, rounded.

    Parameters
    ----------
    median
        Tokens that half of the documents exceed.
    sigma
        Standard deviation of the logarithm.
    clip
        Tokens that longer documents are cut to; None leaves them.
    """

    median: float
    sigma: float
    clip: int | None = None

    def __post_init__(self) -> None:
        check_number("Lognormal(median=)", self.median, 1)
        check_number("Lognormal(sigma=)", self.sigma, 0)
        if self.clip is not None:
            check_integer("Lognormal(clip=)", self.clip, 1)

    def sample(self, rng: np.random.Generator, size: int) -> Metadata:
        """Return a table of ``size`` documents."""
        return Metadata({"tokens": self.lengths(rng, size)})

    def lengths(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Return (size,) lengths >= 1."""
        exact_N = rng.lognormal(np.log(self.median), self.sigma, size)
        most = 2.0**40 if self.clip is None else float(self.clip)
        return np.rint(np.clip(exact_N, 1, most)).astype(np.int64)


@dataclass(frozen=True)
class ImageText:
    """Documents of a text and some images, whose tokens follow the text's.

    The number of images has the geometric law of parameter 1/2: one in half of the documents, two
    in a quarter. The table has their lengths as modality ``"image"``.

    Parameters
    ----------
    text, image
        Lengths of the text, and of each image.
    most_images
        Most images of a document.
    clip
        Tokens that longer documents are cut to, before the first image that does not fit in whole.
    """

    text: Lognormal = field(default_factory=lambda: Lognormal(150, 0.8))
    image: Lognormal = field(default_factory=lambda: Lognormal(500, 1.0, clip=4096))
    most_images: int = 8
    clip: int | None = None

    def __post_init__(self) -> None:
        check_integer("ImageText(most_images=)", self.most_images, 1)
        if self.clip is not None:
            check_integer("ImageText(clip=)", self.clip, 1)

    def sample(self, rng: np.random.Generator, size: int) -> Metadata:
        """Return a table of ``size`` documents."""
        text_N = self.text.lengths(rng, size)
        if self.clip is not None:
            text_N = np.minimum(text_N, self.clip)
        count_N = np.minimum(rng.geometric(0.5, size), self.most_images)
        document_I = np.repeat(np.arange(size), count_N)
        length_I = self.image.lengths(rng, len(document_I))
        if self.clip is not None:
            end_I = np.cumsum(length_I)
            before_N = (end_I - length_I)[np.cumsum(count_N) - count_N]
            fits_I = end_I - before_N[document_I] + text_N[document_I] <= self.clip
            document_I, length_I = document_I[fits_I], length_I[fits_I]
        images = np.bincount(document_I, minlength=size)
        ragged = Ragged.counted(length_I, images)
        return Metadata({"tokens": text_N + ragged.sum()}, {"image": ragged})


def mix(name: str, context: int) -> tuple[dict[str, Distribution], dict[str, float]]:
    """Return the sources of a made-up training mixture, and their weights by samples.

    Parameters
    ----------
    name
        ``"web"``; ``"mixed"``: chat, web, long documents and images with text; ``"longctx"``: half
        of the documents are long; ``"vl"``: mostly images with text.
    context
        Tokens that longer documents are cut to.
    """
    if name not in _MIXES:
        raise ConfigError("lengths.mix(name)", got=repr(name), limit=f"one of {sorted(_MIXES)}")
    check_integer("lengths.mix(context)", context, 1)
    sources: dict[str, Distribution] = {
        source: replace(law, clip=context) for source, (_, law) in _MIXES[name].items()
    }
    return sources, {source: share for source, (share, _) in _MIXES[name].items()}


#: Name to (share, law) of each source; clipped to the context by `mix`.
_MIXES: dict[str, dict[str, tuple[float, Lognormal | ImageText]]] = {
    "web": {"web": (1.0, Lognormal(600, 1.1))},
    "mixed": {
        "chat": (0.3, Lognormal(250, 1.0)),
        "web": (0.4, Lognormal(600, 1.1)),
        "long": (0.1, Lognormal(6000, 1.3)),
        "image-text": (0.2, ImageText()),
    },
    "longctx": {"web": (0.5, Lognormal(600, 1.1)), "long": (0.5, Lognormal(6000, 1.3))},
    "vl": {"image-text": (0.8, ImageText()), "chat": (0.2, Lognormal(250, 1.0))},
}

"""Made-up document lengths: the kinds and mixes that the benchmarks plan for.

Texts are lognormal by (median, sigma), in tokens, and clipped to the context; an image-text
document is a short text with 1 to 8 images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.metadata import Metadata, Ragged

Ints = NDArray[np.int64]

#: Median and sigma of the tokens of a text.
TEXTS = {"chat": (250, 1.0), "web": (600, 1.1), "long": (6000, 1.3), "image-text": (150, 0.8)}
#: Median and sigma of the tokens of an image, and the most of them.
IMAGE = (500, 1.0, 4096)
MOST_IMAGES = 8
#: Shares of the kinds by name of the mix.
MIXES = {
    "web": {"web": 1.0},
    "mixed": {"chat": 0.3, "web": 0.4, "long": 0.1, "image-text": 0.2},
    "longctx": {"web": 0.5, "long": 0.5},
    "vl": {"image-text": 0.8, "chat": 0.2},
}
#: Width of the model that the costs are those of.
HIDDEN = 5120


def lognormal(rng: np.random.Generator, n: int, median: float, sigma: float, most: int) -> Ints:
    """Return (n,) tokens, 1 to ``most``."""
    tokens_N = rng.lognormal(np.log(median), sigma, n).astype(np.int64) + 1
    return np.asarray(np.minimum(tokens_N, most))


def mix(name: str, rng: np.random.Generator, n: int, context: int) -> Metadata:
    """Return a table of n documents: ``source`` (the kind), ``tokens``, items of ``image``."""
    shares = MIXES[name]
    kind_N = rng.choice(list(shares), n, p=list(shares.values()))
    tokens_N = np.zeros(n, np.int64)
    for kind in shares:
        some = np.flatnonzero(kind_N == kind)
        tokens_N[some] = lognormal(rng, len(some), *TEXTS[kind], context)
    images_N = np.minimum(rng.geometric(0.5, n), MOST_IMAGES) * (kind_N == "image-text")
    offsets = np.concatenate([[0], np.cumsum(images_N)]).astype(np.int64)
    images = Ragged(lognormal(rng, int(offsets[-1]), *IMAGE), offsets)
    columns: dict[str, NDArray[Any]] = {
        "source": kind_N,
        "tokens": np.minimum(tokens_N + images.sum(), context),
    }
    return Metadata(columns, {"image": images})


def transformer_cost(tokens_N: Ints) -> Ints:
    """Return (N,) the cost l + l**2 / (6 hidden) of documents, 4,096 to a token."""
    return np.rint((tokens_N + tokens_N**2 / (6 * HIDDEN)) * 4096).astype(np.int64)


def encoder_tokens(rng: np.random.Generator, n: int) -> Ints:
    """Return (n,) image tokens of samples of which half have none."""
    tokens_N = np.clip(rng.lognormal(6.0, 1.0, n), 64, 4096).astype(np.int64)
    return tokens_N * (rng.random(n) < 0.5)

"""Made-up steps: documents of the mixes of `megadask.planner.lengths`, shuffled, as one table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner import lengths as laws
from megadask.planner.metadata import Metadata, Ragged

Ints = NDArray[np.int64]

#: Names of the mixes, see `megadask.planner.lengths.mix`.
MIXES = ("web", "mixed", "longctx", "vl")
#: Width of the model that the costs are those of.
HIDDEN = 5120


def lognormal(rng: np.random.Generator, n: int, median: float, sigma: float, most: int) -> Ints:
    """Return (n,) tokens, 1 to ``most``."""
    tokens_N = rng.lognormal(np.log(median), sigma, n).astype(np.int64) + 1
    return np.asarray(np.minimum(tokens_N, most))


def mix(name: str, rng: np.random.Generator, n: int, context: int) -> Metadata:
    """Return a table of n documents: ``source`` (the kind), ``tokens``, items of ``image``."""
    sources, shares = laws.mix(name, context)
    kind_N = rng.choice(list(shares), n, p=list(shares.values()))
    tokens_N = np.zeros(n, np.int64)
    for kind, law in sources.items():
        some = np.flatnonzero(kind_N == kind)
        text = law.text if isinstance(law, laws.ImageText) else law
        tokens_N[some] = lognormal(rng, len(some), text.median, text.sigma, context)
    law = laws.ImageText()
    images_N = np.minimum(rng.geometric(0.5, n), law.most_images) * (kind_N == "image-text")
    offsets = np.concatenate([[0], np.cumsum(images_N)]).astype(np.int64)
    image, count = law.image, int(offsets[-1])
    images = Ragged(lognormal(rng, count, image.median, image.sigma, image.clip), offsets)
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

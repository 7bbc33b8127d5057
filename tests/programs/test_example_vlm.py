"""The example of a vision-language model, in short: real photographs, processes and exchanges."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import megadask as md

pytest.importorskip("skimage")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vlm"
if not EXAMPLE.is_dir():
    pytest.skip("examples are not part of the wheel", allow_module_level=True)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import its modules, as its own programs do."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("model", "photos", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_trains_and_its_encoders_are_balanced(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), "--steps", "8", "--photos", "200"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^samples delivered \d+, repeated 0, lost 0$", done.stdout, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"^ +\d+ +(\d\.\d+)", done.stdout, re.MULTILINE)]
    assert losses[0] > 5
    assert losses[-1] < 0.8 * losses[0]
    found = re.search(r"mean: ([\d.]+) with .*, ([\d.]+) if", done.stdout)
    assert found
    assert float(found[1]) < float(found[2])


@pytest.mark.usefixtures("example")
def test_captions_point_at_their_photographs() -> None:
    import photos

    rng = np.random.default_rng(0)
    decode = md.transforms.DecodeImage("image", patch=16, max_patches=256, merge=2)
    lengths = []
    for record in photos.captioned(40, rng):
        assert record["text"].count("<image>") == 1
        lengths.append(len(decode(record)["image"][0]))
    assert max(lengths) > 8 * min(lengths)
    assert len(list(photos.documentation())) > 100


@pytest.mark.usefixtures("example")
def test_places_are_in_the_order_of_the_patches() -> None:
    from model import MERGE, PATCH, _places

    rows, columns = 4, 6
    down, across = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    pixels = np.stack([down, across, 0 * down], -1).astype(np.uint8)
    image = pixels.repeat(PATCH, 0).repeat(PATCH, 1)
    (patches,) = md.transforms.DecodeImage(patch=PATCH, merge=MERGE)({"image": image})["image"]
    expected = torch.from_numpy(patches[:, :2].astype(np.float32))
    scale = torch.tensor([rows - 1, columns - 1]) / 2
    torch.testing.assert_close((_places(rows, columns) + 1) * scale, expected)


@pytest.mark.usefixtures("example")
def test_an_image_is_encoded_alone_whatever_lies_beside_it() -> None:
    from model import Encoder

    torch.manual_seed(0)
    encoder = Encoder(hidden=8)
    sizes = [(2, 2), (4, 6), (2, 8)]
    images = [torch.randint(0, 256, (a * b, 768), dtype=torch.uint8) for a, b in sizes]
    bounds = torch.tensor([0, *np.cumsum([len(image) for image in images])])
    together = encoder(torch.cat(images), bounds, torch.tensor(sizes))
    alone = [
        encoder(image, torch.tensor([0, len(image)]), torch.tensor([size]))
        for image, size in zip(images, sizes, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone))

"""Figures of simulations can be read without the code that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megadask as md
from megadask.planner.simulation import Trainer

LOADS = np.random.default_rng(0).integers(0, 9, (5, 4, 2))


def words(figure: Any) -> list[str]:
    texts = [figure.get_suptitle()]
    for axes in figure.axes:
        texts += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        texts += [text.get_text() for text in axes.get_legend().get_texts()]
    return texts


@pytest.mark.parametrize("sync", ["step", "microbatch"])
@pytest.mark.parametrize("pp", [1, 3])
def test_a_step_is_drawn_to_its_end(sync: Any, pp: int, tmp_path: Path) -> None:
    done = Trainer(sync=sync, pp=pp).run(LOADS)
    figure = done.plot()
    (axes,) = figure.axes
    texts = words(figure)
    assert f"pp={pp}" in texts[0]
    if pp == 1:
        assert {"ideal", "step time", "part 1"} <= set(texts)
        heights = [bar.get_y() + bar.get_height() for bar in axes.patches]
        assert max(heights) == pytest.approx(done.alone.max())
    else:
        assert {"forward", "backward", "idle"} <= set(texts)
        ends = [path.vertices[:, 0].max() for c in axes.collections for path in c.get_paths()]
        # With several parts, the slowest bucket over all is not that of every part.
        longest = done.step_time if sync == "microbatch" else done.alone.max()
        assert max(ends) == pytest.approx(longest)
        assert len(ends) == 2 * 2 * pp * 4
    figure.savefig(tmp_path / "step.png")


def test_a_step_without_work_can_be_drawn(tmp_path: Path) -> None:
    for pp in (1, 2):
        Trainer(pp=pp).run(np.zeros((2, 2, 1))).plot().savefig(tmp_path / "empty.png")


def test_a_stream_is_drawn_by_way_of_placing(tmp_path: Path) -> None:
    stream = md.Stream({"a": md.lengths.Lognormal(60, 1)}, batching=md.Packed(512, 4), steps=3)
    figure = md.simulate(stream, against=("none", "greedy")).plot()
    texts = words(figure)
    assert all(texts)
    assert texts.count("none") == texts.count("greedy") == texts.count("assignment") == 3
    figure.savefig(tmp_path / "stream.png")


def test_what_is_drawn_can_be_read() -> None:
    """Legends lie beside the bars, and large times have their power of ten in the label."""
    for pp in (1, 2):
        figure = Trainer(pp=pp).run(LOADS * 10**12).plot()
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1
        assert axes.get_legend().get_window_extent().x1 <= figure.bbox.x1
        assert any("1e12 x unit of the cost" in text for text in words(figure))
        axis = axes.yaxis if pp == 1 else axes.xaxis
        assert not axis.get_offset_text().get_text()
        assert all(len(label.get_text()) < 5 for label in axis.get_ticklabels())

"""Recordings become log-mel frames; what is none, or too much of one, is an error of its record."""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import wave
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megadask as md
from megadask.fingerprints.fingerprint import fingerprint
from megadask.transforms import TransformError
from megadask.transforms.audio import LogMel, mel_bands

_RNG = np.random.default_rng(0)


def tone(seconds: float, rate: int, hertz: float = 440.0) -> Any:
    time = np.arange(round(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * hertz * time) + 0.01 * _RNG.standard_normal(len(time))


def wav(signal: Any, rate: int, width: int = 2, channels: int = 1) -> bytes:
    """Return a WAV file of integers."""
    scaled = np.rint(np.clip(signal, -1, 1) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    raw = (scaled + 128).astype("u1").tobytes() if width == 1 else b""
    if width > 1:
        raw = scaled.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return data.getvalue()


def plain_log_mel(signal: Any, rate: int, n_mels: int, hop: int, window: int) -> Any:
    """The definition, one number at a time: a frame's Fourier sums, then triangles over them."""

    def mel(f: float) -> float:
        return f * 3 / 200 if f < 1000 else 15 + 27 * math.log(f / 1000) / math.log(6.4)

    def hertz(m: float) -> float:
        return m * 200 / 3 if m < 15 else 1000 * math.exp((m - 15) * math.log(6.4) / 27)

    edges = [hertz(mel(rate / 2) * k / (n_mels + 1)) for k in range(n_mels + 2)]
    size = len(signal)

    def at(k: int) -> float:  # reflected at both ends
        k = abs(k)
        return float(signal[k if k < size else 2 * (size - 1) - k])

    rows = []
    for frame in range(-(-size // hop)):
        first = frame * hop - window // 2
        part = [
            at(first + k) * (0.5 - 0.5 * math.cos(2 * math.pi * k / window)) for k in range(window)
        ]
        powers = [
            abs(
                sum(
                    x * complex(math.cos(w), -math.sin(w))
                    for x, w in zip(part, angles, strict=True)
                )
            )
            ** 2
            for angles in (
                [2 * math.pi * b * k / window for k in range(window)]
                for b in range(window // 2 + 1)
            )
        ]
        row = []
        for low, peak, high in zip(edges, edges[1:], edges[2:], strict=False):
            total = 0.0
            for b, power in enumerate(powers):
                f = b * rate / window
                total += power * max(0.0, min((f - low) / (peak - low), (high - f) / (high - peak)))
            row.append(math.log10(max(total * 2 / (high - low), 1e-10)))
        rows.append(row)
    loudest = max(map(max, rows))
    return np.array([[(max(x, loudest - 8) + 4) / 4 for x in row] for row in rows])


class TestFrames:
    @pytest.mark.parametrize("size", [1000, 1003, 960])
    def test_they_are_what_the_definition_says(self, size: int) -> None:
        signal = tone(size / 4000, 4000)
        made = LogMel(sample_rate=4000, n_mels=8, hop=120, window=200)({"audio": (signal, 4000)})
        expected = plain_log_mel(signal, 4000, 8, 120, 200)
        assert made["audio"][0].dtype == np.float32
        np.testing.assert_allclose(made["audio"][0], expected, atol=1e-6)

    def test_they_are_whispers(self) -> None:
        audio_utils = pytest.importorskip("transformers.audio_utils")
        signal = tone(1.5, 16_000)
        bands = audio_utils.mel_filter_bank(201, 80, 0.0, 8000.0, 16_000, "slaney", "slaney")
        log = audio_utils.spectrogram(
            signal,
            audio_utils.window_function(400, "hann"),
            frame_length=400,
            hop_length=160,
            power=2.0,
            mel_filters=bands,
            log_mel="log10",
        ).T[:-1]
        expected = (np.maximum(log, log.max() - 8) + 4) / 4
        made = LogMel()({"audio": (signal, 16_000)})["audio"][0]
        assert made.shape == (150, 80)
        np.testing.assert_allclose(made, expected, atol=2e-5)

    def test_bands_cover_all_frequencies_and_have_one_area(self) -> None:
        bands_BM = mel_bands(16_000, 4096, 40)
        assert (bands_BM[1:-1].sum(axis=1) > 0).all()
        np.testing.assert_allclose(bands_BM.sum(axis=0) * 16_000 / 4096, 1.0, rtol=0.02)

    @given(st.integers(1, 700))
    def test_every_hop_gets_a_frame(self, size: int) -> None:
        made = LogMel(sample_rate=1000, n_mels=4, hop=80, window=200)
        (frames,) = made({"audio": (np.ones(size), 1000)})["audio"]
        assert frames.shape == (-(-size // 80), 4)

    def test_many_blocks_are_one_recording(self, monkeypatch: pytest.MonkeyPatch) -> None:
        item = {"audio": (tone(1.0, 16_000), 16_000)}
        (whole,) = LogMel()(item)["audio"]
        monkeypatch.setattr("megadask.transforms.audio._BLOCK", 7)
        np.testing.assert_array_equal(LogMel()(item)["audio"][0], whole)


class TestForms:
    @pytest.mark.parametrize("width", [1, 2, 3, 4])
    def test_wav_of_any_width(self, width: int) -> None:
        signal = tone(0.5, 16_000)
        (exact,) = LogMel()({"audio": (signal, 16_000)})["audio"]
        (read,) = LogMel()({"audio": wav(signal, 16_000, width)})["audio"]
        assert abs(read - exact).max() < (0.5 if width == 1 else 0.02)

    def test_channels_are_averaged_and_rates_made_one(self) -> None:
        left, right = tone(0.5, 48_000), tone(0.5, 48_000, 1000.0)
        stereo = np.stack([left, right], axis=1)
        (read,) = LogMel()({"audio": wav(stereo, 48_000, 3, channels=2)})["audio"]
        (mono,) = LogMel()({"audio": ((left + right) / 2, 48_000)})["audio"]
        assert read.shape == mono.shape == (50, 80)
        assert abs(read - mono).max() < 0.02

    def test_resampling_keeps_a_tone(self) -> None:
        time = np.arange(44_100) / 44_100
        slow = np.arange(16_000) / 16_000
        (read,) = LogMel()({"audio": (np.sin(2764.6 * time), 44_100)})["audio"]
        (exact,) = LogMel()({"audio": (np.sin(2764.6 * slow), 16_000)})["audio"]
        loud = exact > exact.max() - 0.5
        assert loud.any()
        assert abs(read - exact)[loud].max() < 0.05

    def test_dicts_and_several(self) -> None:
        signal = tone(0.2, 16_000)
        forms = [
            wav(signal, 16_000),
            {"bytes": wav(signal, 16_000), "path": "a.wav"},
            {"array": signal, "sampling_rate": 16_000},
            (np.rint(signal * 32767).astype(np.int16), 16_000),
        ]
        sample = LogMel("speech")({"speech": forms, "text": "hm"})
        assert [frames.shape for frames in sample["speech"]] == [(20, 80)] * 4
        assert sample["text"] == "hm"

    @pytest.mark.parametrize("kind", ["FLAC", "OGG", "WAV"])
    def test_other_formats_by_soundfile(self, kind: str) -> None:
        soundfile = pytest.importorskip("soundfile")
        signal, data = tone(0.5, 16_000), io.BytesIO()
        subtype = {"WAV": "FLOAT"}.get(kind)
        soundfile.write(data, signal, 16_000, format=kind, subtype=subtype)
        (read,) = LogMel()({"audio": data.getvalue()})["audio"]
        (exact,) = LogMel()({"audio": (signal, 16_000)})["audio"]
        assert abs(read - exact).mean() < (0.1 if kind == "OGG" else 1e-3)

    def test_without_soundfile_the_remedy_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "soundfile", None)
        with pytest.raises(md.errors.ConfigError, match=r"megadask\[audio\]"):
            LogMel()({"audio": b"fLaC" + bytes(100)})


class TestLimits:
    def test_too_long_is_refused_by_its_header(self) -> None:
        header = wav(np.zeros(0), 8000, 1)
        ten_hours = 36_000 * 8000
        sizes = struct.pack("<I", ten_hours + 36), struct.pack("<I", ten_hours)
        data = header[:4] + sizes[0] + header[8:40] + sizes[1] + bytes(1000)
        assert len(LogMel()({"audio": data})["audio"][0])  # it is as long as what is there
        with pytest.raises(TransformError, match="longer than max_seconds"):
            LogMel(max_seconds=0.1)({"audio": data})

    def test_too_long_is_refused_before_it_is_decoded(self) -> None:
        soundfile = pytest.importorskip("soundfile")
        data = io.BytesIO()
        soundfile.write(data, np.zeros(400 * 1000), 1000, format="FLAC")
        assert len(data.getvalue()) < 10_000
        with pytest.raises(TransformError, match="longer than max_seconds"):
            LogMel()({"audio": data.getvalue()})

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (None, "not a recording.*null"),
            (b"", "decoded|begins"),
            (b"RIFF" + bytes(40), "decoded"),
            ((np.zeros(0), 16_000), "odd recording"),
            ((np.zeros(10), 2**31 - 1), "odd recording"),
            ((np.zeros(10), 16_000.5), "16000.5"),
            ((np.zeros((2, 3, 4)), 16_000), r"\(2, 3, 4\)"),
            ((np.array(["x"]), 16_000), "not a recording"),
            ((np.array([np.nan, 0]), 16_000), "not finite"),
        ],
    )
    def test_broken_recordings(self, value: Any, words: str) -> None:
        with pytest.raises(TransformError, match=words):
            LogMel()({"audio": value})

    def test_no_column(self) -> None:
        with pytest.raises(TransformError, match="no column 'audio'"):
            LogMel()({"sound": b""})


class TestTransform:
    def test_it_says_which_column_it_reads(self) -> None:
        text = md.transforms.Bytes("title")
        made = md.transforms.Chain(LogMel("clip"), text)
        assert made.columns == {"clip", "title"}

    def test_it_pickles_and_is_public(self) -> None:
        made = md.transforms.LogMel("speech", n_mels=64)
        assert pickle.loads(pickle.dumps(made)) == made
        assert fingerprint(made) != fingerprint(LogMel("speech"))

    @pytest.mark.parametrize(
        "options",
        [
            {"hop": 0},
            {"n_mels": 400},
            {"sample_rate": 10},
            {"window": True},
            {"max_seconds": 0},
            {"max_seconds": math.inf},
        ],
    )
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(md.errors.ConfigError, match="LogMel"):
            LogMel(**options)

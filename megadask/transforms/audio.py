"""Audio as frames of a mel spectrogram, with limits on what a recording may cost.

Letters: S samples of a recording, C its channels; F frames, W samples of a window, B frequencies,
M mel bands.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_above_0
from megadask.planner.errors import ConfigError
from megadask.transforms.images import check_counts
from megadask.transforms.transform import InPlace, Record, Sample, TransformError, column_of

#: Rates that recordings come in, per second. Resampling takes time and memory by the rate.
_RATES = range(1_000, 384_001)
_MOST_CHANNELS = 64
#: Frames that are transformed at a time, which bounds the memory that it takes.
_BLOCK = 4096

Signal = NDArray[np.float64]


@dataclass(frozen=True)
class LogMel(InPlace):
    """Make log-mel frames of the recordings of a column, as Whisper's encoder takes them.

    A recording is averaged over its channels and resampled. Its record gets under ``column`` a list
    of (F, n_mels) float32 arrays, one a recording, F = samples / hop rounded up: the modality of
    `Source(modalities=)`. Frame f is centred on sample f x hop; a Hann window, power, Slaney's mel
    bands up to half the rate, log10 no less than 8 below the recording's loudest, plus 4, over 4.
    Other columns stay. Put it before what makes the tokens, in a `Chain`.

    Parameters
    ----------
    column
        Holds the bytes of a WAV file, or of another format where the package soundfile is
        installed; a dict that has them under ``bytes``, or ``array`` and ``sampling_rate`` (as in
        Hugging Face data sets); a tuple of samples (S,) or (S, C) and their rate; or a list of
        these. Samples that are integers are scaled by their type.
    sample_rate
        Samples a second that recordings are resampled to.
    n_mels
        M, bands.
    hop, window
        Samples from a frame to the next, and in the window of one.
    max_seconds
        A longer recording is an error of its record and is not decoded.
    """

    column: str = "audio"
    _: KW_ONLY
    sample_rate: int = 16_000
    n_mels: int = 80
    hop: int = 160
    window: int = 400
    max_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_counts(self, ("sample_rate", "n_mels", "hop", "window"))
        if self.sample_rate not in _RATES:
            raise ConfigError(
                "LogMel(sample_rate=)",
                got=self.sample_rate,
                limit=f"{_RATES[0]} to {_RATES[-1]}",
            )
        check_above_0("LogMel(max_seconds=)", self.max_seconds)
        if not (mel_bands(self.sample_rate, self.window, self.n_mels).sum(axis=0) > 0).all():
            raise ConfigError(
                "LogMel(n_mels=)",
                got=self.n_mels,
                limit="bands of at least one frequency",
                remedy="Choose fewer bands or a longer window.",
            )

    def __call__(self, record: Record) -> Sample:
        """Return the record with frames; raises TransformError for what is no recording."""
        value = column_of(record, self.column)
        items = value if isinstance(value, list) else [value]
        return {**record, self.column: [self._frames(item) for item in items]}

    def fingerprint(self) -> str:
        """Return a text that differs where results would."""
        return repr(self)

    def _frames(self, item: Any) -> NDArray[np.float32]:
        try:
            signal_SC, rate = self._read(item)
        except (TransformError, ConfigError):
            raise
        except Exception as error:  # decoders raise all kinds of errors for broken data
            raise TransformError(
                f"column {self.column!r} is not a recording that can be decoded",
                got=f"{type(error).__name__}: {error}",
            ) from error
        if not np.isfinite(signal_SC).all():
            raise TransformError(f"column {self.column!r} has samples that are not finite")
        signal = resampled(signal_SC.mean(axis=1), rate, self.sample_rate)
        return log_mel(signal, self.sample_rate, self.n_mels, self.hop, self.window)

    def _read(self, item: Any) -> tuple[Signal, int]:
        """Return (S, C) samples and their rate."""
        if isinstance(item, Mapping):
            if item.get("array") is not None:
                item = (item["array"], item.get("sampling_rate"))
            else:
                item = item.get("bytes")
        if isinstance(item, tuple) and len(item) == 2:
            return self._samples(*item)
        if not isinstance(item, bytes):
            raise TransformError(
                f"column {self.column!r} is not a recording",
                got="null" if item is None else type(item).__name__,
                limit="bytes of a file, or (samples, rate)",
            )
        if item[:4] == b"RIFF" and (read := self._wav(item)) is not None:
            return read
        return self._other(item)

    def _samples(self, samples: Any, rate: Any) -> tuple[Signal, int]:
        array = np.asarray(samples)
        good_rate = isinstance(rate, int | float | np.number) and float(rate).is_integer()
        if not good_rate or array.ndim not in (1, 2) or array.dtype.kind not in "iuf":
            raise TransformError(
                f"column {self.column!r} is not a recording",
                got=f"{array.dtype} of shape {array.shape} at rate {rate!r}",
                limit="(S,) or (S, C) numbers, and samples a second",
            )
        array = array[:, None] if array.ndim == 1 else array
        self._check(len(array), int(rate), array.shape[1])
        return _scaled(array), int(rate)

    def _wav(self, data: bytes) -> tuple[Signal, int] | None:
        """Return what a WAV file of integers holds, None for one of another kind."""
        try:
            with wave.open(io.BytesIO(data)) as file:
                channels, width, rate = (
                    file.getnchannels(),
                    file.getsampwidth(),
                    file.getframerate(),
                )
                # What the header says may not be true; the data are what is there.
                num_samples = min(file.getnframes(), len(data) // (channels * width))
                self._check(num_samples, rate, channels)
                raw = file.readframes(num_samples)
        except wave.Error:
            return None  # floats, or compressed
        whole = len(raw) - len(raw) % (channels * width)
        self._check(whole // (channels * width), rate, channels)
        return _integers(raw[:whole], width).reshape(-1, channels), rate

    def _other(self, data: bytes) -> tuple[Signal, int]:
        try:
            import soundfile
        except ImportError as error:
            raise ConfigError(
                f"column {self.column!r} has a recording that is no WAV file of integers",
                got=f"a file that begins with {data[:4]!r}",
                remedy="pip install 'megadask[audio]' on the workers, which reads more formats.",
            ) from error
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            self._check(file.frames, file.samplerate, file.channels)
            most = math.floor(self.max_seconds * file.samplerate)
            signal_SC = file.read(most + 1, dtype="float64", always_2d=True)
            self._check(len(signal_SC), file.samplerate, file.channels)
            return signal_SC, file.samplerate

    def _check(self, num_samples: int, rate: int, channels: int) -> None:
        if rate not in _RATES or not 1 <= channels <= _MOST_CHANNELS or not num_samples:
            raise TransformError(
                f"column {self.column!r} has an odd recording",
                got=f"{num_samples} samples of {channels} channels, {rate} a second",
                limit=f"1 to {_MOST_CHANNELS} channels, {_RATES[0]} to {_RATES[-1]} a second",
            )
        if num_samples > self.max_seconds * rate:
            raise TransformError(
                f"column {self.column!r} is longer than max_seconds",
                got=f"{num_samples / rate:.1f} s",
                limit=f"{self.max_seconds:g} s",
                remedy="Cut recordings before, or raise LogMel(max_seconds=).",
            )


def log_mel(
    signal_S: Signal, sample_rate: int, n_mels: int, hop: int, window: int
) -> NDArray[np.float32]:
    """Return (F, M) log-mel frames of a signal, see `LogMel`; F = S / hop rounded up, S >= 1.

    Sums are float64, so that machines agree on the float32 that is left of them.
    """
    num_frames = -(-len(signal_S) // hop)
    half = window // 2
    # The last frame is centred before the end, so that half a window beyond it is enough.
    padded = np.pad(signal_S, half, mode="reflect")
    padded = np.pad(padded, (0, max(0, (num_frames - 1) * hop + window - len(padded))))
    frames_FW = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop][:num_frames]
    hann_W = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    bands_BM = mel_bands(sample_rate, window, n_mels)
    power_FM = np.empty((num_frames, n_mels))
    for first in range(0, num_frames, _BLOCK):
        spectrum_FB = np.fft.rfft(frames_FW[first : first + _BLOCK] * hann_W, axis=1)
        # Not a product of BLAS, whose sums depend on the number of its threads.
        power_FB = spectrum_FB.real**2 + spectrum_FB.imag**2
        power_FM[first : first + _BLOCK] = np.einsum("fb,bm->fm", power_FB, bands_BM)
    log_FM = np.log10(np.maximum(power_FM, 1e-10))
    log_FM = np.maximum(log_FM, log_FM.max() - 8.0)
    scaled_FM: NDArray[np.float32] = ((log_FM + 4.0) / 4.0).astype(np.float32)
    return scaled_FM


@lru_cache(maxsize=8)
def mel_bands(sample_rate: int, window: int, n_mels: int) -> NDArray[np.float64]:
    """Return (B, M) triangles of Slaney's mel scale up to half the rate, each of area 1 in Hz."""
    frequency_B = np.fft.rfftfreq(window, 1 / sample_rate)
    edges = _hertz(np.linspace(_mel(0.0), _mel(sample_rate / 2), n_mels + 2))
    low_M, peak_M, high_M = edges[:-2], edges[1:-1], edges[2:]
    rising_BM = (frequency_B[:, None] - low_M) / (peak_M - low_M)
    falling_BM = (high_M - frequency_B[:, None]) / (high_M - peak_M)
    bands_BM = np.maximum(0.0, np.minimum(rising_BM, falling_BM)) * (2.0 / (high_M - low_M))
    bands_BM.flags.writeable = False  # it is shared by all callers
    return bands_BM


def resampled(signal_S: Signal, rate: int, target: int) -> Signal:
    """Return a signal at another rate, by a polyphase filter."""
    if rate == target:
        return signal_S
    from scipy.signal import resample_poly

    common = math.gcd(rate, target)
    result: Signal = resample_poly(signal_S, target // common, rate // common)
    return result


def _mel(hertz: float) -> float:
    """Linear below 1 kHz, logarithmic above (Slaney, Auditory Toolbox, 1998)."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * (math.log(6.4) / 27)))


def _integers(raw: bytes, width: int) -> Signal:
    """Return flat samples, -1 to 1, of little-endian integers of ``width`` bytes."""
    if width == 3:  # as the three upper bytes of four
        bytes_ = np.zeros((len(raw) // 3, 4), np.uint8)
        bytes_[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return _scaled(bytes_.view("<i4").reshape(-1))
    return _scaled(np.frombuffer(raw, {1: "u1", 2: "<i2", 4: "<i4"}[width]))


def _scaled(samples: NDArray[Any]) -> Signal:
    """Return samples as floats, integers scaled so that their type's range is -1 to 1."""
    if samples.dtype.kind == "f":
        return samples.astype(np.float64)
    half = 2.0 ** (8 * samples.dtype.itemsize - 1)
    return (samples - half if samples.dtype.kind == "u" else samples) / half

"""Codecs, and when they are used."""

import importlib.util
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice import payload
from dataservice.payload import (
    CODECS,
    PROBE_BYTES,
    CodecChoice,
    Compressor,
    check_compression,
    compression_pays,
)
from mpidist import Work
from mpidist.errors import DataLossError, FailedPreconditionError

needs_codecs = pytest.mark.skipif(
    importlib.util.find_spec("cramjam") is None, reason='needs pip install "mpidist[compress]"'
)
codecs = st.sampled_from(CODECS)
IDS = np.random.default_rng(0).zipf(1.3, 100_000).astype(np.int32)
NOISE = np.random.default_rng(1).integers(0, 256, 400_000, dtype=np.uint8)


def repeated(data, times):
    return np.tile(np.frombuffer(data, np.uint8), times)


@needs_codecs
@given(codecs, st.binary(max_size=200), st.integers(0, 500))
def test_round_trips(codec, data, times):
    buffer = repeated(data, times)
    compressor = Compressor(codec)
    small = compressor.compress(buffer)
    if small is None:
        return
    assert (small.dtype, small.ndim) == (np.uint8, 1)
    assert small.nbytes * 1.1 <= buffer.nbytes
    result = compressor.decompress(small, buffer.nbytes)
    np.testing.assert_array_equal(result, buffer)
    assert result.flags.writeable
    assert result.flags.owndata


@needs_codecs
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "array",
    [np.zeros((300, 70)), IDS, np.arange(10**6) // 9, np.zeros((10, 1000), "U3"), IDS[3:]],
)
def test_arrays(codec, array):
    array = array.view()
    array.flags.writeable = False
    small = Compressor(codec).compress(array)
    assert small.nbytes < array.nbytes / 1.5
    result = Compressor(codec).decompress(small, array.nbytes)
    np.testing.assert_array_equal(result.view(array.dtype).reshape(array.shape), array)


@needs_codecs
@pytest.mark.parametrize("codec", CODECS)
def test_what_does_not_pay(codec):
    for buffer in (NOISE, NOISE[:1], np.zeros(0, np.uint8), np.float32(2)[None]):
        assert Compressor(codec).compress(buffer) is None


@needs_codecs
@pytest.mark.parametrize("codec", CODECS)
def test_more_than_a_codec_takes(codec, monkeypatch):
    monkeypatch.setattr(payload, "LARGEST_BYTES", 1000)
    assert Compressor(codec).compress(np.zeros(1001, np.uint8)) is None
    assert Compressor(codec).compress(np.zeros(1000, np.uint8)) is not None


@needs_codecs
@given(codecs, st.binary(max_size=300), st.integers(1, 5000))
def test_garbage(codec, data, nbytes):
    try:
        result = Compressor(codec).decompress(np.frombuffer(data, np.uint8), nbytes)
    except DataLossError:
        return
    assert result.nbytes == nbytes  # it happens to be valid


@needs_codecs
@given(codecs, st.data())
def test_damage(codec, data):
    small = Compressor(codec).compress(IDS).copy()
    small = small[: data.draw(st.integers(0, small.size))]
    for _ in range(data.draw(st.integers(0, 3))):
        if small.size:
            small[data.draw(st.integers(0, small.size - 1))] ^= data.draw(st.integers(0, 255))
    try:
        result = Compressor(codec).decompress(small, IDS.nbytes)
    except DataLossError:
        return
    assert result.nbytes == IDS.nbytes


@needs_codecs
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("off", [-1, 1, -399_999, 400_000])
def test_another_size_than_announced(codec, off):
    small = Compressor(codec).compress(IDS)
    with pytest.raises(DataLossError, match=rf"{small.nbytes} bytes of {codec}.*damaged"):
        Compressor(codec).decompress(small, IDS.nbytes + off)


@needs_codecs
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nbytes", [-1, 0, 1001, 1 << 62])
def test_no_more_than_the_limit(codec, nbytes, monkeypatch):
    bomb = Compressor(codec).compress(np.zeros(10**6, np.uint8))
    monkeypatch.setattr(payload, "LARGEST_BYTES", 1000)
    with pytest.raises(DataLossError, match="limit 1000"):
        Compressor(codec).decompress(bomb, nbytes)
    with pytest.raises(DataLossError, match="damaged"):
        Compressor(codec).decompress(bomb, 1000)


@needs_codecs
def test_threads():
    compressor = Compressor("LZ4")
    wrong = []

    def use(seed):
        buffer = np.random.default_rng(seed).integers(0, 9, 50_000)
        for _ in range(20):
            result = compressor.decompress(compressor.compress(buffer), buffer.nbytes)
            if not np.array_equal(result.view(np.int64), buffer):
                wrong.append(seed)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# Names


@pytest.mark.parametrize("name", ["GZIP", "snappy", "", 3])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"'AUTO', None, 'SNAPPY', 'LZ4', 'ZSTD', not"):
        check_compression(name)
    with pytest.raises(ValueError, match="unknown codec"):
        Compressor(name)


def test_names_that_need_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cramjam", None)
    check_compression("AUTO")
    check_compression(None)
    assert not compression_pays(1e8, [IDS])


@pytest.mark.parametrize("codec", CODECS)
def test_a_missing_package(codec, monkeypatch):
    monkeypatch.setitem(sys.modules, "cramjam", None)
    message = rf"{codec}' needs the package cramjam .*pip install \"mpidist\[compress\]\""
    for use in (check_compression, Compressor):
        with pytest.raises(FailedPreconditionError, match=message):
            use(codec)


@needs_codecs
@pytest.mark.parametrize("codec", CODECS)
def test_names_of_codecs(codec):
    check_compression(codec)


# The choice


class Line:
    """An endpoint that notes its probes."""

    def __init__(self, protocol="tcp"):
        self.address = SimpleNamespace(protocol=protocol, host="here")
        self.calls = []

    def call(self, *_args, timeout):
        self.calls.append(Work("probe"))
        return self.calls[-1]


@pytest.mark.parametrize("name", [None, *CODECS])
@pytest.mark.parametrize("protocol", ["tcp", "mpi", "inproc"])
def test_who_names_a_codec_gets_it(name, protocol):
    line = Line(protocol)
    choice = CodecChoice(name, line)
    choice.learn(f"{protocol}://there:1", [IDS])
    assert choice.of(f"{protocol}://there:1") == (name or "")
    assert not line.calls


@pytest.mark.parametrize(
    ("protocol", "worker"),
    [("mpi", "mpi://there:1"), ("inproc", "inproc://there:1"), ("tcp", "tcp://here:1")],
)
def test_auto_measures_only_connections_to_other_hosts(protocol, worker):
    line = Line(protocol)
    choice = CodecChoice("AUTO", line)
    for _ in range(2):
        choice.learn(worker, [IDS])
    assert choice.of(worker) == ""
    assert not line.calls


@needs_codecs
@pytest.mark.parametrize(
    ("bytes_per_s", "first", "expected"),
    [
        (0.1e9, [IDS], True),
        (0.499e9, [IDS, NOISE[:1000]], True),
        (0.5e9, [IDS], False),
        (0.1e9, [NOISE], False),
        (0.1e9, [NOISE, np.zeros(90_000, np.uint8)], False),  # a ratio of 1.2
        (0.1e9, [NOISE, np.zeros(200_000, np.uint8)], True),  # of 1.5
        (0.1e9, [], False),
        (0.1e9, [np.zeros(0)], False),
        (0.1e9, [NOISE, NOISE, NOISE, np.zeros(10**7)], False),  # after the first MiB
    ],
)
def test_auto(bytes_per_s, first, expected):
    assert compression_pays(bytes_per_s, first) == expected


@needs_codecs
@pytest.mark.parametrize(("seconds", "expected"), [(0.001, ""), (0.1, "LZ4")])
def test_the_pace_of_a_pipeline_is_not_that_of_the_link(monkeypatch, seconds, expected):
    clock, line = [0.0], Line()
    monkeypatch.setattr(payload, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    choice = CodecChoice("AUTO", line)
    choice.learn("tcp://there:1", [IDS])
    choice.learn("tcp://there:1", [IDS])
    assert choice.of("tcp://there:1") == ""  # not known yet
    clock[0] = seconds
    line.calls[0].complete()
    clock[0] = 60.0  # when the next element comes
    choice.learn("tcp://there:1", [IDS])
    assert (PROBE_BYTES / seconds < 0.5e9) == bool(expected)
    assert choice.of("tcp://there:1") == expected

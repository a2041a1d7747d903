"""Kernels for rows and halves, compiled for the host."""

import ctypes
import itertools
import os
import site
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpidist.gpu import kernel
from strategy.server import gpu

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
DTYPES = [*HALVES, SINGLE, DOUBLE]
SIZE = 1000


def random(seed, size, dtype):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def bits_of(dtype):
    return dtype if dtype in (SINGLE, DOUBLE) else np.dtype(np.uint16)


class Device:
    """A device: what is there is kept until a kernel has ended."""

    def __init__(self, xp):
        self.xp, self.kept = xp, []

    def put(self, array):
        there = self.xp.asarray(np.ascontiguousarray(array).view(bits_of(array.dtype)))
        self.kept.append((there, array.dtype))
        return there

    def get(self, there):
        (dtype,) = (dtype for one, dtype in self.kept if one is there)
        return self.xp.asnumpy(there).view(dtype)

    def run(self, text, size, *given):
        work = kernel(text, gpu.NAME)
        work.compile(0)
        work(size, *(one.data.ptr if isinstance(one, self.xp.ndarray) else one for one in given))
        self.xp.cuda.get_current_stream().synchronize()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_halves_become_wide_and_come_back(compiling_xp, dtype):
    device = Device(compiling_xp)
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide, back = device.put(np.zeros(1 << 16, SINGLE)), device.put(np.zeros(1 << 16, dtype))
    there = device.put(halves)
    device.run(gpu.convert_text(dtype, SINGLE), 1 << 16, there, wide)
    device.run(gpu.convert_text(SINGLE, dtype), 1 << 16, wide, back)
    np.testing.assert_array_equal(device.get(wide), halves.astype(SINGLE))
    np.testing.assert_array_equal(device.get(back).astype(SINGLE), halves.astype(SINGLE))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_are_rounded_to_halves_as_numpy_rounds_them(compiling_xp, dtype):
    device, rng = Device(compiling_xp), np.random.default_rng(0)
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(SINGLE)
    halves = halves[np.isfinite(halves)]
    with np.errstate(over="ignore"):
        between = (halves[1:] + halves[:-1]) / SINGLE.type(2)  # exactly in the middle
        near = [np.nextafter(between, SINGLE.type(sign)) for sign in (np.inf, -np.inf)]
    random_bits = rng.integers(0, 1 << 32, 100_000, np.uint32).view(SINGLE)
    numbers = np.concatenate([between, *near, random_bits])
    numbers = numbers[~(abs(numbers) < np.finfo(SINGLE).tiny)]  # which count as zero
    there, back = device.put(numbers), device.put(np.zeros(len(numbers), dtype))
    device.run(gpu.convert_text(SINGLE, dtype), len(numbers), there, back)
    with np.errstate(all="ignore"):
        expected = numbers.astype(dtype).astype(SINGLE)
    np.testing.assert_array_equal(device.get(back).astype(SINGLE), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_taken_and_put(compiling_xp, dtype):
    device, width = Device(compiling_xp), 5
    table, ids = random(3, (40, width), dtype), np.array([39, 2, 7])
    there, taken = device.put(table), device.put(np.zeros((3, width), dtype))
    places, rows = device.put(ids), random(4, (3, width), dtype)
    device.run(gpu.rows_text(dtype.itemsize, put=False), 15, width, places, there, taken)
    np.testing.assert_array_equal(device.get(taken), table[ids])
    given = device.put(rows)
    device.run(gpu.rows_text(dtype.itemsize, put=True), 15, width, places, there, given)
    table[ids] = rows
    np.testing.assert_array_equal(device.get(there), table)


def test_a_text_that_is_wrong_is_told(compiling_xp):
    from mpidist import errors

    with pytest.raises(errors.FailedPreconditionError, match=r"(?s)GPU 0 .* NVRTC"):
        kernel('extern "C" __global__ void work(long long size) { nonsense }', "work").compile(0)


def texts():
    """All texts that servers can ask for."""
    for half in HALVES:
        yield gpu.convert_text(half, SINGLE)
        yield gpu.convert_text(SINGLE, half)
    for itemsize, put in itertools.product((2, 4, 8), (False, True)):
        yield gpu.rows_text(itemsize, put)


def nvrtc():
    """CUDA's compiler, of the system's libraries or a package of NVIDIA's."""
    names = [f"libnvrtc.so{end}" for end in (".13", ".12", ".11.2", "")]
    for folder in (*site.getsitepackages(), *filter(None, [os.environ.get("CUDA_PATH")])):
        names += [str(path) for path in sorted(Path(folder).glob("**/lib*/libnvrtc.so*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return pytest.skip("CUDA's compiler, libnvrtc, is not found: LD_LIBRARY_PATH can name it")


def test_the_compiler_of_cuda_takes_all_texts():
    library = nvrtc()
    options = [b"--fmad=false", b"-ftz=true", b"--std=c++17", b"-arch=compute_80"]
    options += [b"--device-as-default-execution-space"]  # CuPy adds all but the first
    flags = (ctypes.c_char_p * len(options))(*options)
    count = 0
    for text in texts():
        program = ctypes.c_void_p()
        made = library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
        )
        assert made == 0
        status = library.nvrtcCompileProgram(program, len(options), flags)
        if status:
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            pytest.fail(f"{log.value.decode()}\n{text}")
        size = ctypes.c_size_t()
        assert library.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
        code = ctypes.create_string_buffer(size.value)
        assert library.nvrtcGetPTX(program, code) == 0
        assert b"fma." not in code.value
        assert b".approx" not in code.value
        library.nvrtcDestroyProgram(ctypes.byref(program))
        count += 1
    assert count == 4 + 4 + 6

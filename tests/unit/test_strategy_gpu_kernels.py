"""The text of the kernels: compiled, it takes the steps of NumPy's rules."""

import ctypes
import itertools
import os
import site
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mpidist.gpu import kernel
from strategy import optimizers
from strategy.shared import gpu_kernels
from strategy.shared.kernels import Piece
from strategy.shared.rules import RULES

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
DTYPES = [*HALVES, SINGLE, DOUBLE]
SIZE = 1000

OPTIMIZERS = [
    optimizers.SGD(0.3),
    optimizers.SGD(0.3, weight_decay=0.1),
    optimizers.SGD(0.1, momentum=0.9),
    optimizers.SGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    optimizers.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-3, weight_decay=0.1),
    optimizers.RMSprop(0.01),
    optimizers.RMSprop(0.01, rho=0.5, momentum=0.9, weight_decay=0.1),
    optimizers.RMSprop(0.01, centered=True),
    optimizers.RMSprop(0.01, rho=0.8, momentum=0.5, centered=True),
    optimizers.Adam(0.01, beta_2=0.5, epsilon=0.1, weight_decay=0.1),
    optimizers.AdamW(0.01, weight_decay=0.1),
    optimizers.AdamW(0.01, weight_decay=0.0),
    optimizers.Ftrl(0.1),
    optimizers.Ftrl(0.1, l1=0.1, l2=0.2, l2_shrinkage=0.01, beta=0.5),
]
CASES = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)


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
        work = kernel(text, gpu_kernels.NAME)
        work.compile(0)
        work(size, *(one.data.ptr if isinstance(one, self.xp.ndarray) else one for one in given))
        self.xp.cuda.get_current_stream().synchronize()


def steps_of_numpy(rule, values, param, slots, grads):
    for step, grad in enumerate(grads, 1):
        scratch = [np.empty_like(param) for _ in range(rule.scratch)]
        with np.errstate(all="ignore"):
            rule.update(Piece(param, grad, slots, scratch, values, step))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@CASES
def test_whole_variables(compiling_xp, optimizer, dtype):
    kind, values = type(optimizer).__name__, optimizer.values
    rule, wide, device = RULES[kind](values), gpu_kernels.wide_dtype(dtype), Device(compiling_xp)
    first = random(1, SIZE, dtype)
    first[:3] = np.inf, -np.inf, np.nan
    grads = [random(10 + step, SIZE, dtype) for step in range(6)]
    grads[2][3:6] = np.inf, -np.inf, np.nan
    param = first.astype(wide)
    slots = [np.full(SIZE, rule.initial.get(name, 0.0), wide) for name in rule.slots]

    there = device.put(param)
    kept = [device.put(slot) for slot in slots]
    half = [device.put(first)] if dtype in HALVES else []
    for step, grad in enumerate(grads, 1):
        of_mean = dtype in HALVES and step % 2 == 0  # which is wide
        given = device.put(grad.astype(wide) if of_mean else grad)
        text = gpu_kernels.update_text(
            kind, rule.slots, dtype, wide if of_mean else dtype, rows=False
        )
        numbers = gpu_kernels.numbers(kind, values, step, wide)
        device.run(text, SIZE, there, given, *kept, *half, *numbers)

    steps_of_numpy(rule, values, param, slots, [grad.astype(wide) for grad in grads])
    np.testing.assert_array_equal(device.get(there), param)
    for own, slot in zip(kept, slots, strict=True):
        np.testing.assert_array_equal(device.get(own), slot)
    for own in half:
        expected = param.astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(device.get(own).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workers", [1, 3])
@CASES
def test_rows(compiling_xp, optimizer, dtype, workers):
    """Sums of what is given for a row are taken in the order in which it is given."""
    kind, values, width, rows = type(optimizer).__name__, optimizer.values, 7, 30
    rule, wide, device = RULES[kind](values), gpu_kernels.wide_dtype(dtype), Device(compiling_xp)
    first = random(1, (rows, width), dtype)
    param = first.astype(wide)
    tables = [param, *(np.full((rows, width), rule.initial.get(s, 0.0), wide) for s in rule.slots)]
    ids = np.array([4, 29, 0, 17])
    starts = np.array([0, 1, 3, 6, 7]) if workers > 1 else np.arange(5)
    grad = random(2, (starts[-1], width), dtype)

    there, *kept = [device.put(table) for table in tables]
    half = [device.put(first)] if dtype in HALVES else []
    changed = device.put(np.zeros((len(ids), width), dtype))
    text = gpu_kernels.update_text(kind, rule.slots, dtype, dtype, rows=True)
    numbers = gpu_kernels.numbers(kind, values, 1, wide)
    places = device.put(ids), device.put(starts), wide.type(workers)
    size = len(ids) * width
    device.run(text, size, width, *places, there, device.put(grad), *kept, *half, changed, *numbers)

    sums = np.empty((len(ids), width), wide)
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        sums[number] = grad[begin].astype(wide)
        for further in grad[begin + 1 : end]:
            sums[number] += further.astype(wide)
    sums /= wide.type(workers)
    taken = [table[ids].reshape(-1) for table in tables]
    steps_of_numpy(rule, values, taken[0], taken[1:], [sums.reshape(-1)])
    for table, part in zip(tables, taken, strict=True):
        table[ids] = part.reshape(-1, width)
    for own, table in zip((there, *kept), tables, strict=True):
        np.testing.assert_array_equal(device.get(own), table)
    np.testing.assert_array_equal(device.get(changed), param[ids].astype(dtype))
    for own in half:
        expected = first.copy()
        expected[ids] = param[ids].astype(dtype)
        np.testing.assert_array_equal(device.get(own), expected)


def test_a_learning_rate_of_zero_is_no_step_of_ftrl():
    values = optimizers.Ftrl(0.1).values | {"learning_rate": 0.0}
    assert gpu_kernels.numbers("Ftrl", values, 1, SINGLE) is None
    assert gpu_kernels.numbers("Adam", optimizers.Adam(0.1).values, 1, SINGLE) is not None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_all_halves_become_wide_and_come_back(compiling_xp, dtype):
    device = Device(compiling_xp)
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide, back = device.put(np.zeros(1 << 16, SINGLE)), device.put(np.zeros(1 << 16, dtype))
    there = device.put(halves)
    device.run(gpu_kernels.convert_text(dtype, SINGLE), 1 << 16, there, wide)
    device.run(gpu_kernels.convert_text(SINGLE, dtype), 1 << 16, wide, back)
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
    device.run(gpu_kernels.convert_text(SINGLE, dtype), len(numbers), there, back)
    with np.errstate(all="ignore"):
        expected = numbers.astype(dtype).astype(SINGLE)
    np.testing.assert_array_equal(device.get(back).astype(SINGLE), expected)


def test_numbers_of_single_precision_that_are_too_small_count_as_zero(compiling_xp):
    device, rule = Device(compiling_xp), RULES["SGD"](optimizers.SGD(0.5).values)
    for dtype in (SINGLE, DOUBLE):
        tiny = np.finfo(dtype).tiny / 4
        there, grad = device.put(np.zeros(1, dtype)), device.put(np.full(1, tiny, dtype))
        numbers = gpu_kernels.numbers("SGD", optimizers.SGD(0.5).values, 1, dtype)
        text = gpu_kernels.update_text("SGD", rule.slots, dtype, dtype, rows=False)
        device.run(text, 1, there, grad, *numbers)
        assert device.get(there)[0] == (0 if dtype == SINGLE else -tiny / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_taken_put_and_added_up(compiling_xp, dtype):
    device, width = Device(compiling_xp), 5
    table, ids = random(3, (40, width), dtype), np.array([39, 2, 7])
    there, taken = device.put(table), device.put(np.zeros((3, width), dtype))
    places, rows = device.put(ids), random(4, (3, width), dtype)
    device.run(gpu_kernels.rows_text(dtype.itemsize, put=False), 15, width, places, there, taken)
    np.testing.assert_array_equal(device.get(taken), table[ids])
    given = device.put(rows)
    device.run(gpu_kernels.rows_text(dtype.itemsize, put=True), 15, width, places, there, given)
    table[ids] = rows
    np.testing.assert_array_equal(device.get(there), table)
    wide = gpu_kernels.wide_dtype(dtype)
    sums, starts = device.put(np.zeros((2, width), wide)), device.put(np.array([0, 2, 3]))
    device.run(gpu_kernels.merge_text(dtype), 10, width, places, starts, wide.type(2), given, sums)
    expected = np.stack([rows[0].astype(wide) + rows[1].astype(wide), rows[2].astype(wide)])
    np.testing.assert_array_equal(device.get(sums), expected / wide.type(2))


def test_a_text_that_is_wrong_is_told(compiling_xp):
    from mpidist import errors

    with pytest.raises(errors.FailedPreconditionError, match=r"(?s)GPU 0 .* NVRTC"):
        kernel('extern "C" __global__ void work(long long size) { nonsense }', "work").compile(0)


def texts():
    """All texts that servers can ask for."""
    rules = {(type(o).__name__, RULES[type(o).__name__](o.values).slots) for o in OPTIMIZERS}
    for (kind, slots), dtype in itertools.product(sorted(rules), DTYPES):
        for grad in {dtype, gpu_kernels.wide_dtype(dtype)}:
            yield gpu_kernels.update_text(kind, slots, dtype, grad, rows=False)
            yield gpu_kernels.update_text(kind, slots, dtype, grad, rows=True)
    for dtype in DTYPES:
        yield gpu_kernels.merge_text(dtype)
    for half in HALVES:
        yield gpu_kernels.convert_text(half, SINGLE)
        yield gpu_kernels.convert_text(SINGLE, half)
    for itemsize, put in itertools.product((2, 4, 8), (False, True)):
        yield gpu_kernels.rows_text(itemsize, put)


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
    assert count > 100

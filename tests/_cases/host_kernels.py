"""Kernels of CUDA as functions of the host: compiled from the same text by the C++ compiler."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile


class CompileException(Exception):
    """A kernel cannot be compiled."""


def compiler():
    """The C++ compiler of this machine, or None."""
    return shutil.which("c++") or shutil.which("g++")


# What CUDA's compiler knows by itself. CuPy has numbers of single precision that are too small for
# all their digits taken for zero.
_BEFORE = """
#include <math.h>
#include <cstddef>
#include <utility>
#include <xmmintrin.h>
#include <pmmintrin.h>
#define __global__
#define __device__
struct Place { unsigned x, y, z; };
static thread_local Place blockIdx, threadIdx, blockDim, gridDim;
"""
_AFTER = """
template <class... Given, std::size_t... Numbers>
static void call(void (*run)(Given...), void** given, std::index_sequence<Numbers...>) {
    run(*static_cast<Given*>(given[Numbers])...);
}
template <class... Given>
static void call_with(void (*run)(Given...), void** given) {
    call(run, given, std::index_sequence_for<Given...>());
}
extern "C" void launch(long long grid, long long block, void** given) {
    const unsigned before = _mm_getcsr();
    if (FLUSH) {
        _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
        _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
    }
    blockDim.x = block;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) call_with(NAME, given);
    _mm_setcsr(before);
}
"""


def compiled(code, name, options):
    """The launcher of a kernel, compiled once for all processes."""
    flush = int("double" not in code)
    text = f"{_BEFORE}\n{code}\n#define NAME {name}\n#define FLUSH {flush}\n{_AFTER}"
    exact = ["-ffp-contract=off"] if "--fmad=false" in options else ["-ffp-contract=fast"]
    key = hashlib.sha256(repr((text, exact)).encode()).hexdigest()
    folder = os.path.join(tempfile.gettempdir(), f"stand-in-cupy-{os.getuid()}")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{key}.so")
    if not os.path.exists(path):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            source, made = os.path.join(place, "kernel.cpp"), os.path.join(place, "kernel.so")
            with open(source, "w") as file:
                file.write(text)
            command = [compiler(), "-std=c++17", "-O2", "-shared", "-fPIC", *exact, source]
            done = subprocess.run(
                [*command, "-o", made], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise CompileException(done.stderr)
            os.replace(made, path)
    return ctypes.CDLL(path).launch

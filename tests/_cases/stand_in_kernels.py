"""CuPy's ElementwiseKernel for the stand-in: assignments with the same text in C++ and Python."""

import numpy as np


def kernel(queue, host_of):
    """Return the class ElementwiseKernel.

    Args:
        queue: Function that returns the current queue.
        host_of: Function that returns the host memory of an array.
    """

    class ElementwiseKernel:
        """A kernel that assigns an expression of the inputs to one output."""

        def __init__(self, in_params, out_params, operation, name="kernel", preamble=""):
            self._inputs = [one.split()[-1] for one in in_params.split(",")]
            output, _, self._value = operation.partition(" = ")
            assert output == out_params.split()[-1], operation
            self.name = name

        def __call__(self, *arrays):
            *parts, out = map(host_of, arrays)
            assert {one.shape for one in parts} == {out.shape}, "arrays of other shapes"
            values = dict(zip(self._inputs, parts, strict=True))

            def compute():
                with np.errstate(all="ignore"):
                    result = eval(self._value, {"__builtins__": {}} | _FUNCTIONS, values)
                    np.copyto(out, result, casting="unsafe")

            queue().add(compute)

    return ElementwiseKernel


def _wide(bits):
    """Convert the bits of bfloat16 to float32."""
    return (bits.astype("u4") << 16).view("f4")


def _narrow(values):
    """Round to the nearest bfloat16, ties to even, and return the bits."""
    bits = np.asarray(values, "f4").view("u4")
    rounded = ((bits.astype("u8") + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("u2")
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype("u2"), rounded)


_FUNCTIONS = {
    "float": lambda values: values.astype("f4"),
    "min": np.fmin,
    "max": np.fmax,
    "of_bfloat16": _wide,
    "to_bfloat16": _narrow,
}

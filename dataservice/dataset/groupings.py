"""What puts several elements of a dataset together, and takes them apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from dataservice.dataset.batch import Batch
from dataservice.dataset.bucket import Bucket
from dataservice.dataset.checks import check_callable, whole, whole_or_none, wholes
from dataservice.dataset.described import Described
from dataservice.dataset.group_by_window import GroupByWindow
from dataservice.dataset.made_nodes import node_of
from dataservice.dataset.padded_batch import PaddedBatch, Padding
from dataservice.dataset.rebatch import Rebatch
from dataservice.dataset.unbatch import Unbatch
from dataservice.dataset.window import Window


class Groupings(Described):
    """The transformations that group elements."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Local. Consecutive elements stacked into arrays of shape (batch_size, ...).

        Under ``"distributed_epoch"`` batches are those of one process, unless an element cannot be
        made: it fails its batch, and the next one begins where it would have begun. Behind what
        drops, reorders, flattens or repeats elements they are each worker's own, and each one's
        last may be smaller. Text that ends with NUL, which NumPy's own would lose, makes a batch an
        array of objects.

        Args:
            batch_size: Elements in a batch.
            drop_remainder: Whether to leave out a smaller last batch.
            num_parallel_calls: Taken, and without effect: one batch is made after the other.
            deterministic: Taken, and without effect: the order is always kept.

        Raises:
            TypeError: The batch size or ``num_parallel_calls`` is no whole number.
            ValueError: The batch size is below 1. During a pass (as InvalidArgumentError):
                elements differ in structure, shape or dtype.
        """
        size = whole("batch", "batch_size", batch_size)
        whole_or_none("batch", "num_parallel_calls", num_parallel_calls)
        return self.of(Batch(self._node, size, drop_remainder))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Local. Consecutive elements of different lengths stacked, filled up to the longest.

        Args:
            batch_size: Elements in a batch.
            padded_shapes: A shape, or one for each array in the structure of elements, to fill up
                to; None or -1 in it means as long as the longest of the batch, and so does None. A
                number is a shape of one dimension; an object with ``as_list()`` is taken for that.
            padding_values: A scalar to fill up with, likewise; None: 0, False or empty text.
            drop_remainder: Whether to leave out a smaller last batch.

        Raises:
            TypeError: The batch size or a length is no whole number.
            ValueError: The batch size is below 1, or a value is no scalar. During a pass (as
                InvalidArgumentError): elements differ in structure, dtype or dimensions, or are
                longer than their shape.
        """
        size = whole("padded_batch", "batch_size", batch_size)
        padding = Padding(padded_shapes, padding_values)
        return self.of(PaddedBatch(self._node, size, padding, drop_remainder))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        drop_remainder: bool = False,
    ) -> Self:
        """Local. Batches of elements of similar length, filled up to the longest.

        Args:
            element_length_func: Says how long an element is.
            bucket_boundaries: Ascending; bucket i takes lengths below boundary i.
            bucket_batch_sizes: Elements in a batch of each bucket; one more than boundaries.
            padded_shapes: See :meth:`padded_batch`.
            padding_values: See :meth:`padded_batch`.
            pad_to_bucket_boundary: Fill up to one below the boundary in place of the longest.
            drop_remainder: Whether to leave out what does not fill a bucket.

        Raises:
            TypeError: What says the length is no function, or a number no whole one.
            ValueError: Boundaries do not ascend, or the sizes do not belong to them.
        """
        name = "bucket_by_sequence_length"
        length = check_callable(name, "element_length_func", element_length_func)
        boundaries = wholes(name, "bucket_boundaries", bucket_boundaries)
        sizes = wholes(name, "bucket_batch_sizes", bucket_batch_sizes)
        padding, to_boundary = Padding(padded_shapes, padding_values), pad_to_bucket_boundary
        return self.of(
            Bucket(self._node, length, boundaries, sizes, padding, to_boundary, drop_remainder)
        )

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Self], Described],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Local. What a function makes of elements with equal keys, so many of them at a time.

        Under ``"distributed_epoch"`` each worker groups the elements that it has.

        Args:
            key_func: Gives the key of an element, a whole number.
            reduce_func: Gets a key, as np.int64, and a dataset of elements that have it, and gives
                a dataset; it must give the same when it is called again. At the end it gets what is
                left of each key, in the order of the keys.
            window_size: How many elements it gets.
            window_size_func: Says so of a key; it is called once for each key of a pass. Give this
                or ``window_size``.

        Raises:
            TypeError: Something is no function, or the size no whole number. During a pass:
                ``reduce_func`` gives no dataset.
            ValueError: The size is below 1, or both or none are given. During a pass (as
                InvalidArgumentError): a key or the size of one is no whole number, or a size is
                below 1.
        """
        name = "group_by_window"
        key = check_callable(name, "key_func", key_func)
        reduce = node_of(name, "reduce_func", reduce_func)
        if (window_size is None) == (window_size_func is None):
            raise ValueError("group_by_window needs either window_size or window_size_func")
        size = (
            check_callable(name, "window_size_func", window_size_func)
            if window_size is None
            else whole(name, "window_size", window_size)
        )
        return self.of(GroupByWindow(self._node, key, reduce, size, self.of))

    def unbatch(self) -> Self:
        """Local. The rows of each element's arrays as elements.

        Raises:
            ValueError: During a pass (as InvalidArgumentError): arrays of an element have no rows,
                or not equally many.
        """
        return self.of(Unbatch(self._node))

    def rebatch(self, batch_size: int, drop_remainder: bool = False) -> Self:
        """Local. The rows of each element's arrays in batches of another size.

        They are those of ``unbatch().batch(batch_size, drop_remainder)``, and come faster. Under
        ``"distributed_epoch"`` each worker cuts the elements that it has.

        Args:
            batch_size: Rows in a batch.
            drop_remainder: Whether to leave out a smaller last batch.

        Raises:
            TypeError: The batch size is no whole number.
            ValueError: The batch size is below 1. During a pass (as InvalidArgumentError): arrays
                of an element have no rows, or not equally many, or rows of a batch differ in
                structure, shape or dtype.
        """
        size = whole("rebatch", "batch_size", batch_size)
        return self.of(Rebatch(self._node, size, drop_remainder))

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Self:
        """Local. Stretches of the sequence, each as a dataset; of a dict or tuple, one of datasets.

        Args:
            size: Elements of a window.
            shift: Elements from the beginning of a window to that of the next; by default the size.
            stride: Elements from one of a window to its next.
            drop_remainder: Whether to leave out windows that the end cuts short.

        Raises:
            TypeError: A number is no whole one.
            ValueError: A number is below 1.
        """
        size = whole("window", "size", size)
        shift = size if shift is None else whole("window", "shift", shift)
        stride = whole("window", "stride", stride)
        return self.of(Window(self._node, size, shift, stride, drop_remainder, self.of))

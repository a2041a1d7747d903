"""What a dataset can be made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from dataservice.dataset import checks, tree
from dataservice.dataset.checks import whole, whole_or_none
from dataservice.dataset.counter import Counter
from dataservice.dataset.described import Described
from dataservice.dataset.files import Files
from dataservice.dataset.generator import Generator, Indexed
from dataservice.dataset.promised import Promised
from dataservice.dataset.random import Random
from dataservice.dataset.range import Range
from dataservice.dataset.spec import spec_from
from dataservice.dataset.tensor_slices import Tensors, TensorSlices, as_only_row


class Sources(Described):
    """The class methods that make a dataset of what is none."""

    @classmethod
    def range(cls, *args: int) -> Self:
        """Local. Whole numbers, as np.int64.

        Args:
            *args: As for Python's range: ``stop``, or ``start, stop``, or ``start, stop, step``.

        Raises:
            TypeError: An argument is no whole number, or there are none or more than three.
            ValueError: The step is 0, or there are numbers of more than 64 bits.
        """
        numbers = range(*args)
        return cls.of(Range(numbers.start, numbers.stop, numbers.step))

    @classmethod
    def counter(cls, start: int = 0, step: int = 1) -> Self:
        """Local. Whole numbers without an end, as np.int64; of a service, one worker counts.

        Args:
            start: The first.
            step: From each to the next.

        Raises:
            TypeError: An argument is no whole number.
        """
        return cls.of(Counter(whole("counter", "start", start), whole("counter", "step", step)))

    @classmethod
    def random(
        cls, seed: int | None = None, rerandomize_each_iteration: bool | None = None
    ) -> Self:
        """Local. Random whole numbers in [0, 2 ** 32) without an end, as np.int64.

        Of a service, one worker makes them.

        Args:
            seed: Makes the numbers the same in every run.
            rerandomize_each_iteration: Whether each pass has other ones; None: it has the same.

        Raises:
            TypeError: The seed is no whole number.
            ValueError: The seed is negative.
        """
        seed = whole_or_none("random", "seed", seed)
        return cls.of(Random.of(seed, bool(rerandomize_each_iteration)))

    @classmethod
    def from_tensors(cls, tensors: Any) -> Self:
        """Local. Arrays as they are, as the only element.

        Args:
            tensors: Array-likes, or mappings and tuples of them, nested; held by reference where
                they are arrays.

        Returns:
            A dataset of one element; its arrays are read-only views.

        Raises:
            ValueError: There is no array.
        """
        return cls.of(Tensors.of(tree.map_leaves(as_only_row, tree.with_dicts(tensors))))

    @classmethod
    def from_tensor_slices(cls, tensors: Any) -> Self:
        """Local. The rows of arrays.

        Args:
            tensors: Array-likes of shape (rows, ...), or mappings and tuples of them, nested; held
                by reference where they are arrays. A row that is an object becomes what NumPy makes
                of it.

        Returns:
            A dataset of ``rows`` elements; their arrays are read-only views of shape (...).

        Raises:
            ValueError: There is no array, one has no rows, or their numbers of rows differ.
        """
        return cls.of(TensorSlices.of(tensors))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Any]],
        args: Sequence[Any] = (),
        output_signature: Any = None,
    ) -> Self:
        """Local. What a function's iterables give; it is called for each pass.

        Args:
            generator: For instance a generator function. Where its iterators have ``get_state`` and
                ``set_state``, or ``state_dict`` and ``load_state_dict``, the state of a pass has
                theirs; others are read again up to where they were. An array that has been given
                must not be changed: it may be used later.
            args: Its arguments.
            output_signature: What elements are like, for :attr:`element_spec`: their structure with
                an ArraySpec, or anything else with a shape and a dtype, for each array. Numbers of
                another dtype are converted, if those with fractions keep them; others may be
                rounded.

        Raises:
            TypeError: It is no function, these are not several, or the signature is none.
            ValueError: During a pass (as InvalidArgumentError): an element is None, or not what the
                signature says.
        """
        checks.check_callable("from_generator", "generator", generator)
        if not isinstance(args, Iterable):
            raise TypeError(f"from_generator needs a tuple of arguments as args, not {args!r}")
        node = Generator(generator, tuple(args))
        if output_signature is None:
            return cls.of(node)
        return cls.of(Promised(node, spec_from(output_signature), converts=True))

    @classmethod
    def from_source(cls, source: Any) -> Self:
        """Local. The elements of a list, of torch's and Grain's datasets, of any iterable.

        Args:
            source: With ``__len__`` and ``__getitem__``, elements are taken by index, and workers
                can share them; otherwise with ``__iter__``, which is called for each pass.

        Raises:
            TypeError: It has neither.
        """
        if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
            return cls.of(Indexed(source))
        if not isinstance(source, Iterable):
            raise TypeError(
                "from_source needs a source with indices or an iterator, and "
                f"{type(source).__name__} has neither: {source!r}"
            )
        return cls.of(Generator(_Iterated(source)))

    @classmethod
    def from_files(cls, files: Any, format: str | None = None) -> Self:
        """Local. What files hold, one after the other: lines, JSON values, or rows of arrays.

        Args:
            files: A path or pattern (``"part-*.npz"``), or several.
            format: ``"text"``: lines; ``"json"``: a JSON value a line; ``"npy"``: rows of the
                array; ``"npz"``: dicts of rows. By default what the names end with says.

        Raises:
            NotFoundError: There is no such file.
            TypeError: Something is no path.
            ValueError: The format is unknown.
        """
        return cls.of(Files.of(files, format))

    @classmethod
    def load(cls, path: str | os.PathLike[str], wait: bool = False) -> Self:
        """Local. The elements of a snapshot, as :meth:`save` or ``distributed_save`` wrote them.

        Shards are read chunk by chunk in turn; one shard keeps its order. Workers of a data
        service can share the chunks, if they see the same folder.

        Args:
            path: Its folder, from somebody who is trusted: its elements are unpickled.
            wait: Whether to read it while it is being saved, and to wait for that to begin. Whoever
                waits 15 seconds for more (MPIDIST_STALL_S if shorter) logs a warning.

        Raises:
            DataLossError: It is damaged. Like the other errors, also during a pass.
            FailedPreconditionError: It is not complete, and ``wait`` is False.
            NotFoundError: There is none, and ``wait`` is False.
            OpError: The save has failed: what it has raised, or an UnknownError that tells of that.
        """
        from dataservice.dataset.load import Load  # itself above this package

        return cls.of(Load.of(checks.path("load", "path", path), wait))


class _Iterated:
    """An iterable as a function that makes iterators; it can be pickled if the iterable can."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self.__qualname__ = type(source).__qualname__

    def __call__(self) -> Iterable[Any]:
        return iter(self._source)

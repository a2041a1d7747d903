"""The public class :class:`Dataset` and its iterator."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dataservice.dataset import tree
from dataservice.dataset.arguments import (
    check_callable,
    check_numbers,
    check_path,
    only_one,
    whole,
    whole_or_none,
    wholes,
)
from dataservice.dataset.base import Context, Count, ElementIterator, Epochs, Node
from dataservice.dataset.batching import Batch, Bucket, PaddedBatch, Padding, Rebatch, Unbatch
from dataservice.dataset.cache import Cache
from dataservice.dataset.combining import Concatenate, Zip, check_alike
from dataservice.dataset.execution import AHEAD, AUTOTUNE, CYCLE_LENGTH, ParallelMap, Prefetch
from dataservice.dataset.fingerprint import fingerprint, identity
from dataservice.dataset.flattening import GroupByWindow, Interleave
from dataservice.dataset.gpu import PrefetchToDevice, device_number
from dataservice.dataset.indexed import (
    CheckedSpec,
    Counter,
    Enumerate,
    Map,
    Random,
    Range,
    Repeat,
    Shard,
    Skip,
    Take,
    Tensors,
    TensorSlices,
    as_only_row,
)
from dataservice.dataset.mixing import Choose, Sample
from dataservice.dataset.options import Options, with_options_applied
from dataservice.dataset.readers import Files, Generator, Indexed, Load, matching_files
from dataservice.dataset.sequential import (
    Filter,
    IgnoreErrors,
    RejectionResample,
    Scan,
    TakeWhile,
    Unique,
)
from dataservice.dataset.shuffling import Shuffle
from dataservice.dataset.spec import ArraySpec, Spec, spec_from
from dataservice.dataset.windows import Window
from mpidist.errors import DataLossError, InvalidArgumentError

_STATE_FORMAT = 6
_STATE_KEY = "dataset_iterator"
_CHECKPOINT_ARGS = ("checkpoint_interval", "directory", "max_to_keep", "step_counter")


class Dataset:
    """An immutable description of a sequence of elements.

    An element is a NumPy scalar or array, or a dict or tuple of them, nested. Each ``for`` loop is
    a new iteration over the dataset. The iterations of one Dataset object are numbered, and
    ``shuffle`` with a seed depends on the number: epochs differ, and a rerun of the script repeats
    them.

    Create datasets by the static methods. Transformations return a new dataset. Methods accept
    ``name=``, as in tf.data, and ignore it.

    Args:
        node: The description of the sequence.
        options: Its options; see :meth:`with_options`.

    Example:
        >>> from dataservice import Dataset
        >>> dataset = Dataset.range(6).map(lambda x: x * x).batch(3)
        >>> [batch.tolist() for batch in dataset]
        [[0, 1, 4], [9, 16, 25]]
    """

    def __init__(self, node: Node, options: Options | None = None) -> None:
        self._node = node
        self._options = Options() if options is None else options
        self._epochs = Epochs()

    # Sources

    @staticmethod
    def range(*args: int, output_type: DTypeLike = np.int64, name: str | None = None) -> Dataset:
        """Return a dataset of whole numbers.

        Args:
            *args: As for Python's range: ``stop``, or ``start, stop``, or ``start, stop, step``.
            output_type: The dtype of the elements.

        Raises:
            TypeError: An argument is not a whole number, there are none or more than three, or
                ``output_type`` is not a dtype of numbers.
            ValueError: The step is 0, or a number needs more than 64 bits. During the iteration (as
                InvalidArgumentError): a number does not fit ``output_type``.
        """
        given = range(*args)
        node = Range(given.start, given.stop, given.step)
        return Dataset(_with_dtype("range", "output_type", node, output_type))

    @staticmethod
    def counter(
        start: int = 0, step: int = 1, dtype: DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """Return an infinite dataset of whole numbers.

        The workers of a data service share the numbers, each of them some at a time.

        Args:
            start: The first number.
            step: The difference between successive numbers.
            dtype: The dtype of the elements.

        Raises:
            TypeError: A number is not a whole number, or ``dtype`` is not a dtype of numbers.
            ValueError: During the iteration (as InvalidArgumentError): a number does not fit
                ``dtype``.
        """
        node = Counter(whole("counter", "start", start), whole("counter", "step", step))
        return Dataset(_with_dtype("counter", "dtype", node, dtype))

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return an infinite dataset of random whole numbers in [0, 2 ** 32), as np.int64.

        The workers of a data service share the numbers, but one worker draws them all if there is
        no seed and ``rerandomize_each_iteration`` is False.

        Args:
            seed: The seed. With a seed the numbers are the same in every run.
            rerandomize_each_iteration: Whether iterations differ from each other. None means False.

        Raises:
            TypeError: The seed is not a whole number.
            ValueError: The seed is negative.
        """
        seed = whole_or_none("random", "seed", seed)
        return Dataset(Random.of(seed, bool(rerandomize_each_iteration)))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset with ``tensors`` as its only element.

        Args:
            tensors: Array-likes, or mappings and tuples of them, nested. Arrays are not copied.

        Returns:
            A dataset of one element. Its arrays are read-only views.

        Raises:
            ValueError: There is no array.
        """
        return Dataset(Tensors.of(tree.map_leaves(as_only_row, tree.with_dicts(tensors))))

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset of the rows of arrays.

        Args:
            tensors: Array-likes of shape (rows, ...), or mappings and tuples of them, nested.
                Arrays are not copied. A row of an object array becomes NumPy's form of the object.

        Returns:
            A dataset of ``rows`` elements. Their arrays are read-only views of shape (...).

        Raises:
            ValueError: There is no array, an array has no rows, or the arrays have different
                numbers of rows.

        Example:
            >>> import numpy as np
            >>> from dataservice import Dataset
            >>> x, y = np.arange(4.0).reshape(2, 2), np.array([0, 1])
            >>> for features, label in Dataset.from_tensor_slices((x, y)):
            ...     print(features, label)
            [0. 1.] 0
            [2. 3.] 1
        """
        return Dataset(TensorSlices.of(tensors))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        args: Sequence[Any] = (),
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of the elements that a function's iterable yields.

        Args:
            generator: For instance a generator function. Each iteration over the dataset calls it
                once. If its iterators have ``get_state`` and ``set_state``, or ``state_dict`` and
                ``load_state_dict``, the state of an iteration contains theirs. Other iterators are
                read again up to the saved position. Do not change an array that was yielded: it may
                be used later.
            args: The arguments of ``generator``.
            output_signature: The spec of the elements, for :attr:`element_spec`: their structure
                with an ArraySpec, or another object with a shape and a dtype, for each array.
                Numbers of another dtype are converted. Fractions may be rounded, but not lost.

        Raises:
            TypeError: ``generator`` is not a function, ``args`` is not iterable, or the signature
                is not a spec.
            ValueError: During the iteration (as InvalidArgumentError): an element is None, or does
                not match the signature.

        Example:
            >>> from dataservice import Dataset
            >>> def countdown(n):
            ...     while n:
            ...         yield n
            ...         n -= 1
            >>> [int(x) for x in Dataset.from_generator(countdown, args=(3,))]
            [3, 2, 1]
        """
        check_callable("from_generator", "generator", generator)
        if not isinstance(args, Iterable):
            raise TypeError(f"from_generator needs a tuple of arguments as args, not {args!r}")
        node = Generator(generator, tuple(args))
        if output_signature is None:
            return Dataset(node)
        return Dataset(CheckedSpec(node, spec_from(output_signature), converts=True))

    @staticmethod
    def from_source(source: Any) -> Dataset:
        """Return a dataset of the elements of a list, a torch or Grain dataset, or any iterable.

        Args:
            source: With ``__len__`` and ``__getitem__``, elements are read by index, and workers
                can share them. Otherwise ``__iter__`` is called for each iteration.

        Raises:
            TypeError: The source has neither.
        """
        if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
            return Dataset(Indexed(source))
        if not isinstance(source, Iterable):
            raise TypeError(
                "from_source needs a source with indices or an iterator, and "
                f"{type(source).__name__} has neither: {source!r}"
            )
        return Dataset(Generator(_IteratorFactory(source)))

    @staticmethod
    def from_files(files: Any, format: str | None = None) -> Dataset:
        """Return a dataset of the contents of files: lines, JSON values, or rows of arrays.

        Args:
            files: A path or pattern (``"part-*.npz"``), or several.
            format: ``"text"`` for lines, ``"json"`` for a JSON value in each line, ``"npy"`` for
                the rows of an array, ``"npz"`` for dicts of rows. By default the suffix of the
                names decides.

        Raises:
            NotFoundError: There is no such file.
            TypeError: A name is not a path.
            ValueError: The format is unknown.
        """
        return Dataset(Files.of(files, format))

    @staticmethod
    def list_files(
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of the names of files, as absolute paths.

        The files are listed once, by this call.

        Args:
            file_pattern: A path or pattern (``"part-*.npz"``), or several.
            shuffle: Whether each iteration has another order. None means True, as in tf.data. With
                False the names of each pattern are sorted.
            seed: The seed of the shuffle. With a seed the orders are the same in every run.

        Raises:
            NotFoundError: A name or pattern matches no file.
            TypeError: A name is not a path, or the seed is not a whole number.
            ValueError: The seed is negative.
        """
        paths = matching_files("list_files", "file_pattern", file_pattern)
        seed = whole_or_none("list_files", "seed", seed)
        node: Node = TensorSlices.of(np.array(paths))
        if shuffle is None or shuffle:
            node = Shuffle.of(node, len(paths), seed, reshuffle=True)
        return Dataset(node)

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        wait: bool = False,
        *,
        element_spec: Any = None,
        reader_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """Return a dataset of the elements of a snapshot by :meth:`save` or ``distributed_save``.

        Shards are read in turn, chunk by chunk. A snapshot of one shard keeps its order. The
        workers of a data service can share the chunks if they see the same folder.

        Args:
            path: The folder of the snapshot. Load only snapshots that you trust, because elements
                are unpickled.
            wait: Whether to read the snapshot while it is being saved, and to wait for the save to
                begin. A warning is logged after 15 seconds without new elements (MPIDIST_STALL_S if
                shorter).
            element_spec: The expected spec of the elements. None means the spec in the snapshot.
            reader_func: Decides the order in which shards are read. It is called once with a
                dataset of datasets, one for each shard, and returns a dataset of elements, for
                example ``lambda shards: shards.shuffle(8).interleave(lambda shard: shard)``. It
                needs a complete snapshot.

        Raises:
            DataLossError: The snapshot is damaged. Like the other errors, also during an iteration.
            FailedPreconditionError: The snapshot is not complete, and ``wait`` is False.
            InvalidArgumentError: During the iteration: an element does not match
                ``element_spec``.
            NotFoundError: There is no snapshot, and ``wait`` is False.
            OpError: The save has failed. This is the error of the save, or an UnknownError that
                describes it.
            TypeError: ``reader_func`` is not callable, or does not return a Dataset.
            ValueError: ``reader_func`` is given together with ``wait=True``.
        """
        if reader_func is not None and wait:
            raise ValueError(
                "load takes either reader_func or wait=True: the shards are known when the save "
                "has ended"
            )
        found = Load.of(check_path("load", "path", path), wait)
        nodes: list[Node] = [found] if reader_func is None else [*found.shards()]
        if element_spec is not None:
            spec = spec_from(element_spec)
            nodes = [CheckedSpec(node, spec) for node in nodes]
        if reader_func is None:
            return Dataset(nodes[0])
        shards = Dataset(Indexed([Dataset(node) for node in nodes]))
        return Dataset(_NodeFunction("load", "reader_func", reader_func)(shards))

    # Several datasets

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Return a dataset of tuples with one element of each dataset.

        The result ends with the shortest dataset.

        Args:
            *args: Datasets, or one tuple or dict of datasets, nested, whose structure the elements
                get.
            datasets: Another name for such a tuple or dict.

        Raises:
            TypeError: An argument is not a dataset.
            ValueError: There is no dataset.

        Example:
            >>> from dataservice import Dataset
            >>> [(int(a), int(b)) for a, b in Dataset.zip(Dataset.range(3), Dataset.range(10, 20))]
            [(0, 10), (1, 11), (2, 12)]
        """
        structure: Any = args[0] if len(args) == 1 else args
        if datasets is not None:
            structure = only_one("zip", args=args or None, datasets=datasets)
        given = _checked(tree.flatten(structure))
        node = Zip(_nodes(given), tree.structure(structure))
        return Dataset(node, _merged_options(given))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Return a dataset that draws each element at random from one of several datasets.

        Under ``"distributed_epoch"`` the draws equal the draws of a single process. They need
        datasets in which no transformation drops, reorders, flattens or repeats elements, and
        ``stop_on_empty_dataset=False``.

        Args:
            datasets: The datasets.
            weights: The relative probability of each dataset. By default all are equal.
            seed: The seed. With a seed the order is the same in every run.
            stop_on_empty_dataset: Whether the first dataset that ends is the end of the result.
            rerandomize_each_iteration: Whether each iteration draws anew. None means True, unlike
                in tf.data, where all iterations draw alike by default.

        Raises:
            TypeError: An item is not a dataset, a weight is not a number, the seed is not a whole
                number, or elements are known to differ in structure or dtype.
            ValueError: There is no dataset, or the weights do not fit the datasets.

        Example:
            >>> from dataservice import Dataset
            >>> zeros, ones = Dataset.from_tensors(0).repeat(), Dataset.from_tensors(1).repeat()
            >>> mixed = Dataset.sample_from_datasets([zeros, ones], weights=[0.2, 0.8], seed=0)
            >>> [int(x) for x in mixed.take(10)]
            [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]
        """
        seed = whole_or_none("sample_from_datasets", "seed", seed)
        given = _checked(datasets)
        nodes = _nodes(given)
        check_alike("sample_from_datasets", nodes)
        rerandomize = rerandomize_each_iteration is None or rerandomize_each_iteration
        node = Sample.of(nodes, weights, seed, stop_on_empty_dataset, rerandomize)
        return Dataset(node, _merged_options(given))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Return a dataset of elements of several datasets, in the order of a dataset of indices.

        Args:
            datasets: The datasets.
            choice_dataset: A dataset of indices into ``datasets``.
            stop_on_empty_dataset: Whether the first dataset that ends is the end of the result.

        Raises:
            TypeError: An item is not a dataset, or elements are known to differ in structure or
                dtype.
            ValueError: There is no dataset. During the iteration (as InvalidArgumentError): a
                choice is not a whole number, or not an index of ``datasets``.
        """
        if not isinstance(choice_dataset, Dataset):
            raise TypeError(
                f"choose_from_datasets needs a Dataset as choice_dataset, not {choice_dataset!r}"
            )
        given = _checked(datasets)
        nodes = _nodes(given)
        check_alike("choose_from_datasets", nodes)
        node = Choose(nodes, stop_on_empty_dataset, choice_dataset._node)
        return Dataset(node, _merged_options([*given, choice_dataset]))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Return the elements of this dataset, followed by the elements of another dataset.

        Args:
            dataset: The other dataset.

        Raises:
            TypeError: ``dataset`` is not a Dataset, or its elements are known to have another
                structure or dtype.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(f"concatenate needs a Dataset as dataset, not {dataset!r}")
        check_alike("concatenate", (self._node, dataset._node))
        node = Concatenate((self._node, dataset._node))
        return Dataset(node, _merged_options([self, dataset]))

    # Functions of an element

    def map(
        self,
        function: Callable[..., Any] | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        processes: bool = False,
        *,
        map_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Apply a function to each element.

        Args:
            function: Called with the element, or with the members of a tuple as its arguments.
                Numbers, strings, lists and memoryviews in its result become NumPy's.
            num_parallel_calls: The number of calls that run at once, in threads. AUTOTUNE means the
                number of usable cores. By default the consuming thread calls the function.
            deterministic: Whether elements keep their order. None means True, unless
                :meth:`with_options` says otherwise. With False the results come in the order in
                which they are ready, except on workers of a data service, where the order is kept
                so that another worker can take over.
            processes: Whether to run the function in processes in place of threads, for functions
                that hold Python's global interpreter lock. They receive the function by
                cloudpickle, and share no memory.
            map_func: TensorFlow's name of ``function``.

        Raises:
            TypeError: ``function`` is not callable, or a number is not a whole number.
            ValueError: ``num_parallel_calls`` is below 1, or missing for processes. During the
                iteration (as InvalidArgumentError): the function returns None.

        Example:
            >>> from dataservice import Dataset
            >>> pairs = Dataset.zip(Dataset.range(3), Dataset.range(10, 13))
            >>> [int(x) for x in pairs.map(lambda a, b: a + b, num_parallel_calls=2)]
            [10, 12, 14]
        """
        function = only_one("map", function=function, map_func=map_func)
        check_callable("map", "function", function)
        calls = whole_or_none("map", "num_parallel_calls", num_parallel_calls)
        if calls is None:
            if processes:
                raise ValueError("map needs num_parallel_calls, the number of its processes")
            return self._derived(Map(self._node, function))
        in_order = None if deterministic is None else bool(deterministic)
        return self._derived(ParallelMap(self._node, function, calls, in_order, processes))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Keep the elements for which a predicate is true.

        Args:
            predicate: Called with the element, or with the members of a tuple as its arguments.

        Raises:
            TypeError: ``predicate`` is not callable.
            ValueError: During the iteration (as InvalidArgumentError): the predicate returns
                neither a bool nor a whole number.
        """
        return self._derived(Filter(self._node, check_callable("filter", "predicate", predicate)))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Map each element to a dataset, and take elements from several of these in turn.

        Args:
            map_func: Returns the dataset of an element.
            cycle_length: The number of datasets that take turns. None or AUTOTUNE means 16.
            block_length: The number of consecutive elements from each dataset. None means 1.
            num_parallel_calls: The number of datasets that compute the elements of their next turn
                ahead, each in a thread. AUTOTUNE means all. By default the consuming thread
                computes the elements. The order is the same.
            deterministic: Ignored, because the order is always kept.

        Raises:
            TypeError: ``map_func`` is not callable, or a number is not a whole number.
            ValueError: A number is below 1, or ``num_parallel_calls`` is above ``cycle_length``.

        Example:
            >>> from dataservice import Dataset
            >>> dataset = Dataset.range(3).interleave(
            ...     lambda x: Dataset.from_tensors(x).repeat(3), cycle_length=2, block_length=2
            ... )
            >>> [int(x) for x in dataset]
            [0, 0, 1, 1, 0, 1, 2, 2, 2]
        """
        cycle = whole_or_none("interleave", "cycle_length", cycle_length)
        cycle = CYCLE_LENGTH if cycle in (None, AUTOTUNE) else cycle
        block = 1 if block_length is None else whole("interleave", "block_length", block_length)
        calls = whole_or_none("interleave", "num_parallel_calls", num_parallel_calls)
        if calls is not None and calls != AUTOTUNE and not 1 <= calls <= cycle:
            raise ValueError(
                "interleave needs num_parallel_calls from 1 to cycle_length, or AUTOTUNE, not "
                f"{calls} of {cycle}"
            )
        ahead = cycle if calls == AUTOTUNE else calls or 0
        function = _NodeFunction("interleave", "map_func", map_func)
        return self._derived(Interleave(self._node, function, cycle, block, ahead))

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """Map each element to a dataset, and concatenate these.

        Args:
            map_func: Returns the dataset of an element.

        Raises:
            TypeError: ``map_func`` is not callable.
        """
        function = _NodeFunction("flat_map", "map_func", map_func)
        return self._derived(Interleave(self._node, function, 1, 1))

    def apply(
        self,
        transformation: Callable[[Dataset], Dataset] | None = None,
        *,
        transformation_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """Return ``transformation(self)``, for instance with the result of ``distribute``.

        Args:
            transformation: A function from a dataset to a dataset.
            transformation_func: TensorFlow's name of ``transformation``.

        Raises:
            TypeError: The transformation is not callable, or does not return a Dataset.
        """
        transformation = only_one(
            "apply", transformation=transformation, transformation_func=transformation_func
        )
        result = check_callable("apply", "transformation", transformation)(self)
        if not isinstance(result, Dataset):
            raise TypeError(
                f"the function given to apply returned {type(result).__name__}, not a Dataset"
            )
        return result

    # Order and number of elements

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        name: str | None = None,
    ) -> Dataset:
        """Shuffle the elements: draw each from a buffer of the next ``buffer_size`` elements.

        Under ``"distributed_epoch"`` each worker shuffles the elements of its own share. If
        ``buffer_size`` is at least the number of elements, and elements can be read by index in any
        order, the whole source is shuffled and no elements are buffered.

        Args:
            buffer_size: The number of buffered elements. UNKNOWN_CARDINALITY, a possible result of
                :meth:`cardinality`, means all.
            seed: The seed. With a seed the order is the same in every run.
            reshuffle_each_iteration: Whether each iteration has another order.

        Raises:
            TypeError: The buffer size or the seed is not a whole number.
            ValueError: The buffer size is below 1, the seed is negative, or the buffer would hold
                an infinite dataset.

        Example:
            >>> from dataservice import Dataset
            >>> shuffled = Dataset.range(6).shuffle(6, seed=1)
            >>> [int(x) for x in shuffled]
            [4, 0, 2, 1, 5, 3]
            >>> [int(x) for x in shuffled]  # the next epoch
            [1, 4, 0, 3, 2, 5]
        """
        size = whole("shuffle", "buffer_size", buffer_size)
        seed = whole_or_none("shuffle", "seed", seed)
        return self._derived(Shuffle.of(self._node, size, seed, reshuffle_each_iteration))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Repeat the dataset.

        A dataset without elements ends also under ``repeat()``, for instance behind a ``filter``
        that drops all elements. Where consumers of a data service share elements, an epoch whose
        elements all went to other consumers does not end the repetition.

        Args:
            count: The number of repetitions. None or -1 means without end.

        Raises:
            TypeError: The count is not a whole number.
            ValueError: The count is below -1.
        """
        count = whole_or_none("repeat", "count", count)
        if count is not None and count < -1:
            raise ValueError(f"repeat needs a count of at least 0, or -1 for ever, not {count}")
        return self._derived(Repeat(self._node, None if count == -1 else count))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Return the first ``count`` elements.

        Args:
            count: The number of elements. -1 means all.

        Raises:
            TypeError: The count is not a whole number.
            ValueError: The count is below -1.
        """
        return self._derived(Take(self._node, whole("take", "count", count)))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Drop the first ``count`` elements.

        Args:
            count: The number of elements. -1 means all.

        Raises:
            TypeError: The count is not a whole number.
            ValueError: The count is below -1.
        """
        return self._derived(Skip(self._node, whole("skip", "count", count)))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Return the elements index, index + num_shards, index + 2 num_shards, ...

        Args:
            num_shards: The number of shards.
            index: The index of the shard to return. SHARD_HINT for both arguments stands for the
                workers of a data service, under ShardingPolicy.HINT.

        Raises:
            TypeError: A number is not a whole number.
            ValueError: The index is not in [0, num_shards). During the iteration of a dataset with
                SHARD_HINT outside a data service: FailedPreconditionError.
        """
        shards, index = whole("shard", "num_shards", num_shards), whole("shard", "index", index)
        return self._derived(Shard(self._node, shards, index))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Return pairs of a counter, as np.int64, and the element.

        Args:
            start: The first value of the counter.

        Raises:
            TypeError: ``start`` is not a whole number.
        """
        return self._derived(Enumerate(self._node, whole("enumerate", "start", start)))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Return the elements before the first one for which a predicate is false.

        Workers cannot share the source: under ``"distributed_epoch"`` call it after ``distribute``.

        Args:
            predicate: Called with the element, or with the members of a tuple as its arguments.

        Raises:
            TypeError: ``predicate`` is not callable.
            ValueError: During the iteration (as InvalidArgumentError): the predicate returns
                neither a bool nor a whole number.
        """
        check_callable("take_while", "predicate", predicate)
        return self._derived(TakeWhile(self._node, predicate))

    def scan(
        self,
        initial_state: Any,
        scan_func: Callable[[Any, Any], tuple[Any, Any]],
        name: str | None = None,
    ) -> Dataset:
        """Transform the elements in order by a function that carries a state.

        Workers cannot share the source: under ``"distributed_epoch"`` call it after ``distribute``.

        Args:
            initial_state: The state before the first element: a number, text or array, or a dict or
                tuple of them, nested. Each state is copied, and its arrays are read-only.
            scan_func: Called with the state and an element. It returns the next state and the
                element of the result. Numbers, strings and lists in them become NumPy's.

        Raises:
            TypeError: ``scan_func`` is not callable.
            ValueError: During the iteration (as InvalidArgumentError): the function does not return
                a pair, or returns None as the element.

        Example:
            >>> from dataservice import Dataset
            >>> sums = Dataset.range(5).scan(0, lambda total, x: (total + x, total + x))
            >>> [int(x) for x in sums]
            [0, 1, 3, 6, 10]
        """
        check_callable("scan", "scan_func", scan_func)
        return self._derived(Scan.of(self._node, initial_state, scan_func))

    def unique(self, name: str | None = None) -> Dataset:
        """Drop elements that are equal to an earlier one.

        Elements are equal if their arrays have the same dtypes, shapes and bytes, or the same text.
        An iteration keeps 16 bytes for each distinct element, and they are part of its state.
        Workers cannot share the source: under ``"distributed_epoch"`` call it after ``distribute``.

        Raises:
            ValueError: During the iteration (as InvalidArgumentError): an element contains an
                object other than arrays, numbers and text.
        """
        return self._derived(Unique(self._node))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return pairs (class, element) whose classes have a target distribution.

        Elements of too frequent classes are dropped at random, as few as possible. Under
        ``"distributed_epoch"`` each worker draws and counts within its own elements.

        Args:
            class_func: Returns the class of an element, a whole number from 0 on. In the result it
                is an np.int64.
            target_dist: The relative frequency of each class in the result.
            initial_dist: The relative frequency of each class in this dataset. None means an
                estimate from the elements seen so far.
            seed: The seed. With a seed the draws are the same in every run.

        Raises:
            TypeError: ``class_func`` is not callable, a frequency is not a number, or the seed is
                not a whole number.
            ValueError: A frequency or the seed is negative, all frequencies are 0, or
                ``initial_dist`` and ``target_dist`` have different lengths. During the iteration
                (as InvalidArgumentError): a class is not one of these.
        """
        method = "rejection_resample"
        check_callable(method, "class_func", class_func)
        target = tuple(check_numbers(method, "target_dist", target_dist))
        initial = None
        if initial_dist is not None:
            initial = tuple(check_numbers(method, "initial_dist", initial_dist))
        seed = whole_or_none(method, "seed", seed)
        return self._derived(RejectionResample(self._node, class_func, target, initial, seed))

    def ignore_errors(
        self, log_warning: bool = False, name: str | None = None, *, limit: int | None = None
    ) -> Dataset:
        """Drop elements if their evaluation raises an Exception.

        Elements that the failing transformation has already read are lost with it: for ``batch``,
        the rows of the batch so far. A source that cannot continue, such as a generator that raised
        or a data service, ends the iteration with its error. ``iterator.ignored`` counts the
        ignored errors of an iteration. ``ignored`` of :func:`mpidist.task_metrics` counts the
        errors of the process, under its task, or under ``dataset 0`` if no Server is started. On
        workers of a data service an element must fail each time it is computed: when a worker takes
        over from a lost one, an error that comes and goes makes elements appear twice or not at
        all.

        Args:
            log_warning: Whether to log each error.
            limit: The number of errors to ignore in an iteration. The next error is raised. None
                ignores all, so an infinite dataset without a good element never returns one.

        Raises:
            TypeError: The limit is not a whole number.
            ValueError: The limit is negative.
        """
        limit = whole_or_none("ignore_errors", "limit", limit)
        return self._derived(IgnoreErrors(self._node, log_warning, limit))

    # Batches and groups

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Stack consecutive elements into arrays of shape (batch_size, ...).

        Under ``"distributed_epoch"`` batches equal the batches of a single process. If an element
        fails, its batch fails, and the next batch begins where it would have begun. After
        transformations that drop, reorder, flatten or repeat elements, each worker batches its own
        elements, and the last batch of each may be smaller. Text that ends with NUL, which NumPy's
        text types would lose, makes a batch an array of objects.

        Args:
            batch_size: The number of elements in a batch.
            drop_remainder: Whether to drop a smaller last batch.
            num_parallel_calls: Ignored, because batches are stacked one after the other.
            deterministic: Ignored, because the order is always kept.

        Raises:
            TypeError: ``batch_size`` or ``num_parallel_calls`` is not a whole number.
            ValueError: The batch size is below 1. During the iteration (as InvalidArgumentError):
                elements differ in structure, shape or dtype.

        Example:
            >>> from dataservice import Dataset
            >>> [batch.tolist() for batch in Dataset.range(5).batch(2)]
            [[0, 1], [2, 3], [4]]
            >>> [batch.tolist() for batch in Dataset.range(5).batch(2, drop_remainder=True)]
            [[0, 1], [2, 3]]
        """
        size = whole("batch", "batch_size", batch_size)
        whole_or_none("batch", "num_parallel_calls", num_parallel_calls)
        return self._derived(Batch(self._node, size, drop_remainder))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Stack consecutive elements of different lengths, padded to the longest.

        Args:
            batch_size: The number of elements in a batch.
            padded_shapes: The shape to pad to, or one for each array in the structure of the
                elements. None or -1 as a length, and None as a shape, mean the longest of the
                batch. A number is a shape of one dimension. Objects with ``as_list()`` are shapes.
            padding_values: The scalar to pad with, or one for each array. None means 0, False or
                empty text.
            drop_remainder: Whether to drop a smaller last batch.

        Raises:
            TypeError: The batch size or a length is not a whole number.
            ValueError: The batch size is below 1, or a value is not a scalar. During the iteration
                (as InvalidArgumentError): elements differ in structure, dtype or number of
                dimensions, or are longer than their shape.

        Example:
            >>> import numpy as np
            >>> from dataservice import Dataset
            >>> sequences = Dataset.range(1, 4).map(lambda n: np.full(n, n))
            >>> [batch.tolist() for batch in sequences.padded_batch(2)]
            [[[1, 0], [2, 2]], [[3, 3, 3]]]
        """
        size = whole("padded_batch", "batch_size", batch_size)
        padding = Padding(padded_shapes, padding_values)
        return self._derived(PaddedBatch(self._node, size, padding, drop_remainder))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batch elements of similar length together, padded to the longest.

        Args:
            element_length_func: Returns the length of an element.
            bucket_boundaries: The boundaries, ascending. Bucket i takes lengths below boundary i.
            bucket_batch_sizes: The batch size of each bucket, one more than there are boundaries.
            padded_shapes: See :meth:`padded_batch`.
            padding_values: See :meth:`padded_batch`.
            pad_to_bucket_boundary: Whether to pad to one below the boundary in place of the
                longest.
            no_padding: Whether to stack elements as they are. The elements of a batch must have the
                same shape. ``padded_shapes``, ``padding_values`` and ``pad_to_bucket_boundary`` are
                ignored then.
            drop_remainder: Whether to drop the elements of buckets that are not full at the end.

        Raises:
            TypeError: ``element_length_func`` is not callable, or a number is not a whole number.
            ValueError: Boundaries do not ascend, or the sizes do not fit them. During the iteration
                (as InvalidArgumentError): elements of a batch do not fit together, or an element is
                too long for ``pad_to_bucket_boundary``.

        Example:
            >>> import numpy as np
            >>> from dataservice import Dataset
            >>> sequences = Dataset.from_source([1, 4, 2, 5]).map(lambda n: np.full(n, n))
            >>> buckets = sequences.bucket_by_sequence_length(len, [3], [2, 2])
            >>> [batch.tolist() for batch in buckets]  # lengths below 3, then the others
            [[[1, 0], [2, 2]], [[4, 4, 4, 4, 0], [5, 5, 5, 5, 5]]]
        """
        method = "bucket_by_sequence_length"
        length = check_callable(method, "element_length_func", element_length_func)
        boundaries = wholes(method, "bucket_boundaries", bucket_boundaries)
        sizes = wholes(method, "bucket_batch_sizes", bucket_batch_sizes)
        padding = None if no_padding else Padding(padded_shapes, padding_values)
        to_boundary = pad_to_bucket_boundary and not no_padding
        return self._derived(
            Bucket(self._node, length, boundaries, sizes, padding, to_boundary, drop_remainder)
        )

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Dataset], Dataset],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Group elements by key, and reduce each full group to a dataset.

        Under ``"distributed_epoch"`` each worker groups its own elements.

        Args:
            key_func: Returns the key of an element, a whole number.
            reduce_func: Called with a key, as np.int64, and a dataset of elements with this key.
                It returns a dataset, and must return the same one when it is called again. At the
                end it is called with the rest of each key, in the order of the keys.
            window_size: The number of elements in a full group.
            window_size_func: Returns the number of a key. It is called once for each key in an
                iteration. Give this or ``window_size``.

        Raises:
            TypeError: A function is not callable, or the size is not a whole number. During the
                iteration: ``reduce_func`` does not return a dataset.
            ValueError: The size is below 1, or both or none are given. During the iteration (as
                InvalidArgumentError): a key or a size is not a whole number, or a size is below 1.

        Example:
            >>> from dataservice import Dataset
            >>> groups = Dataset.range(6).group_by_window(
            ...     lambda x: x % 2, lambda key, group: group.batch(3), window_size=3
            ... )
            >>> [batch.tolist() for batch in groups]
            [[0, 2, 4], [1, 3, 5]]
        """
        method = "group_by_window"
        key = check_callable(method, "key_func", key_func)
        reduce = _NodeFunction(method, "reduce_func", reduce_func)
        if (window_size is None) == (window_size_func is None):
            raise ValueError("group_by_window needs either window_size or window_size_func")
        size = (
            check_callable(method, "window_size_func", window_size_func)
            if window_size is None
            else whole(method, "window_size", window_size)
        )
        return self._derived(GroupByWindow(self._node, key, reduce, size, Dataset))

    def unbatch(self, name: str | None = None) -> Dataset:
        """Split each element into the rows of its arrays.

        Raises:
            ValueError: During the iteration (as InvalidArgumentError): arrays of an element have no
                rows, or different numbers of rows.
        """
        return self._derived(Unbatch(self._node))

    def rebatch(
        self, batch_size: int, drop_remainder: bool = False, name: str | None = None
    ) -> Dataset:
        """Change the batch size of a dataset of batches.

        The result equals ``unbatch().batch(batch_size, drop_remainder)``, computed faster.
        Under ``"distributed_epoch"`` each worker cuts its own elements.

        Args:
            batch_size: The number of rows in a batch.
            drop_remainder: Whether to drop a smaller last batch.

        Raises:
            TypeError: The batch size is not a whole number.
            ValueError: The batch size is below 1. During the iteration (as InvalidArgumentError):
                arrays of an element have no rows, or different numbers of rows, or rows of a batch
                differ in structure, shape or dtype.
        """
        size = whole("rebatch", "batch_size", batch_size)
        return self._derived(Rebatch(self._node, size, drop_remainder))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Return windows of the sequence, each as a dataset.

        For elements that are dicts or tuples, a window is a dict or tuple of datasets.

        Args:
            size: The number of elements in a window.
            shift: The distance between the starts of successive windows. None means ``size``.
            stride: The distance between successive elements of a window.
            drop_remainder: Whether to drop windows that are cut short by the end.

        Raises:
            TypeError: A number is not a whole number.
            ValueError: A number is below 1.

        Example:
            >>> from dataservice import Dataset
            >>> windows = Dataset.range(5).window(3, shift=1, drop_remainder=True)
            >>> [[int(x) for x in window] for window in windows]
            [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        size = whole("window", "size", size)
        shift = size if shift is None else whole("window", "shift", shift)
        stride = whole("window", "stride", stride)
        return self._derived(Window(self._node, size, shift, stride, drop_remainder, Dataset))

    # Performance

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """Compute up to ``buffer_size`` elements ahead in a thread.

        Args:
            buffer_size: The number of elements. AUTOTUNE means 2.

        Raises:
            TypeError: The size is not a whole number.
            ValueError: The size is below 1.
        """
        size = whole("prefetch", "buffer_size", buffer_size)
        return self._derived(Prefetch(self._node, AHEAD if size == AUTOTUNE else size))

    def prefetch_to_device(self, device: int | str = 0, buffer_size: int = 2) -> Dataset:
        """Copy elements to a GPU, up to ``buffer_size`` of them ahead of their use.

        A thread computes the elements, and copies them through pinned memory on a stream of its
        own. The current stream of the consumer waits for the copy, and the host does not. Arrays
        and numbers become CuPy arrays. Strings, bytes and objects stay as they are. Call it after
        ``distribute``, and add no transformation with threads after it. Take an element on the
        stream that uses it. To feed several replicas, give a strategy a dataset whose elements are
        on the host.

        Args:
            device: The number of the GPU, or ``"GPU:0"``. For the only replica of a strategy:
                ``strategy.gpus[0]``.
            buffer_size: The number of elements in GPU memory.

        Raises:
            TypeError: The device is neither a number nor a name, or the size is not a whole number.
            ValueError: The device is not a GPU, or the size is below 1. Also in the first
                iteration, if there is no such GPU. FailedPreconditionError if CuPy can use none.
        """
        size = whole("prefetch_to_device", "buffer_size", buffer_size)
        return self._derived(PrefetchToDevice(self._node, device_number(device), size))

    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """Keep the elements of the first complete iteration for later ones.

        Elements kept in memory are returned as read-only views, so that no iteration changes those
        of another. Workers that share the source keep the elements that they computed, in memory,
        as long as they have the dataset. Since each epoch is divided anew, each ends up with all.

        Args:
            filename: The file to keep the elements in, relative to the current folder of this
                process. Empty means the memory of this process. If the file exists, it is read in
                place of the dataset. An iteration that is given up leaves no file. Workers that
                share the source cannot share a file.

        Raises:
            DataLossError: During the iteration: the file is damaged, or not a cache.
            InvalidArgumentError: During the iteration: the file belongs to another dataset.
            TypeError: The name is not a path.
        """
        file = check_path("cache", "filename", filename)
        # Workers may run in another folder, and must open the same file.
        return self._derived(Cache(self._node, os.path.abspath(file) if file else ""))

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Return the dataset with options.

        The options apply to the whole dataset: to its transformations so far, and to
        transformations that follow. Options of combined datasets are merged. An option that is set
        again takes the later value. Options do not apply to the datasets that functions of
        ``interleave``, ``flat_map`` and ``group_by_window`` return, nor to transformations before
        ``distribute`` if they are set after it.

        Args:
            options: The options. They are copied.

        Raises:
            TypeError: ``options`` is not an :class:`Options`.
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options needs Options as options, not {options!r}")
        return Dataset(self._node, self._options.merge(options))

    def options(self) -> Options:
        """Return a copy of the options of the dataset and of the datasets it was made of."""
        return copy.deepcopy(self._options)

    # Elements

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self.node, self._next_context(), self._epochs)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Return an iterator whose leaves are all NumPy scalars and arrays.

        Raises:
            TypeError: During the iteration: a leaf is neither NumPy's nor has ``__array__``.
        """
        return _NumpyIterator(self.node, self._next_context(), self._epochs)

    def reduce(
        self,
        initial_state: Any,
        reduce_func: Callable[[Any, Any], Any],
        name: str | None = None,
    ) -> Any:
        """Reduce the elements of an iteration to a single value.

        Args:
            initial_state: The state before the first element.
            reduce_func: Called with the state and an element. It returns the next state.

        Returns:
            The last state. Numbers, strings and lists in it are NumPy's.

        Raises:
            TypeError: ``reduce_func`` is not callable.
            Exception: Any error of ``reduce_func``.
        """
        check_callable("reduce", "reduce_func", reduce_func)
        state = tree.to_numpy(initial_state)
        with iter(self) as elements:
            for element in elements:
                state = tree.to_numpy(tree.call(reduce_func, (state, element), "reduce"))
        return state

    def get_single_element(self, name: str | None = None) -> Any:
        """Return the only element.

        Raises:
            InvalidArgumentError: The dataset has no element, or more than one.
            Exception: Any error of a function of the dataset.
        """
        with iter(self) as elements:
            found = list(itertools.islice(elements, 2))
        if len(found) != 1:
            raise InvalidArgumentError(
                f"get_single_element needs a dataset of one element, but {self!r} has "
                f"{'more' if found else 'none'}"
            )
        return found[0]

    def save(
        self,
        path: str | os.PathLike[str],
        num_shards: int | None = None,
        *,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the elements of an iteration to disk, for :meth:`load`. Return at the end.

        With ``checkpoint_args`` an interrupted save is resumed by the same call, also in a new
        process: elements that were committed are not written again. For example,
        ``dataset.save(path, checkpoint_args={"checkpoint_interval": 10_000})``.

        Args:
            path: The folder. It is created, or must be empty. With ``checkpoint_args`` it may
                contain an unfinished save of the same dataset. If that one still runs, it fails.
            num_shards: The number of shards. None means one, or with ``shard_func`` one for each
                number that the function returns.
            shard_func: Called with the element, or with the members of a tuple as its arguments. It
                returns the shard of the element: a whole number, which must be in [0, num_shards)
                if ``num_shards`` is given. By default element i goes to shard i modulo num_shards.
            checkpoint_args: A dict with ``checkpoint_interval``, the number of elements between two
                checkpoints. Without it there is one whenever 256 MiB have been written. Each
                checkpoint begins a new file in each shard. A resumed save computes the elements of
                up to two intervals again. TensorFlow's other keys ``directory``, ``max_to_keep``
                and ``step_counter`` are ignored, because the snapshot holds its only checkpoint.

        Raises:
            AlreadyExistsError: The folder contains a snapshot, complete or not, or other files.
            FailedPreconditionError: The folder cannot be written, or the unfinished save in it has
                no checkpoints.
            InvalidArgumentError: ``shard_func`` does not return the number of a shard, or the
                unfinished save in the folder is of another dataset.
            TypeError: An argument has the wrong type.
            UnimplementedError: With ``checkpoint_args``: a source of the dataset has no position.
            ValueError: The number of shards is below 1, or ``checkpoint_args`` has unknown keys or
                an interval below 1.
            Exception: Any error of a function of the dataset. :meth:`load` reports it, too, unless
                the save can be resumed.

        Example:
            >>> import tempfile
            >>> from dataservice import Dataset
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Dataset.range(3).save(f"{folder}/numbers")
            ...     [int(x) for x in Dataset.load(f"{folder}/numbers")]
            [0, 1, 2]
        """
        from dataservice.snapshot.save import save  # a layer above

        folder = check_path("save", "path", path)
        shards = whole_or_none("save", "num_shards", num_shards)
        if shard_func is not None:
            check_callable("save", "shard_func", shard_func)
        save(
            self,
            folder,
            shards,
            shard_func,
            checkpoints=checkpoint_args is not None,
            interval=None if checkpoint_args is None else _checkpoint_interval(checkpoint_args),
        )

    # Properties

    @functools.cached_property
    def node(self) -> Node:
        """The description of the sequence, with the options applied."""
        return with_options_applied(self._node, self._options)

    @property
    def element_spec(self) -> Spec:
        """The shape and dtype of every array of an element, in the structure of the elements.

        If only a user's function determines them, the first element is computed. A length is None
        if it differs from element to element, or between datasets whose elements follow each other.

        Raises:
            ValueError: There is no element, or (as InvalidArgumentError) datasets whose elements
                follow each other differ in structure, dtype or number of dimensions.
        """
        return self.node.element_spec()

    @property
    def distributed(self) -> bool:
        """True if a data service divides the elements between several consumers.

        A training loop does not shard such a dataset again.
        """
        return self._node.distributed

    @property
    def on_device(self) -> bool:
        """True if elements are in GPU memory, by :meth:`prefetch_to_device`.

        Elements belong to the stream of the thread that takes them, so a training loop takes them
        in its own thread.
        """
        return self._node.on_device

    def fingerprint(self) -> np.uint64:
        """Return a hash of the dataset: of its operations, functions, constants and arrays.

        Datasets with equal fingerprints have equal elements, if their functions and files give the
        same again. The reverse does not hold: datasets with equal elements may have other
        fingerprints. The fingerprint is the same in every process that runs the same script with
        the same version of Python. Names and options of the operations are part of it, the contents
        of files are not.

        Raises:
            TypeError: The dataset refers to an object that cannot be pickled, such as an open file.
        """
        return np.uint64(fingerprint(self.node))

    def cardinality(self) -> int:
        """Return the number of elements, -1 if it is infinite, or -2 if it is unknown."""
        return self._node.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            raise TypeError(f"the length of {self!r} is {'infinite' if count == -1 else 'unknown'}")
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Dataset {self.node.summary()}>"

    def __reduce__(self) -> tuple[type[Dataset], tuple[Node, Options]]:
        return Dataset, (self._node, self._options)

    def _derived(self, node: Node) -> Dataset:
        return Dataset(node, self._options)

    def _next_context(self) -> Context:
        return Context(seed=(secrets.randbits(63),), epoch=self._epochs.begin())


class DatasetIterator(ElementIterator):
    """An iterator over a dataset that can be saved and restored.

    The state has two forms with the same content. :meth:`get_state` and :meth:`set_state` are the
    names of this library and of Grain, and use bytes. :meth:`state_dict` and
    :meth:`load_state_dict` are torch's names, and use a dict. For the loaders of torch and
    torchdata, :class:`dataservice.torch.IterableDataset` has the same methods.

    Args:
        node: The description of the dataset.
        context: The seed and the number of the iteration.
        epochs: Gives the next iteration its number.
    """

    def __init__(self, node: Node, context: Context, epochs: Epochs) -> None:
        self._node = node
        self._epochs = epochs
        # Before the first element: functions may change lists and dicts that they have captured.
        self._identity = identity(node)
        self._begin(context, 0)

    @property
    def ignored(self) -> int:
        """The number of errors that ``ignore_errors`` has ignored in this iteration so far.

        Errors of elements that ``prefetch`` has computed ahead are included.
        """
        return self._context.ignored.value

    def __next__(self) -> Any:
        return next(self._elements)

    def get_state(self) -> bytes:
        """Return the position, for :meth:`set_state` of a later iterator.

        The cost does not grow with the position. The state contains the elements that ``shuffle``
        and ``prefetch`` hold, and is small otherwise. It names the dataset, by its text and by a
        hash of its operations, code, constants and arrays.

        Returns:
            A pickle, for instance for ``strategy.save(..., extra={"data": state})``.

        Raises:
            UnimplementedError: A source has no position, or several consumers share a job of a
                data service in no fixed order.
        """
        context = self._context
        head = (_STATE_FORMAT, self._identity, self._node.summary())
        within = (context.seed, context.epoch, self.ignored, self._elements.get_state())
        return pickle.dumps((*head, *within), protocol=5)

    def set_state(self, state: bytes) -> None:
        """Continue at a saved position. The next iteration of the dataset follows this one.

        The dataset must be equal to the dataset of the state: the same operations, code of
        functions, constants and arrays. Globals and the contents of other objects are not compared,
        so a restarted script may change them, for instance the folder of its log.

        Args:
            state: The result of :meth:`get_state` of an iterator over an equal dataset. It is
                unpickled, so load only states that you trust.

        Raises:
            DataLossError: The state is damaged.
            InvalidArgumentError: The state is of another dataset. The message names both.
            UnimplementedError: As :meth:`get_state`.
        """
        try:
            version, its_identity, summary, *within = pickle.loads(state)
        except Exception as error:
            raise DataLossError(f"the state of an iterator is damaged: {error!r}") from error
        if (version, its_identity) != (_STATE_FORMAT, self._identity):
            raise InvalidArgumentError(
                f"the state belongs to an iterator over {summary} (format {version}), not over "
                f"{self._node.summary()} (format {_STATE_FORMAT}): make the dataset as it was when "
                "the state was saved, with the same operations, code of functions, constants and "
                "arrays, or begin without the state"
            )
        seed, epoch, ignored, below = within
        self._elements.close()
        self._begin(Context(seed, epoch), ignored)
        self._elements.set_state(below)
        self._epochs.resume(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a dict, for :meth:`load_state_dict` of a later iterator.

        Returns:
            A dict with one value, the result of :meth:`get_state`. ``torch.save`` and
            ``torch.distributed.checkpoint`` can store it.

        Raises:
            UnimplementedError: As :meth:`get_state`.

        Example:
            >>> from dataservice import Dataset
            >>> dataset = Dataset.range(100).shuffle(100, seed=1)
            >>> elements = iter(dataset)
            >>> first = next(elements)
            >>> state = elements.state_dict()
            >>> later = iter(dataset)  # usually in the next process
            >>> later.load_state_dict(state)
            >>> int(next(later)) == int(next(elements))
            True
        """
        return {_STATE_KEY: self.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Args:
            state_dict: The result of :meth:`state_dict`. It is unpickled, so load only states that
                you trust.

        Raises:
            InvalidArgumentError: The dict was not made by :meth:`state_dict`, or is of another
                dataset.
            DataLossError: As :meth:`set_state`.
            UnimplementedError: As :meth:`get_state`.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != {_STATE_KEY}:
            raise InvalidArgumentError(
                "load_state_dict needs a dict made by state_dict() of an iterator over an equal "
                f"dataset, not {state_dict!r}"
            )
        self.set_state(state_dict[_STATE_KEY])

    def close(self) -> None:
        """Release threads and connections. Idempotent."""
        self._elements.close()

    def goes_on(self, error: Exception) -> bool:
        """Return whether more elements may follow an error that was raised twice in a row."""
        return self._elements.goes_on(error)

    def __enter__(self) -> DatasetIterator:
        return self

    def _begin(self, context: Context, ignored: int) -> None:
        self._context = Context(context.seed, context.epoch, ignored=Count(ignored))
        self._elements = self._node.iterate(self._context)


class _NumpyIterator(DatasetIterator):
    def __next__(self) -> Any:
        return tree.only_numpy(super().__next__())


class _IteratorFactory:
    """An iterable as a function that returns its iterator. Picklable if the iterable is.

    Args:
        source: The iterable.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self.__qualname__ = type(source).__qualname__

    def __call__(self) -> Iterable[Any]:
        return iter(self._source)


class _NodeFunction:
    """A function that returns a node, made of a user's function that returns a dataset. Picklable.

    Args:
        method: The method of the dataset, for messages.
        argument: The name of the method's argument, for messages.
        function: The user's function.

    Raises:
        TypeError: ``function`` is not callable.
    """

    def __init__(self, method: str, argument: str, function: Callable[..., Dataset]) -> None:
        self._function = check_callable(method, argument, function)
        self._method = method
        self.__qualname__ = tree.name_of(function)

    def __call__(self, *arguments: Any) -> Node:
        dataset = self._function(*arguments)
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"the function given to {self._method} returned {type(dataset).__name__}, not a "
                "Dataset"
            )
        return dataset.node


def _checkpoint_interval(arguments: Mapping[str, Any]) -> int | None:
    if not isinstance(arguments, Mapping):
        raise TypeError(f"save needs a dict as checkpoint_args, not {arguments!r}")
    unknown = sorted(set(arguments) - set(_CHECKPOINT_ARGS), key=repr)
    if unknown:
        raise ValueError(
            f"checkpoint_args of save has no key {unknown[0]!r}: the keys are "
            f"{', '.join(_CHECKPOINT_ARGS)}"
        )
    interval = whole_or_none("save", "checkpoint_interval", arguments.get("checkpoint_interval"))
    if interval is not None and interval < 1:
        raise ValueError(f"save needs a checkpoint_interval of at least 1, not {interval}")
    return interval


def _with_dtype(method: str, argument: str, node: Node, dtype: DTypeLike) -> Node:
    """Convert the numbers of a source of np.int64."""
    # TensorFlow's dtypes have NumPy's. None, which NumPy takes for float64, is a mistake.
    wanted = np.dtype(object if dtype is None else getattr(dtype, "as_numpy_dtype", dtype))
    if wanted.kind not in "iufc":
        raise TypeError(f"{method} needs a dtype of numbers as {argument}, not {dtype!r}")
    if wanted == np.int64:
        return node
    return CheckedSpec(node, ArraySpec((), wanted), converts=True)


def _checked(datasets: Any) -> list[Dataset]:
    if isinstance(datasets, Dataset) or not isinstance(datasets, Iterable):
        raise TypeError(f"a list of datasets is needed, not {datasets!r}")
    given = list(datasets)
    wrong = [one for one in given if not isinstance(one, Dataset)]
    if wrong:
        raise TypeError(f"datasets are needed, not {wrong[0]!r}")
    if not given:
        raise ValueError("at least one dataset is needed")
    return given


def _nodes(datasets: Iterable[Dataset]) -> tuple[Node, ...]:
    return tuple(one._node for one in datasets)


def _merged_options(datasets: Iterable[Dataset]) -> Options:
    return functools.reduce(Options.merge, (one._options for one in datasets), Options())

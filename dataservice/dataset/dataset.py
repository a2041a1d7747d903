"""The fluent face of the nodes."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dataservice.dataset import checks, tree
from dataservice.dataset.checks import check_callable, whole, whole_or_none
from dataservice.dataset.context import Context
from dataservice.dataset.functions import call
from dataservice.dataset.iteration import DatasetIterator
from dataservice.dataset.mix import Choose, Sample
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator
from dataservice.dataset.several import check_alike
from dataservice.dataset.sources import Sources
from dataservice.dataset.spec import Spec
from dataservice.dataset.transformations import Transformations
from dataservice.dataset.zip import Zip
from mpidist.errors import InvalidArgumentError


class Dataset(Sources, Transformations):
    """An immutable description of a sequence of elements.

    An element is a NumPy scalar or array, or a dict or tuple of them, nested. Every ``for`` makes
    a pass of its own. Passes of one Dataset object are numbered, and ``shuffle`` with a seed
    depends on the number, so that epochs differ while a rerun of the script repeats them.

    Args:
        node: The description; use the class methods.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._passes = itertools.count()

    @classmethod
    def of(cls, node: Node) -> Dataset:
        """Local. A dataset of a description."""
        return cls(node)

    @property
    def node(self) -> Node:
        """Local. The description by itself."""
        return self._node

    # Of several

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None) -> Dataset:
        """Local. One element of each dataset at a time, as a tuple, until one of them ends.

        Args:
            *args: Datasets; or one tuple or dict of them, nested, whose structure elements get.
            datasets: Such a tuple or dict, in place of these.

        Raises:
            TypeError: Something is no dataset.
            ValueError: There is none.
        """
        structure: Any = args[0] if len(args) == 1 else args
        if datasets is not None:
            structure = checks.only_one("zip", args=args or None, datasets=datasets)
        return cls(Zip(_nodes(tree.flatten(structure)), tree.structure(structure)))

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
    ) -> Dataset:
        """Local. Elements of several datasets, drawn at random.

        Under ``"distributed_epoch"`` the order of draws is that of one process; this takes datasets
        of which nothing drops, reorders, flattens or repeats elements, and no stop on the first
        that is empty.

        Args:
            datasets: The datasets.
            weights: How likely each is, compared with the others; by default all alike.
            seed: Makes the order the same in every run.
            stop_on_empty_dataset: Whether to end with the first of them.

        Raises:
            TypeError: Something is no dataset, a weight no number, or the seed no whole number; or
                elements are known to differ in structure or dtype.
            ValueError: There is no dataset, or the weights do not belong to them.
        """
        seed = whole_or_none("sample_from_datasets", "seed", seed)
        nodes = _nodes(datasets)
        check_alike("sample_from_datasets", nodes)
        return cls(Sample.of(nodes, weights, seed, stop_on_empty_dataset))

    @classmethod
    def choose_from_datasets(
        cls,
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Local. Elements of several datasets, in the order of a dataset of their numbers.

        Args:
            datasets: The datasets.
            choice_dataset: Whose elements are indices of ``datasets``.
            stop_on_empty_dataset: Whether to end with the first of them.

        Raises:
            TypeError: Something is no dataset; or elements are known to differ in structure or
                dtype.
            ValueError: There is no dataset. During a pass (as InvalidArgumentError): a choice is
                no whole number, or none of them.
        """
        if not isinstance(choice_dataset, Dataset):
            raise TypeError(
                f"choose_from_datasets needs a Dataset as choice_dataset, not {choice_dataset!r}"
            )
        nodes = _nodes(datasets)
        check_alike("choose_from_datasets", nodes)
        return cls(Choose(nodes, stop_on_empty_dataset, choice_dataset.node))

    def apply(
        self,
        transformation: Callable[[Dataset], Dataset] | None = None,
        *,
        transformation_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """Local. ``transformation(self)``, for instance with what ``distribute`` returns.

        Args:
            transformation: The function.
            transformation_func: Another name of it.

        Raises:
            TypeError: It is no function, or does not give a Dataset.
        """
        transformation = checks.only_one(
            "apply", transformation=transformation, transformation_func=transformation_func
        )
        result = check_callable("apply", "transformation", transformation)(self)
        if not isinstance(result, Dataset):
            raise TypeError(
                f"the function given to apply returned {type(result).__name__}, not a Dataset"
            )
        return result

    # Elements

    def save(self, path: str | os.PathLike[str], num_shards: int = 1) -> None:
        """Local. Write the elements of one pass to disk, for :meth:`load`; returns at the end.

        Args:
            path: Of a folder; it is made, or is empty.
            num_shards: How many streams of files to write; element i goes to i modulo num_shards.

        Raises:
            AlreadyExistsError: There is a snapshot, complete or not, or something else.
            FailedPreconditionError: The folder cannot be written.
            TypeError: The number of shards is no whole number.
            ValueError: There are no shards.
            Exception: What a function of the dataset raises; :meth:`load` then tells of it.
        """
        from dataservice.snapshot.writer import save  # itself above this package

        save(self, checks.path("save", "path", path), whole("save", "num_shards", num_shards))

    def __iter__(self) -> DatasetIterator:
        context = Context(seed=(secrets.randbits(63),), passes=(next(self._passes),))
        return DatasetIterator(self._node, context)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Local. What a function makes of a state and one element after the other, of one pass.

        Args:
            initial_state: The state before the first element.
            reduce_func: Gets a state and an element, and gives the next state.

        Returns:
            The last state; numbers, strings and lists in it are NumPy's.

        Raises:
            TypeError: It is no function.
            Exception: What it raises.
        """
        check_callable("reduce", "reduce_func", reduce_func)
        state = tree.to_numpy(initial_state)
        with iter(self) as elements:
            for element in elements:
                state = tree.to_numpy(call(reduce_func, (state, element), "reduce"))
        return state

    def get_single_element(self) -> Any:
        """Local. The only element.

        Raises:
            InvalidArgumentError: There is none, or more than one.
            Exception: What a function of the dataset raises.
        """
        with iter(self) as elements:
            found = list(itertools.islice(elements, 2))
        if len(found) != 1:
            raise InvalidArgumentError(
                f"get_single_element needs a dataset of one element, but {self!r} has "
                f"{'more' if found else 'none'}"
            )
        return found[0]

    def as_numpy_iterator(self) -> ElementIterator:
        """Local. A pass whose leaves are all NumPy scalars and arrays.

        Raises:
            TypeError: During the pass: a leaf is neither NumPy's nor has ``__array__``.
        """
        return _NumpyIterator(iter(self))

    @property
    def distributed(self) -> bool:
        """Local. Whether a data service deals the elements out to several consumers.

        A training loop does not shard such a dataset once more.
        """
        return self._node.distributed

    @property
    def on_device(self) -> bool:
        """Local. Whether elements lie on a GPU, by :meth:`prefetch_to_device`.

        They belong to the stream of who takes them: a training loop takes them itself.
        """
        return self._node.on_device

    @property
    def element_spec(self) -> Spec:
        """Local. The shape and dtype of every array of an element, in an element's structure.

        What only a user's function knows is looked up in the first element of a pass. A length is
        None where a transformation makes it differ from element to element, and where it differs
        from one dataset to another whose elements come one after the other.

        Raises:
            ValueError: There is no element to look at; or (as InvalidArgumentError) such datasets
                differ in more.
        """
        return self._node.element_spec()

    def cardinality(self) -> int:
        """Local. The number of elements, -1 if it is infinite, -2 if it is unknown."""
        return self._node.cardinality()

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            raise TypeError(f"the length of {self!r} is {'infinite' if count == -1 else 'unknown'}")
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Dataset {self._node.summary()}>"

    def __reduce__(self) -> tuple[type[Dataset], tuple[Node]]:
        return Dataset, (self._node,)


class _NumpyIterator(UnaryIterator):
    def __next__(self) -> Any:
        return tree.only_numpy(next(self._parent))


def _nodes(datasets: Any) -> tuple[Node, ...]:
    if isinstance(datasets, Dataset) or not isinstance(datasets, Iterable):
        raise TypeError(f"a list of datasets is needed, not {datasets!r}")
    given = list(datasets)
    wrong = [one for one in given if not isinstance(one, Dataset)]
    if wrong:
        raise TypeError(f"datasets are needed, not {wrong[0]!r}")
    if not given:
        raise ValueError("at least one dataset is needed")
    return tuple(one.node for one in given)

"""Which of the configured addresses each data worker has. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dataservice.auto_shard import worker_index


class Homes:
    """The places of workers under static sharding.

    Args:
        addresses: As configured; see :func:`worker_index`. Empty where nothing is sharded so.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._taken: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, address: str, living: Collection[str]) -> None:
        """Local. Give a worker a place; the same one again if it has had one.

        Args:
            address: Its address.
            living: The addresses of all workers that are there.

        Raises:
            InvalidArgumentError: There is none for it.
        """
        if self._addresses and address not in self._taken.values():
            open_ones = [
                self._taken[place] if self._taken.get(place) in living else entry
                for place, entry in enumerate(self._addresses)
            ]
            self._taken[worker_index(address, open_ones)] = address

    def of(self, address: str) -> int:
        """Local. The place of a worker; -1 if it has none."""
        places = [place for place, taken in self._taken.items() if taken == address]
        return places[0] if places else -1

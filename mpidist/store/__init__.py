"""Key-value stores with torch.distributed's names: what ranks, processes and threads agree on."""

from mpidist.store.base import Store
from mpidist.store.file_store import FileStore
from mpidist.store.hash_store import HashStore
from mpidist.store.mpi_store import MPIStore
from mpidist.store.prefix_store import PrefixStore

__all__ = ["FileStore", "HashStore", "MPIStore", "PrefixStore", "Store"]

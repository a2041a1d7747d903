"""Elements on disk: snapshots, which ``save`` writes and ``load`` reads, and files of ``cache``."""

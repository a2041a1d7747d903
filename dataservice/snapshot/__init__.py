"""Datasets on disk: what ``save`` writes, shard by shard, and ``load`` reads."""

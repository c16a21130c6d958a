"""Rows that do not fit into memory: sorted by step beforehand, and read step by step."""

from hf_dp.streams.reading import Stream as Stream
from hf_dp.streams.reading import load as load
from hf_dp.streams.shards import shard as shard

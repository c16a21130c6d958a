"""``hf-dp inspect DIR``: what would be published, what stays and why."""

from hf_dp.cli.publish import inspect as main

__all__ = ["main"]

"""Measure what private training costs in speed and memory, beside non-private training.

``hf-dp bench throughput`` and ``memory`` (:mod:`hf_dp.cli.bench`) are the way in.
"""

"""Measure what private training costs in speed and memory: ``hf-dp bench``."""

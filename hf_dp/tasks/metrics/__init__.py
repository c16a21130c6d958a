"""Metric modules for ``evaluate``, one file each, loaded by path so that nothing is downloaded."""

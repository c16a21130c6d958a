"""Metric modules for ``evaluate``, loaded by local path so that nothing is downloaded."""

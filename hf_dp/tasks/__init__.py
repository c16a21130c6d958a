"""Pose a task: data, templates and label words, models, metrics, demonstration sentences."""

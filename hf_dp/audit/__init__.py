"""Measure what a trained model gives away, beside what its statement promises: ``hf-dp audit
exposure``."""

"""The ``hf-dp`` command."""

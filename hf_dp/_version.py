"""The version, in one place (read by pyproject.toml and written into every privacy.json)."""

__version__ = "0.2.0"

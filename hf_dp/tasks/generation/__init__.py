"""Generate text: scores of generated texts."""

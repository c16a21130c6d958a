"""How a task is posed: classification data, templates and label words, metrics, built-in
demonstration sentences."""

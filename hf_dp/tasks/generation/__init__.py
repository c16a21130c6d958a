"""Generate text privately: rows to prompts and targets, decoding, references and scores."""

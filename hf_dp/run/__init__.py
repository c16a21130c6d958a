"""One private run without a Trainer: gate, ledger, rows, checks."""

"""Which parameters train: choices of them, private or not, and adapters of our own. Stock adapters
come from PEFT."""

"""What may leave a run's folder, and the way to the Hub: an allow-list, one look, one commit."""

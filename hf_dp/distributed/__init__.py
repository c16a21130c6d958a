"""Several processes, one run: who they are, how they agree, and how sums become one noisy sum."""

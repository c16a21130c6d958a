"""From the rows of a data set to batches: each row is collated alone, then padded with others."""

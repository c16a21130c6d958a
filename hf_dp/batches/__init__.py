"""From the rows of a data set to the batches a model sees: each example is collated alone, then
padded with others."""

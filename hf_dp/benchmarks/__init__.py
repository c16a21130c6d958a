"""What private training costs: speed and memory of every way to clip, beside non-private training
on equal work.

``hf-dp bench throughput``, ``memory`` and ``training`` (:mod:`hf_dp.cli.bench`) are the way in.
Importing the package or :mod:`hf_dp.benchmarks.shapes` loads neither torch nor transformers.

    shapes       the models, built from a config with random weights       workload     one
    measurement's fixed choices modes        non-private and one mode per clipping strategy
    opacus_modes the same step through Opacus rounds       interleaved timings and the ratio
    statistic               throughput   speed at one batch size capacity     largest batch, and
    speed there (CUDA)                     memory       peak memory, one process a mode bound
    the arithmetic that exact norms cost                      operators    by profiler, what is left
    training     end to end against the stock Trainer                      training_task  its data,
    model and counting environment  versions and machine
    allocator    what the C library keeps tables plot  what the reader sees
"""

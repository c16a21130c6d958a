"""Measure what private training costs in speed and memory, beside non-private training.

``hf-dp bench throughput``, ``memory``, ``training`` and ``scale`` (:mod:`hf_dp.cli.bench`) are the
way in.
Importing the package or :mod:`hf_dp.benchmarks.shapes` loads neither torch nor transformers.

    shapes        the models, built from a configuration with random weights
    workload      the fixed choices of one measurement
    mode          the interface of a mode: one way to form the gradient of a step
    modes         non-private training, one mode for each clipping strategy, selection, DP-FP
    explicit_modes  per-example gradients one by one, layer by layer, or all at once by vmap
    opacus_modes  the same step through Opacus
    rounds        interleaved timings and the ratio statistic
    throughput    speed at one batch size
    capacity      largest batch, and speed at that batch (CUDA)
    memory        peak memory, one process a mode (memory_probe)
    bound         the arithmetic that exact norms cost
    operators     time by operator, from a profiler
    training      end to end, against the stock Trainer
    training_task the data, model and counting of training
    processes     a step on several processes, beside stock DDP and FSDP2 (process_modes)
    scale         bytes, memory and predicted time on several processes, by arithmetic
    environment   versions and machine
    allocator     what the C library does with freed memory
    tables, plot  what the reader sees
"""

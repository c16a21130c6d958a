"""Measure what a trained model gives away, beside what its statement promises.

``hf-dp audit exposure`` (:mod:`hf_dp.cli.audit_exposure`) is the way in.

    canaries    synthetic rows that are inserted into the training rows, and their file
    suffixes    how perplexed a model is by each suffix that a canary could have had
    exposure    from these numbers to the rank of the true one, and what epsilon allows
"""

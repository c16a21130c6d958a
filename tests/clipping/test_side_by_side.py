"""Weighted sums on one thread each equal those formed one after the other."""

from __future__ import annotations

import models
import pytest
import torch
from models import LONG, SHORT, batch_for, disagreement

from hf_dp.clipping import ClippingEngine, clipped_sum, gradients, side_by_side
from hf_dp.errors import UnaccountedGradientError
from hf_dp.losses import per_example_loss

THREADS = 2
EXACT = 1e-9


@pytest.fixture
def jobs(monkeypatch):
    """Two threads, and even the products of tiny models side by side; counts them."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    monkeypatch.setattr(side_by_side, "_SMALLEST", 1)
    monkeypatch.setattr(side_by_side, "_LARGEST_PART", THREADS)
    seen = []

    def counted(jobs):
        return side_by_side.side_by_side(seen.append(job) or job for job in jobs)

    monkeypatch.setattr(clipped_sum, "side_by_side", counted)
    yield seen
    left = torch.get_num_threads()
    torch.set_num_threads(before)
    assert left == THREADS, "the number of threads was not put back"


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2_untied", "llama"])
def test_side_by_side_equals_the_loop(name, jobs):
    model = models.BUILDERS[name]()
    assert disagreement(model, batch_for(model, SHORT)) < EXACT
    assert len(jobs) > 4, "nothing was computed side by side"


def sums_of(model, batches, threads):
    torch.set_num_threads(threads)
    with ClippingEngine(model, 0.1) as engine:
        for batch in batches:
            engine.backward(per_example_loss(model, batch))
        sums = engine.collect()
    torch.set_num_threads(THREADS)
    return sums


def test_they_add_to_sums_that_are_there(jobs):
    model = models.bert()
    batches = [batch_for(model, SHORT), batch_for(model, LONG)]
    found, expected = sums_of(model, batches, THREADS), sums_of(model, batches, 1)
    assert jobs
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_what_was_in_the_memory_does_not_count(jobs):
    model = models.bert()
    batches = [batch_for(model, SHORT)]
    expected = sums_of(model, batches, 1)
    torch.use_deterministic_algorithms(True)  # fills memory that is not written yet with NaN
    try:
        assert torch.empty(3).isnan().all()
        found = sums_of(model, batches, THREADS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert jobs
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_an_example_that_is_not_finite_is_removed(jobs):
    model = models.bert()
    batch = batch_for(model, SHORT)

    def losses(model, spoil):
        found = per_example_loss(model, batch)
        return torch.cat([found[:1] * spoil, found[1:]])

    results = []
    for spoil in (float("inf"), 0.0):
        with ClippingEngine(model, 0.1) as engine:
            engine.backward(losses(model, spoil))
            results.append(engine.collect())
    assert jobs
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_planted_unclipped_product_is_seen(jobs, monkeypatch):
    original = gradients.OuterProducts.weighted_factors
    monkeypatch.setattr(
        gradients.OuterProducts,
        "weighted_factors",
        lambda self, weights: original(self, gradients.Weights(torch.ones_like(weights.values))),
    )
    model = models.bert()
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3
    assert jobs


def test_an_error_in_a_thread_is_raised_and_spoils_the_sums(jobs, monkeypatch):
    original = gradients.OuterProducts.weighted_factors
    shapes = []

    def one_too_wide(self, weights):
        left, right = original(self, weights)
        shapes.append(left.shape)
        return (left, right) if len(shapes) != 2 else (left, right[1:])

    monkeypatch.setattr(gradients.OuterProducts, "weighted_factors", one_too_wide)
    model = models.bert()
    with ClippingEngine(model, 0.1) as engine:
        with pytest.raises(RuntimeError, match="shape"):
            engine.backward(per_example_loss(model, batch_for(model, SHORT)))
        with pytest.raises(UnaccountedGradientError, match="failed while it added"):
            engine.collect()


def test_each_job_runs_without_gradient_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen = []
    try:
        jobs = [lambda: seen.append((torch.is_grad_enabled(), torch.get_num_threads()))] * 7
        with torch.enable_grad(), side_by_side.side_by_side(iter(jobs)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [(False, 1)] * 7


def records(shape, length=4, number=1):
    return [
        gradients.OuterProducts(torch.ones(2, length, shape[0]), torch.ones(2, length, shape[1]))
    ] * number


def test_which_products_get_a_thread_of_their_own(monkeypatch):
    monkeypatch.setattr(side_by_side, "_SMALLEST", 2 * 4 * 8 * 16)
    middle = [torch.nn.Parameter(torch.ones(8, 16)) for _ in range(9)]
    larger, small, huge, tied, lookup = (
        torch.nn.Parameter(torch.ones(shape))
        for shape in ((10, 16), (8, 15), (64, 64), (8, 16), (9, 16))
    )
    found = {parameter: records(parameter.shape) for parameter in (*middle, larger, small)}
    others = {
        tied: records(tied.shape, number=2),
        lookup: [gradients.Lookups(torch.zeros(2, 4).long(), torch.ones(2, 4, 16))],
    }
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert side_by_side.products_for_one_thread({**found, **others}) == []
        torch.set_num_threads(2)
        assert side_by_side.products_for_one_thread({**others, **found}) == [larger, *middle]
        # All threads would wait for the one that has the largest; of the rest none is small enough
        # either.
        torch.set_num_threads(4)
        assert side_by_side.products_for_one_thread(found) == []
        torch.set_num_threads(2)
        chosen = side_by_side.products_for_one_thread({**found, huge: records(huge.shape)})
        assert [id(parameter) for parameter in chosen] == [
            id(parameter) for parameter in (larger, *middle)
        ]
    finally:
        torch.set_num_threads(before)

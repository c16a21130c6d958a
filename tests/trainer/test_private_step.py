"""What one private step does, each property with the bug it guards against planted."""

import contextlib

import faults
import pytest
import tiny
import torch
from scipy import stats
from watch import watch

from hf_dp.clipping import per_example_gradients
from hf_dp.errors import LedgerError
from hf_dp.losses import per_example_loss
from hf_dp.mechanisms import DpSgd
from hf_dp.noise import SecretRandomness
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.run.ledger import RunLedger
from hf_dp.run.witnesses import read_run
from hf_dp.trainer.trainer import DPTrainer


@pytest.fixture
def trainer(tmp_path):
    return tiny.trainer(tmp_path)


def batches(trainer, indices):
    trainer.create_optimizer()
    loader = trainer.get_train_dataloader()
    return loader.collate_fn([loader.dataset[i] for i in indices])


def step(trainer, indices):
    trainer.run.open()
    if trainer.ledger.steps() == 0:
        trainer.run.book.start(100)
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, batches(trainer, indices))
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


REJECT = 1e-7  # of the right noise, one run in ten million


def noise_pvalue(trainer) -> float:
    """KS test of an empty draw's gradient against N(0, (noise_multiplier C / B)^2)."""
    flat = torch.cat([g.flatten() for g in step(trainer, []).values()])
    args = trainer.args
    std = args.noise_multiplier * args.per_example_max_grad_norm / args.expected_batch_size
    return stats.kstest((flat / std).numpy(), "norm").pvalue


def test_an_empty_draw_is_pure_noise_of_the_planned_size(trainer):
    assert noise_pvalue(trainer) > REJECT


@pytest.mark.parametrize("factor", [0.5, 2**0.5])
def test_planted_noise_of_another_size_is_seen(trainer, monkeypatch, factor):
    """Half of it, and as much as two draws have together."""
    faults.noise_times(factor)(monkeypatch)
    assert noise_pvalue(trainer) < REJECT


def clipped_mean(trainer, indices) -> dict[str, torch.Tensor]:
    """Sum of clipped gradients / expected batch size, by a loop over single unpadded examples."""
    parameters = dict(trainer.model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in indices:
        row = trainer.train_dataset[i]
        inputs = {k: torch.tensor([row[k]]) for k in ("input_ids", "attention_mask")}
        loss = per_example_loss(trainer.model, {**inputs, "labels": torch.tensor([row["label"]])})
        gradient = next(per_example_gradients(loss, parameters))
        norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
        for name, g in gradient.items():
            total[name] += g * min(1.0, trainer.run.plan.clips_to / float(norm))
    return {name: t / trainer.args.expected_batch_size for name, t in total.items()}


def step_error(trainer, indices) -> float:
    expected = clipped_mean(trainer, indices)
    got = step(trainer, indices)
    return max(float((got[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("indices", [[3], [0, 5, 6], list(range(23))])
def test_the_divisor_is_the_expected_batch_size_whatever_was_drawn(trainer, without_noise, indices):
    assert step_error(trainer, indices) < 1e-6


def by_a_realized_batch(patch):
    original = DpSgd.gradients

    def realized(self, clipped, release):
        gradients = original(self, clipped, release)
        return {p: g * self.run.plan.expected_batch_size / 3 for p, g in gradients.items()}

    patch.setattr(DpSgd, "gradients", realized)


def mean_of_the_batch(patch):
    honest = DPTrainer.compute_per_example_loss
    patch.setattr(DPTrainer, "compute_per_example_loss", lambda *given: honest(*given) / 64)


@pytest.mark.parametrize(
    "plant", [by_a_realized_batch, mean_of_the_batch, faults.FAULTS["gradients are not clipped"]]
)
def test_planted_steps_that_are_another_mean_are_seen(trainer, without_noise, monkeypatch, plant):
    plant(monkeypatch)
    assert step_error(trainer, [0, 5, 6]) > 1e-4


def test_an_example_that_is_not_finite_is_removed_and_the_step_goes_on(
    trainer, without_noise, monkeypatch
):
    def broken(model, inputs):
        factor = torch.ones(len(inputs["labels"]))
        factor[inputs["attention_mask"].sum(1) == 8] = float("nan")
        return per_example_loss(model, inputs) * factor

    monkeypatch.setattr(trainer, "compute_per_example_loss", broken)
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    finite = [i for i in range(12) if lengths[i] != 8]
    assert len(finite) < 12
    expected = clipped_mean(trainer, finite)
    got = step(trainer, list(range(12)))
    assert max(float((got[name] - expected[name]).abs().max()) for name in expected) < 1e-6


# -- the ledger ---


def test_the_step_is_durable_before_any_gradient_is_visible(trainer, monkeypatch):
    def state(_, book, event, purpose):
        on_disk = read_run(trainer.args.output_dir).ledger.steps()
        hidden = all(p.grad is None for p in trainer.model.parameters())
        return hidden, on_disk, book.ledger.steps()

    seen = watch(monkeypatch, RunLedger, "append", state)
    step(trainer, [1, 2])
    assert seen == [(True, 1, 1)]


def recorded_all(trainer) -> bool:
    trainer.train()
    return trainer.ledger.steps() == trainer.state.global_step == 4


@pytest.mark.usefixtures("unchecked")
def test_every_step_is_recorded_and_planted_ones_that_are_not_are_seen(tmp_path, monkeypatch):
    assert recorded_all(tiny.trainer(tmp_path / "honest"))
    faults.half_of_the_steps_unrecorded(monkeypatch)
    assert not recorded_all(tiny.trainer(tmp_path / "planted"))


@pytest.mark.usefixtures("unchecked")
def test_an_unrecorded_step_stops_the_run(trainer, monkeypatch):
    monkeypatch.setattr(RunLedger, "append", lambda self, event, purpose: None)
    with pytest.raises(LedgerError, match="step ran that was not recorded"):
        trainer.train()


# -- randomness ---


def draws(trainer) -> list[list[int]]:
    return list(trainer.get_train_dataloader().batch_sampler)


def of_seed(folder) -> dict[str, list]:
    """Draws, noise and clipped sums under dropout, with the public generators seeded."""
    trainer = tiny.trainer(folder, seed=7, given={"model": tiny.model(dropout=0.5)})

    def sums_of(clipped, batches):
        return [total.clone() for total in clipped.values.values()]

    with pytest.MonkeyPatch.context() as patch:
        sums = watch(patch, trainer.mechanism, "clip", sums_of)
        found = {"draws": draws(trainer), "noise": list(step(trainer, []).values())}
        torch.manual_seed(7)
        step(trainer, list(range(12)))
    return {**found, "dropout": sums[-1]}


def in_common(folder) -> set[str]:
    """What two runs with the same ``seed`` have in common; must be nothing."""
    one, two = of_seed(folder / "a"), of_seed(folder / "b")
    found = {"draws"} if one.pop("draws") == two.pop("draws") else set()
    return found | {name for name in one if any(map(torch.equal, one[name], two[name]))}


@pytest.mark.os_randomness
def test_noise_draws_and_dropout_do_not_follow_from_the_seed(tmp_path, monkeypatch):
    assert in_common(tmp_path) == set()
    original = SecretRandomness.__init__
    with monkeypatch.context() as patch:
        patch.setattr(
            SecretRandomness, "__init__", lambda self, seed=None, rank=0: original(self, 7)
        )
        assert in_common(tmp_path / "secret") >= {"draws", "noise"}
    monkeypatch.setattr(SecretRandomness, "streams", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(SecretRandomness, "reseed", lambda self, index=None: None)
    monkeypatch.setattr(SecretRandomness, "example_seed", lambda self, index: index)  # one grouping
    assert in_common(tmp_path / "public") == {"dropout"}


def test_neither_a_step_nor_fetching_draws_from_the_public_generators(trainer, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    step(trainer, [1, 2])
    assert torch.equal(torch.rand(3), expected)
    # A transform's draws would otherwise tell from rng_state.pth how many rows were drawn.
    augmented = tiny.dataset().with_transform(lambda rows: (torch.rand(3), rows)[1])
    trainer = tiny.trainer(tmp_path, given={"train_dataset": augmented})
    before = torch.get_rng_state()
    loader = trainer.get_train_dataloader()
    batch = loader.collate_fn(loader.dataset.__getitems__([1, 5, 7]))
    assert sum(len(part["labels"]) for part in batch) == 3
    assert torch.equal(torch.get_rng_state(), before)


def sampler_is_poisson(trainer) -> bool:
    """The loader draws by a PoissonSampler with the plan's rate, and draw sizes vary as Binomial(N,
    q) does."""
    draws = trainer.get_train_dataloader().batch_sampler
    sampler, sizes = draws.sampler, [len(draw) for _ in range(300) for draw in draws]
    # Around 40 * 0.2 * 0.8 = 6.4, with a standard deviation of 0.26 in 1,200 draws.
    spread = sum((s - 8) ** 2 for s in sizes) / len(sizes)
    return type(sampler) is PoissonSampler and sampler.sample_rate == 0.2 and 4.5 < spread < 9


def test_draws_are_poisson_and_planted_shuffling_is_seen(trainer, monkeypatch):
    assert sampler_is_poisson(trainer)
    faults.shuffled(monkeypatch)
    assert not sampler_is_poisson(trainer)


# -- the self-check ---


def self_check_saw_real_rows(trainer) -> bool:
    """Whether any row that the model saw before the first draw is a row of the training set."""
    seen: list[list[int]] = []
    handle = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    trainer.run.training_data()
    trainer.run.check_engine()
    handle.remove()
    assert len(seen) > 6  # alone, together, in other arrangements
    rows = {tuple(row["input_ids"]) for row in trainer.train_dataset}
    return any(tuple(token for token in row if token != 0) in rows for row in seen)


def test_the_self_check_runs_on_synthetic_rows_and_real_ones_are_seen(trainer, monkeypatch):
    assert not self_check_saw_real_rows(trainer)
    examples = trainer.run.training_data().examples
    monkeypatch.setattr(trainer, "synthetic_batches", lambda: [examples[3], examples[4]])
    assert self_check_saw_real_rows(trainer)

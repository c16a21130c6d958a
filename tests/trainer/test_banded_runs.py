"""Correlated noise in whole runs: whose rows a step draws, what its sums are noised with, what the
ledger says, and what a resume does. With planted bugs."""

from dataclasses import replace

import banded
import faults
import loops
import numpy as np
import pytest
import tiny
import torch
import users
from banded import BANDS, COLUMN, classes, is_banded, matrix
from processes import results

from hf_dp import DPTrainer, FrostConfig, RgpConfig
from hf_dp.accounting import epsilon
from hf_dp.accounting.events import BandedGaussian
from hf_dp.cards.verify import verify
from hf_dp.errors import InvalidArgumentError, LedgerError, StepError, UnsupportedArgumentError
from hf_dp.losses import per_example_loss
from hf_dp.mechanisms import mechanism_for
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.plans.bands import InTurn, member
from hf_dp.run.gate import Observer
from hf_dp.run.private_run import PrivateRun
from hf_dp.trainer.weighing import workload_of

pytestmark = pytest.mark.usefixtures("unchecked")

IN_BANDS = {"bands": BANDS, "expected_batch_size": 8, "logging_strategy": "no", "max_steps": 7}
CLASSES = classes(40, BANDS)
EVENT = BandedGaussian(1.0, BANDS * 8 / 40, 1, BANDS)


def numbered(label: str = "label"):
    """Rows whose first two words are their number."""
    words = [(number // 8, number % 8) for number in range(40)]
    sentences = [" ".join([tiny.WORDS[a], tiny.WORDS[b], *["the"] * (a + b % 3)]) for a, b in words]
    encoded = tiny.tokenizer()(sentences)
    kept = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return tiny.datasets.Dataset.from_dict({**kept, label: [number % 2 for number in range(40)]})


def places(inputs) -> list[int]:
    """The numbers of the rows of a batch."""
    ids = inputs["input_ids"] - 4
    return (8 * ids[:, 1] + ids[:, 2]).tolist()


class Noting(DPTrainer):
    """Notes, of each physical batch of a step, how many steps are recorded, and whose rows it has."""

    noted: list

    def compute_per_example_loss(self, model, inputs):
        if self.run._step_is_open:
            self.noted.append((self.ledger.steps("training"), places(inputs)))
        return super().compute_per_example_loss(model, inputs)


class Sums(Observer):
    """Keeps a run's clipped sums, and the noise on them in units of z, (d,) for each step."""

    def __init__(self, run):
        self.std, self.sums, self.noise = run.plan.noise_std, [], []

    def clipped(self, sums):
        self.sums.append(users.flat(sums))

    def noised(self, sums):
        self.noise.append((users.flat(sums) - self.sums[-1]) / self.std)


def trainer(folder, **options) -> Noting:
    kind = type("Noting", (Noting,), {"noted": []})
    given = {"train_dataset": numbered(), **options.pop("given", {})}
    return tiny.trainer(folder, cls=kind, given=given, **{**IN_BANDS, **options})


def of_four(folder, **options) -> Noting:
    made = tiny.trained(trainer(folder, **options, max_steps=4))
    assert made.ledger.events == (EVENT.with_steps(4),)
    return made


def are_of_their_classes(noted) -> bool:
    """Return whether each step's rows are of the class that the ledger's next line counts."""
    return bool(noted) and all(CLASSES[row] == n % BANDS for n, rows in noted for row in rows)


WORKERS = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4}


@pytest.mark.parametrize("workers", [{}, WORKERS], ids=["", "workers"])
def test_a_run_draws_and_counts_class_by_class(tmp_path, workers):
    """Epochs of 5 steps end inside a turn of 3 classes, and workers draw ahead."""
    made = tiny.trained(trainer(tmp_path, **workers))
    assert are_of_their_classes(made.noted) and {n for n, _ in made.noted} >= {0, 3, 6}
    assert made.ledger.events == (EVENT.with_steps(7),)
    told = made.privacy_statement().to_dict()
    stated = [told[name] for name in ("status", "sampling", "bands", "steps", "epsilon")]
    spent = epsilon(EVENT.with_steps(7), 1 / 80).rounded_up(3)
    assert stated == ["proven", "banded", 3, 7, spent]
    made.save_model()
    assert verify(tmp_path).outcome != "FAILED"
    made.train()  # anew: what was drawn ahead for steps 7 to 9 is not used
    assert are_of_their_classes(made.noted) and made.ledger.events == (EVENT.with_steps(14),)


def resumed(folder, again: bool) -> tuple[list, np.ndarray, Noting]:
    """What a run of 8 steps noted, and its noise, which is stopped after 5 and resumed from its
    checkpoint of step 3, by the same trainer or another."""
    kept, noted, noise = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}, [], []
    first = trainer(folder, **kept, given={"callbacks": [tiny.StopsAfter(5)]})
    first.run.let_inside(seen := Sums(first.run))
    first.train()
    first.remove_callback(tiny.StopsAfter)
    made = first if again else trainer(folder, **kept)
    if not again:
        noted, noise = first.noted, seen.noise
        made.run.let_inside(seen := Sums(made.run))
    tiny.resumed(made, 3)
    assert made.state.global_step == 8
    return noted + made.noted, torch.stack(noise + seen.noise).numpy(), made


@pytest.mark.parametrize("again", [True, False], ids=["same trainer", "another"])
def test_a_resume_goes_on_with_the_next_class_and_a_new_block(tmp_path, again):
    """Steps 4 and 5 are made twice: they count twice, and 10 is the number of classes' turns."""
    noted, noise, made = resumed(tmp_path, again)
    assert are_of_their_classes(noted) and [*dict.fromkeys(n for n, _ in noted)] == [*range(10)]
    assert made.ledger.events == (EVENT.with_steps(10),)
    assert is_banded(noise, [5, 5]) and not is_banded(noise, [10])
    assert banded.power(banded.covariance([10]), [5, 5], noise.shape[1]) > 0.99


def test_planted_block_that_goes_on_after_a_resume_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateRun, "stop", lambda self: self.book.stop())
    assert not is_banded(resumed(tmp_path, True)[1], [5, 5])


def test_planted_draws_that_begin_with_class_0_after_a_resume_are_refused(tmp_path, monkeypatch):
    honest = InTurn.__iter__
    monkeypatch.setattr(InTurn, "__iter__", lambda self: honest(replace(self, recorded=lambda: 0)))
    with pytest.raises(LedgerError, match="for step 5, the next in the ledger, got .* step 0"):
        resumed(tmp_path, False)


def test_planted_draws_of_another_class_are_seen(tmp_path, monkeypatch):
    other = lambda block, k, b: member(block, (k + 1) % b, b)  # noqa: E731
    monkeypatch.setattr("hf_dp.plans.bands.member", other)
    assert not are_of_their_classes(of_four(tmp_path).noted)


def test_planted_step_that_is_not_counted_stops_the_next(tmp_path, monkeypatch):
    faults.half_of_the_steps_unrecorded(monkeypatch)
    with pytest.raises(LedgerError, match="for step 1, the next in the ledger, got .* step 2"):
        trainer(tmp_path).train()


# -- draws that are not released --


def test_draws_that_were_passed_over_are_released_for_no_other_step(tmp_path):
    run = loops.run(tmp_path, loops.plan(mechanism=loops.DpSgdPlan.of(0.1, 1.0, bands=BANDS)))
    mechanism = mechanism_for(run)
    draws = mechanism.logical_batches()
    loops.step(mechanism, next(draws))
    run.model.zero_grad()
    mechanism.clip(next(draws))  # and dropped
    with pytest.raises(LedgerError, match="for step 1, the next in the ledger, got .* step 2"):
        loops.step(mechanism, next(draws))
    with pytest.raises(LedgerError, match="drawn for no step"):
        with run.release(run.plan.step_release()):
            pytest.fail("a step without a draw")
    draws.close()
    assert run.ledger.steps() == 1
    assert len(list(loops.steps(mechanism))) == 4
    assert run.ledger.events == (BandedGaussian(1.0, 0.6, 5, BANDS),)


def test_a_draw_whose_step_failed_is_drawn_again(tmp_path, monkeypatch):
    """Between draw and release: step 4 is not in the ledger, and its class is next."""
    kept = {"save_strategy": "steps", "save_steps": 2}
    made, honest = trainer(tmp_path, **kept), DpSgd.clip
    fails = lambda self, b: (honest(self, b), 1 / (4 - self.run.book.steps_made))[0]  # noqa: E731
    monkeypatch.setattr(DpSgd, "clip", fails)
    with pytest.raises((ZeroDivisionError, StepError)):
        made.train()
    monkeypatch.setattr(DpSgd, "clip", honest)
    assert made.ledger.steps() == 4
    again = tiny.resumed(trainer(tmp_path, **kept), 4)
    assert are_of_their_classes(made.noted + again.noted) and again.state.global_step == 7
    assert again.ledger.events == (EVENT.with_steps(7),)


# -- how far one row moves what is released --


def summed(folder, without: int) -> np.ndarray:
    """The clipped sums of 12 steps in units of C, (T, d), at learning rate 0, where one row (-1:
    none) adds nothing; the draws and the noise are always the same."""

    def losses(model, inputs):
        honest = per_example_loss(model, inputs)
        return torch.where(torch.tensor(places(inputs)) == without, 0.0 * honest, honest)

    plan = loops.plan(mechanism=loops.DpSgdPlan.of(0.02, 1.0, bands=BANDS), max_steps=12)
    own = {"insecure_seed": 11, "compute_per_example_loss": losses}
    run = loops.run(folder / str(without), plan, train_dataset=numbered("labels"), **own)
    run.let_inside(seen := Sums(run))
    assert len(list(loops.steps(mechanism_for(run)))) == 12
    return torch.stack(seen.sums).numpy() / 0.02


def moves_too_far(differences: np.ndarray, column=COLUMN) -> bool:
    """Return whether C (G - G') is longer than sqrt(k), or longer than 1 over the rows of one step."""
    took_part = np.flatnonzero(np.abs(differences).max(1))
    whole = matrix(column, len(differences)) @ differences
    each = [np.linalg.norm(whole[t : t + len(column)]) for t in took_part]
    return max([np.linalg.norm(whole) / max(1, len(took_part)) ** 0.5, *each]) > 1 + 1e-4


def test_a_row_moves_what_is_noised_by_its_norm(tmp_path, monkeypatch):
    whole = summed(tmp_path, -1)
    for row in (0, 17, 39):  # first, middle, last; 0 is the shortest
        differences = whole - summed(tmp_path, row)
        took_part = np.flatnonzero(np.abs(differences).max(1))
        assert len(took_part) >= 1 and {*(took_part % BANDS)} == {CLASSES[row]}
        assert np.linalg.norm(differences[took_part[0]]) > 0.95  # it is clipped
        assert not moves_too_far(differences)
        assert moves_too_far(differences, np.multiply(COLUMN, 1.1))  # planted
    # Planted: draws of rows 2, 5, ..., 17, ... whatever their class: steps are not 3 apart.
    monkeypatch.setattr("hf_dp.plans.bands.member", lambda block, k, b: b * block + 2)
    planted = tmp_path / "planted"
    assert moves_too_far(summed(planted, -1) - summed(planted, 17))


# -- with what else --


def of_two(folder):
    made = of_four(folder)
    assert are_of_their_classes(made.noted)
    return [{*rows} for _, rows in made.noted], tiny.weights(made.model)


def test_processes_draw_their_parts_of_one_class_and_train_the_same(tmp_path):
    (first, weights), (second, same) = results(2, lambda: of_two(tmp_path))
    assert not any(mine & yours for mine, yours in zip(first, second, strict=True))
    assert any(first) and any(second)
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_views_of_a_row_are_of_its_class_and_users_of_one_with_all_of_their_rows(tmp_path):
    given = {"model": tiny.model(dropout=0.1)}
    made = of_four(tmp_path / "views", views_per_example=2, accountant="rdp", given=given)
    assert are_of_their_classes(made.noted)
    made = users.trainer(tmp_path / "users", bands=2, max_steps=3, target_delta=None)
    made.train()
    assert made.ledger.events == (BandedGaussian(1.0, 2 * 4 / 12, 3, 2),)


def test_a_noised_loss_beside_and_signal_beside_a_rows_noise(tmp_path):
    loss = {"noised_loss_bound": 0.7, "noised_loss_budget_ratio": 0.2, "logging_strategy": "steps"}
    made = tiny.trained(trainer(tmp_path, **loss, accountant="rdp"))
    assert made.ledger.events == (made.privacy_plan.event(7),)
    numbers = sum(p.numel() for p in made.model.parameters())
    row = np.linalg.norm(np.linalg.inv(matrix(COLUMN, 7))[-1])
    expected = numbers**0.5 * row * made.privacy_plan.noise_std / 8
    assert made.mechanism.noise_norm == pytest.approx(expected)
    logged = [row["signal_to_noise"] for row in made.state.log_history if "noised_loss" in row]
    assert max(map(abs, logged)) < 0.5 and len(logged) == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adam_bc_floor": 0.1}, "adam_bc_floor.*independent from step to step"),
        ({"audit_canaries": 10}, "audit_canaries.*independent from step to step"),
        ({"privacy_mode": "dp_fp", "dp_fp_variant": "frozen"}, "bands.*Only DP-SGD"),
        ({"bands": "auto"}, "bands.*without `target_epsilon`"),
        ({"bands": "some"}, "`bands`.*'auto'"),
        ({"given": {"peft_config": RgpConfig(rank=2, task_type="SEQ_CLS")}}, "mean something else"),
        ({"given": {"peft_config": FrostConfig(task_type="SEQ_CLS")}}, "not implemented"),
    ],
)  # fmt: skip
def test_what_bands_do_not_go_with_is_refused(tmp_path, options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        trainer(tmp_path, **options)


# -- auto --

AUTO = {"bands": "auto", "target_epsilon": 8.0, "accountant": "rdp", "max_steps": 30}


def test_auto_takes_what_leaves_the_least_noise_in_the_weights(tmp_path):
    plan = trainer(tmp_path, **AUTO, expected_batch_size=2).privacy_plan
    assert plan.mechanism.draw.bands in (4, 8, 16)
    assert 7.9 < epsilon(plan.events(), plan.delta, "rdp").value <= 8
    # What is independent is best where every row takes part in nearly every step.
    many = trainer(tmp_path / "many", **{**AUTO, "target_epsilon": 0.3}, expected_batch_size=20)
    assert many.privacy_plan.mechanism.draw.name == "poisson"
    steered = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}
    with pytest.raises(UnsupportedArgumentError, match="reduce_lr_on_plateau.*metrics decide"):
        trainer(tmp_path, **AUTO, **steered)
    model = tiny.model()
    given = {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}
    with pytest.raises(UnsupportedArgumentError, match="optimizer or schedule of your own"):
        trainer(tmp_path, **AUTO, given=given)


@pytest.mark.parametrize(
    ("momentum", "options"),
    [
        (0.8, {"warmup_steps": 0.2, "adam_beta1": 0.8}),
        (0.0, {"lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "sgd"}),
        (0.7, {"lr_scheduler_type": "constant", "optim": "sgd", "optim_args": "momentum=0.7"}),
    ],
)
def test_the_workload_is_what_of_each_steps_gradient_the_weights_have(tmp_path, momentum, options):
    """By the rates that Trainer logs."""
    made = tiny.trainer(tmp_path, privacy_mode="non_private", max_steps=10, **options)
    found = np.array(workload_of(made.args, 10))
    made.train()
    logged = [row["learning_rate"] for row in made.state.log_history if "learning_rate" in row]
    steps = np.arange(10)
    kept = np.tril(momentum ** np.clip(steps[:, None] - steps, 0, None))  # [t, s]
    np.testing.assert_allclose(found, logged @ kept / made.args.learning_rate, atol=1e-12)

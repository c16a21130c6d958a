"""Random allocation in whole runs: what is drawn, recorded, resumed and said."""

from dataclasses import replace

import faults
import loops
import pytest
import tiny
import users
from watch import watch

from hf_dp.accounting import RandomAllocationGaussian, epsilon
from hf_dp.cards.verify import verify
from hf_dp.distributed.draws import SharedDraws
from hf_dp.errors import AuditError, BudgetExceededError, InvalidArgumentError, LedgerError
from hf_dp.plans import DpSgdPlan, RandomAllocation
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.samplers import AllocationSampler
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.witnesses import read_run

pytestmark = pytest.mark.usefixtures("unchecked")

# Of 40 rows: 2 steps an epoch.
ALLOCATED = {"sampling": "random_allocation", "expected_batch_size": 20, "logging_strategy": "no"}


def allocations(monkeypatch) -> list[list[list[int]]]:
    """Note each allocation that is drawn."""
    drawn, honest = [], AllocationSampler.__iter__

    def watched(self):
        drawn.append([])
        for batch in honest(self):
            drawn[-1].append(batch)
            yield batch

    monkeypatch.setattr(AllocationSampler, "__iter__", watched)
    return drawn


@pytest.mark.parametrize("workers", [{}, {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4}], ids=["", "workers"])  # fmt: skip
def test_an_epoch_is_recorded_whole_before_its_first_step(tmp_path, monkeypatch, workers):
    """So a part of one costs the whole; and workers draw nothing ahead of the ledger."""
    drawn = allocations(monkeypatch)
    on_disk = watch(
        monkeypatch, PrivateRun, "begin_step", before=lambda _: read_run(tmp_path).ledger.steps()
    )
    trainer = tiny.trained(tiny.trainer(tmp_path, **ALLOCATED, **workers, max_steps=3))
    assert trainer.state.global_step == 3 and on_disk == [2, 2, 4]
    assert workers or (sorted(sum(drawn[0], [])) == list(range(40)) and len(drawn) == 2)
    event = RandomAllocationGaussian(1.0, 2, 4)
    assert trainer.ledger.events == (event,)
    statement = trainer.privacy_statement()
    assert statement.epsilon == epsilon(event, 1 / 80).rounded_up(3)
    assert "2 random allocations, each of up to 2 steps, of DP-SGD" in statement.sentence()
    sampling = statement.plan.words.sampling
    assert sampling.startswith("random allocation: each row joins one of the 2 steps")
    assert "Poisson" not in f"{sampling} {statement.sentence()}"
    trainer.save_model()
    assert verify(tmp_path).outcome != "FAILED"


@pytest.mark.parametrize(("steps", "saved", "steps_in_all"), [(4, 3, 6), (4, 2, 4), (6, 3, 8)])
def test_a_resume_counts_a_new_allocation_unless_an_epoch_has_ended(
    tmp_path, steps, saved, steps_in_all
):
    """Inside an epoch, after step 3, the rest of its allocation is lost."""
    kept = {"max_steps": steps, "save_strategy": "steps", "save_steps": saved}
    given = {"callbacks": [tiny.StopsAfter(saved)]}
    tiny.trainer(tmp_path, **ALLOCATED, **kept, given=given).train()
    again = tiny.resumed(tiny.trainer(tmp_path, **ALLOCATED, **kept), saved)
    assert again.state.global_step == steps
    assert again.ledger.events == (RandomAllocationGaussian(1.0, 2, steps_in_all),)


@pytest.mark.slow  # calibrates for ten seconds
def test_a_resume_does_not_pass_the_target(tmp_path):
    kept = {"max_steps": 10, "save_strategy": "steps", "save_steps": 7, "expected_batch_size": 8}
    target = {"noise_multiplier": None, "target_epsilon": 8.0}
    first = tiny.trained(tiny.trainer(tmp_path, **{**ALLOCATED, **kept}, **target))
    assert 7.9 < first.epsilon().value <= 8
    again = tiny.trainer(tmp_path, **{**ALLOCATED, **kept}, **target)
    with pytest.raises(BudgetExceededError):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert again.ledger.events == first.ledger.events


def test_a_second_call_of_train_begins_anew(tmp_path):
    trainer = tiny.trained(tiny.trainer(tmp_path, **ALLOCATED, max_steps=2))
    trainer.train()
    assert trainer.ledger.events == (RandomAllocationGaussian(1.0, 2, 4),)
    trainer.run.begin_step()  # a step without a recorded allocation lets nothing out
    with pytest.raises(LedgerError, match="recorded allocation"), trainer.run.release_step():
        pass


def test_an_unrecorded_allocation_is_noticed(tmp_path, monkeypatch):
    """A planted bug: the second allocation is drawn without being recorded."""
    honest, begun = SharedDraws.__iter__, []

    def forgetful(self):
        begun.append(1)
        return honest(self if len(begun) == 1 else replace(self, begin=None))

    monkeypatch.setattr(SharedDraws, "__iter__", forgetful)
    with pytest.raises(LedgerError, match="recorded allocation"):
        tiny.trainer(tmp_path, **ALLOCATED, max_steps=4).train()


def test_in_a_loop_of_ones_own(tmp_path):
    trainer = tiny.trainer(tmp_path, **ALLOCATED, max_steps=3)
    assert len(list(loops.steps(trainer.mechanism))) == 3
    assert trainer.ledger.events == (RandomAllocationGaussian(1.0, 2, 4),)


def test_the_batch_is_what_an_epoch_of_whole_steps_gives_and_no_other(tmp_path):
    options = {**ALLOCATED, "expected_batch_size": 9, "num_train_epochs": 3, "max_steps": -1}
    plan = tiny.trainer(tmp_path, **options).privacy_plan
    assert (plan.expected_batch_size, plan.epoch, plan.steps) == (10.0, 4, 12)
    assert plan.sample_rate == 0.25
    assert type(plan).from_dict(plan.to_dict()) == plan
    with pytest.raises(InvalidArgumentError, match=r"`expected_batch_size` to be 40 / 4"):
        PrivacyPlan(40, 9.0, 10, 1 / 80, DpSgdPlan(0.1, 1.0, draw=RandomAllocation()))


def test_users_are_allocated_with_all_of_their_rows(tmp_path, monkeypatch):
    drawn = allocations(monkeypatch)
    options = {**ALLOCATED, "expected_batch_size": 4, "max_steps": 3, "target_delta": None}
    trainer = users.trainer(tmp_path, **options)
    trainer.train()
    count = len(set(users.owners()))
    assert sorted(sum(drawn[0], [])) == list(range(count))
    assert trainer.ledger.events == (RandomAllocationGaussian(1.0, count // 4, 3),)
    assert "each user joins one of the 3 steps" in trainer.privacy_statement().plan.words.sampling


def test_an_audit_refutes_allocations_without_noise(tmp_path, monkeypatch):
    """The planted bug is in the noise; a right run is not refuted (above 99.9 % by chance)."""
    audited = {"audit_canaries": 60, "max_steps": 10, "noise_multiplier": 2.0, "target_delta": 1e-3}
    trainer = tiny.trained(tiny.trainer(tmp_path / "right", **ALLOCATED, **audited))
    assert trainer.privacy_statement().proven
    faults.noise_times(0.0)(monkeypatch)
    trainer = tiny.trainer(tmp_path / "wrong", **ALLOCATED, **audited)
    with pytest.raises(AuditError, match="not as private as it claims"):
        trainer.train()

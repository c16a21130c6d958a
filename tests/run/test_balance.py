"""Balanced experts: what each example adds to the loads, and the loss that they make of it."""

import itertools
import math
from dataclasses import replace

import loops
import pytest
import silence
import tiny
import torch
import users
from models import llama, mixtral, olmoe
from processes import results
from transformers import DataCollatorForLanguageModeling

from hf_dp._borrowed import routers_of
from hf_dp.errors import (
    ConfigError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.mechanisms import mechanism_for
from hf_dp.mechanisms.balance import Balance
from hf_dp.plans.balance import RouterBalance
from hf_dp.plans.dp_sgd import DpSgdPlan

pytestmark = pytest.mark.usefixtures("unchecked")

C, SIGMA, ROWS = 1.0, 1.0, 12
RULE = RouterBalance(0.3, 0.2)
TEXTS = [{"input_ids": [4 + (i * t) % 8 for t in range(2 + i % 4)]} for i in range(ROWS)]


def planned(rule=RULE, **changes):
    own = DpSgdPlan(C, SIGMA, router_balance=rule)
    return loops.plan(**{"rows": ROWS, "mechanism": own, "expected_batch_size": 6, **changes})


def private_run(folder, build=olmoe, plan=None, **given):
    model = build().double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that routers choose unequally
            parameter.add_(0.3 * torch.randn_like(parameter))
    made = loops.run(folder, plan or planned(), model=model, train_dataset=TEXTS, **given)
    made.data_collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    return made


def alone(made, row, estimate):
    """Loads (L, E) and balanced loss of one row, by a forward that transformers records."""
    model, ids = made.model, torch.tensor([row["input_ids"]])
    found = model(ids, labels=ids, output_router_logits=True, use_cache=False)
    chance = torch.stack(found.router_logits).softmax(-1)  # (L, T, E)
    layers, tokens, experts = chance.shape
    k = model.config.num_experts_per_tok
    chosen = torch.zeros_like(chance).scatter(-1, chance.topk(k).indices, 1.0).mean(1)
    loads = (chosen - k / experts) / math.sqrt(layers * k * (1 - k / experts))
    own = model(ids, labels=ids, use_cache=False).loss
    extra = sum(
        estimate[n, e] * chance[n, :, e].mean() for n in range(layers) for e in range(experts)
    )
    return loads.detach(), own + RULE.coefficient * experts / layers * extra


@pytest.mark.parametrize("build", [olmoe, mixtral])
def test_loads_and_gradients_are_those_of_single_rows(build, tmp_path):
    """Weights are those of norms with a bound of their rounding, which is 1e-6 of them."""
    made = private_run(tmp_path, build)
    mechanism = mechanism_for(made)
    balance = mechanism.gauge.balance
    balance.mean, balance.steps = torch.randn_like(balance.mean), 3
    draw = [0, 1, 2, 5, 7]
    clipped = mechanism.clip(loops.batches_of(mechanism, draw))
    expected = {name: torch.zeros_like(p) for name, p in made.model.named_parameters()}
    total, largest = torch.zeros_like(balance.mean), 0.0
    for place in draw:
        loads, loss = alone(made, TEXTS[place], balance.estimate)
        total, largest = total + loads, max(largest, float(loads.norm()))
        names, parameters = zip(*made.model.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)
        ]
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for name, g in zip(names, grads, strict=True):
            expected[name] += g * min(1.0, made.plan.clips_to / norm)
    assert 0.2 < largest <= 1
    torch.testing.assert_close(clipped.beside["loads"], total, rtol=0, atol=1e-11)
    assert users.flat(clipped.values).dtype is torch.float64
    for name, value in expected.items():
        apart = float((clipped.values[name] - value).norm())
        assert apart <= 1e-5 * float(value.norm()) + 1e-12, name


def extreme(experts, k, layers=1):
    """Loads of a row whose tokens all choose the same experts: the largest norm."""
    chosen = torch.zeros(layers, experts, dtype=torch.float64)
    chosen[:, :k] = 1
    return (chosen - k / experts) / math.sqrt(layers * k * (1 - k / experts))


def test_no_row_adds_more_than_its_sensitivity(tmp_path, monkeypatch):
    for experts, k, layers in itertools.product((2, 5, 64), (1, 2), (1, 3)):
        if k < experts:
            assert float(extreme(experts, k, layers).norm()) == pytest.approx(1)
    made = private_run(tmp_path)
    mechanism = mechanism_for(made)
    balance = mechanism.gauge.balance

    def moved(left_out):
        sums = [
            mechanism.clip(loops.batches_of(mechanism, draw)).beside["loads"]
            for draw in (range(ROWS), [i for i in range(ROWS) if i != left_out])
        ]
        return float((sums[0] - sums[1]).norm())

    assert all(0 < moved(row) <= 1 for row in (0, 5, ROWS - 1))
    known = balance.chosen, balance.largest
    balance.chosen, balance.largest = 6, math.sqrt(6 * (1 - 6 / 8) * balance.layers)
    balance._shares = torch.zeros((1, *balance.mean.shape), dtype=torch.float64)  # without tokens
    balance.add(total := torch.zeros_like(balance.mean), torch.zeros(1))
    assert 1 - 1e-9 < float(total.norm()) <= 1
    balance.chosen, balance.largest = known
    balance._shares[:] = math.nan
    balance.add(total := torch.zeros_like(balance.mean), torch.zeros(1))
    assert not total.any()
    with monkeypatch.context() as patch:  # planted: tokens are counted, without a clip
        tokens = lambda self, total, losses: total.add_((3 * self._shares / self.largest).sum(0))  # noqa: E731
        patch.setattr(Balance, "add", tokens)
        assert max(moved(row) for row in range(ROWS)) > 1


def test_the_noised_loads_of_a_step_enter_the_losses_of_the_next_and_are_kept(tmp_path):
    made = private_run(tmp_path / "run", insecure_seed=0)
    mechanism = mechanism_for(made)
    balance, expected = mechanism.gauge.balance, 0.0
    assert not balance.estimate.any()
    for clipped in loops.steps(mechanism):
        expected = 0.9 * expected + 0.1 * clipped.beside["loads"] / 6  # noised in place
    torch.testing.assert_close(balance.mean, expected)
    spread = balance.mean.std() / (0.1 * math.sqrt((1 - 0.81**4) / 0.19))
    assert float(spread) == pytest.approx(2 / 6, rel=0.5)  # sigma_b = sqrt(0.8 / 0.2)
    mechanism.save(tmp_path)
    again = mechanism_for(private_run(tmp_path / "again"))
    again.gauge.load(str(tmp_path))
    assert torch.equal(again.gauge.balance.estimate, balance.estimate) and balance.estimate.any()
    with pytest.raises(ConfigError, match="Cannot resume"):
        again.gauge.load(str(tmp_path / "again"))


def test_the_event_has_the_loads_and_costs_what_the_budget_says():
    plan = planned(accountant="pld")
    event = plan.event()
    assert event.noise_multipliers == {"sum": SIGMA, "loads": pytest.approx(2.0)}
    assert event.joint_noise_multiplier == pytest.approx(SIGMA * math.sqrt(1 - RULE.budget_ratio))
    assert type(plan).from_dict(plan.to_dict()) == plan
    assert (
        "noised loads" in plan.words.name
        and "noise multiplier 2" in plan.mechanism.outline(plan)[-1]
    )


def test_what_it_is_not_implemented_with_is_refused(tmp_path):
    for name in ("router_balance", "router_balance_budget_ratio"):
        for value in (0, -1, math.nan, "much"):
            with pytest.raises(InvalidArgumentError, match=f"`{name}`"):
                DpSgdPlan.of(C, 1.0, **{"router_balance": 0.1, name: value})
    with pytest.raises(UnsupportedArgumentError, match="bands"):
        DpSgdPlan.of(C, 1.0, router_balance=0.1, bands=2)
    with pytest.raises(UnsupportedModelError, match="has no routers that hf_dp knows"):
        mechanism_for(private_run(tmp_path / "llama", llama))
    for attribute, value in (("top_k", 1), ("num_experts", None)):
        other = private_run(tmp_path / "other")
        setattr(routers_of(other.model)[1], attribute, value)
        with pytest.raises(UnsupportedModelError, match="no routers that hf_dp knows"):
            mechanism_for(other)
    other = private_run(tmp_path / "other")
    mechanism = mechanism_for(other)
    batches = loops.batches_of(mechanism, [0])
    mechanism.gauge.balance.chosen = 3  # as if routers returned something else
    with pytest.raises(UnsupportedModelError, match="Expected each of 2 routers .* 0 did"):
        other.losses(batches[0])
    made = private_run(tmp_path)
    made.model.gradient_checkpointing_enable()
    with pytest.raises(
        UnsupportedArgumentError, match="`router_balance` to be unset with gradient_ch"
    ):
        mechanism_for(made).prepare()
    views = loops.plan(rows=ROWS, mechanism=replace(planned().mechanism, views_per_example=2))
    with pytest.raises(UnsupportedArgumentError, match="unset with views_per_example"):
        mechanism_for(private_run(tmp_path / "views", plan=views)).prepare()


@pytest.mark.slow
def test_two_processes_balance_as_one(tmp_path):
    def weights(folder):
        collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
        given = {
            "model": olmoe().double(),
            "train_dataset": TEXTS,
            "eval_dataset": None,
            "data_collator": collator,
        }
        options = {
            **silence.PLAIN_STEPS,
            "max_steps": 3,
            "router_balance": 10.0,
            "expected_batch_size": ROWS,
        }
        made = silence.silenced(tiny.trainer(folder, given=given, **options))
        made.train()
        return silence.weights(made), made.mechanism.gauge.balance.mean

    expected, mean = weights(tmp_path / "one")
    assert float(mean.norm()) > 0.01
    for found, own in results(2, lambda: weights(tmp_path / "two")):
        torch.testing.assert_close(own, mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_run_of_a_trainer_is_balanced_and_says_so(tmp_path):
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    given = {
        "model": olmoe(dtype=torch.float32),
        "train_dataset": TEXTS,
        "eval_dataset": None,
        "data_collator": collator,
    }
    options = {"max_steps": 2, "router_balance": 0.01, "expected_batch_size": 6}
    made = tiny.trained(tiny.trainer(tmp_path, given=given, **options))
    assert made.mechanism.gauge.balance.steps == 2
    made.save_model()
    assert "noised loads of experts" in (tmp_path / "README.md").read_text()

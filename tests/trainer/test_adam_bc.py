"""DP-AdamBC: the noise's variance is taken off the second moment, and nothing else changes."""

import pytest
import tiny
import torch
from torch import nn
from watch import watch

from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.features.adam_bc import DPAdamBC
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.rgp import RgpConfig

pytestmark = pytest.mark.usefixtures("unchecked")


def by_hand(gradients, variance, floor, lr, betas, decay):
    """Algorithm 1 of Tang et al., number by number in Python."""
    weight, m, v = 1.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        first, second = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        weight -= lr * decay * weight
        weight -= lr * first / max(second - variance, floor * variance) ** 0.5
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_algorithm_1(decay):
    gradients = [0.3, -0.1, 0.02, 0.5, -0.4, 0.0]
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = DPAdamBC([weight], 0.04, 0.1, 0.05, (0.8, 0.9), decay)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    expected = by_hand(gradients, 0.04, 0.1, 0.05, (0.8, 0.9), decay)
    assert weight.item() == pytest.approx(expected, rel=1e-12)
    plain = by_hand(gradients, 1e-12, 1e-4, 0.05, (0.8, 0.9), decay)
    assert abs(expected - plain) > 0.01  # with no variance taken off


def test_coordinates_get_back_their_own_steps():
    """Of two coordinates with gradients 1 and 0.1 under noise of 3, Adam's steps are 7 : 1 by their
    signal alone; corrected, they are nearer to 1 : 1, as without noise."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.tensor([1.0, 0.1]).repeat_interleave(5000)
    ratios = {}
    for name in ("adam", "corrected"):
        weight = nn.Parameter(torch.zeros(10000))
        plain = torch.optim.AdamW([weight], 1e-3, weight_decay=0)
        optimizer = plain if name == "adam" else DPAdamBC([weight], 9.0, 1e-3)
        for _ in range(600):
            weight.grad = signal + 3 * torch.randn(10000, generator=generator)
            optimizer.step()
        moved = weight.detach().view(2, 5000).mean(1)
        ratios[name] = (moved[0] / moved[1]).item()
    assert ratios["adam"] > 8
    assert ratios["corrected"] < 0.8 * ratios["adam"]


def test_the_trainer_takes_off_the_noise_that_it_adds(tmp_path):
    trainer = tiny.trainer(tmp_path, adam_bc_floor=0.2, weight_decay=0.01, max_steps=2)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, DPAdamBC)
    plan = trainer.privacy_plan
    assert optimizer.noise_variance == pytest.approx((plan.noise_std / 8) ** 2)
    assert optimizer.floor == 0.2
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01, 0.0}


def test_its_variance_is_that_of_gradients(tmp_path, monkeypatch):
    """Measured on what the optimizer gets: 3,282 coordinates of mostly noise, whose mean square has a
    relative standard deviation of 2.5 %."""
    trainer = tiny.trainer(tmp_path, adam_bc_floor=0.2, noise_multiplier=50.0, max_steps=1)

    def numbers(optimizer, *given):
        grads = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        return torch.cat(grads).double().square().mean().item(), optimizer.noise_variance

    seen = watch(monkeypatch, DPAdamBC, "step", before=numbers)
    trainer.train()
    ((square, variance),) = seen
    assert square == pytest.approx(variance, rel=0.15)


def test_a_resumed_run_goes_on_with_its_moments(tmp_path):
    kept = {"adam_bc_floor": 0.2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    tiny.trainer(tmp_path, **kept).train()
    optimizer = tiny.resumed(tiny.trainer(tmp_path, **kept), 1).optimizer.optimizer
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_other_noise_is_refused(tmp_path):
    class Own(DPTrainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            return self.optimizer

    own = tiny.trainer(tmp_path / "own", cls=Own, adam_bc_floor=0.1)
    with pytest.raises(UnsupportedArgumentError, match=r"does not call super\(\)"):
        own.train()
    assert own.ledger.steps() == 0
    with pytest.raises(UnsupportedArgumentError, match="`adam_bc_floor` to be unset with this"):
        tiny.trainer(tmp_path, adam_bc_floor=0.1, given={"peft_config": RgpConfig()})
    model = tiny.model()
    own = {"model": model, "optimizers": (torch.optim.SGD(model.parameters()), None)}
    with pytest.raises(UnsupportedArgumentError, match="optimizer of your own"):
        tiny.trainer(tmp_path, adam_bc_floor=0.1, given=own)
    with pytest.raises(InvalidArgumentError, match="`noise_variance`"):
        DPAdamBC([nn.Parameter(torch.ones(1))], 0.0, 0.1)

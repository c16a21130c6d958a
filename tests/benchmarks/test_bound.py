"""The arithmetic bound against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dp.benchmarks.bound import LinearUse, Trace, count_flops, trace_model
from hf_dp.benchmarks.workload import Workload, build_model


def flops_of(*uses: LinearUse, **rest):
    return count_flops(Trace(list(uses), **rest))


def test_one_layer_by_hand():
    flops = flops_of(LinearUse(1, positions=2, inputs=10, outputs=20))
    assert flops.non_private == 6 * 2 * 10 * 20 == 2400
    assert (
        flops.norms == 2 * 2**2 * (10 + 20) == 240
    )  # the Gram form: g^T a would cost 2 * 2 * 200 = 800
    assert (
        flops.norms_symmetric == 2 * 3 * 30 == 180
    )  # three of the four entries of each Gram matrix
    assert flops.second_backward == 2 * 2 * 10 * 20
    assert flops.bound("book_keeping") == pytest.approx(2400 / 2640)
    assert flops.bound("book_keeping", symmetric=True) == pytest.approx(2400 / 2580)
    assert flops.bound("two_pass") == pytest.approx(2400 / (2400 + 240 + 800))
    assert flops.bound("opacus_ghost") is None


def test_the_cheaper_norm_is_chosen():
    # T = 100, LoRA's rank 8: the Gram form costs 2 * 10^4 * 776, forming the gradient 2 * 100 * 768
    # * 8
    assert flops_of(LinearUse(1, 100, 768, 8)).norms == 2 * 100 * 768 * 8 == 1_228_800
    # T (T + 1)(d + p) = 6 * 9 is under 2 T d p = 4 * 20 although 2 T^2 (d + p) = 72 is, too
    assert (
        flops_of(LinearUse(1, 2, 4, 5)).norms,
        flops_of(LinearUse(1, 2, 4, 5)).norms_symmetric,
    ) == (72, 54)


@pytest.mark.parametrize(
    ("trains", "input_gradient", "products"),
    [(True, True, 3), (False, True, 2), (True, False, 2), (False, False, 1)],
)
def test_only_the_gradients_needed_are_counted(trains, input_gradient, products):
    flops = flops_of(LinearUse(1, 7, 30, 50, trains, input_gradient))
    assert flops.non_private == products * 2 * 7 * 30 * 50
    assert (flops.norms > 0) == trains
    assert flops.second_backward == input_gradient * 2 * 7 * 30 * 50


def test_reuse_counts_all_positions_of_a_weight_and_a_tie_its_cross_term():
    twice = flops_of(LinearUse(1, 3, 100, 200), LinearUse(1, 3, 100, 200))
    assert twice.norms == 2 * 6**2 * 300  # one Gram over six positions, not two over three
    tied = flops_of(LinearUse(1, 3, 10, 1000), lookups={1: 4, 2: 5})
    assert tied.norms == 2 * 3**2 * 1010 + 2 * 3 * 4 * 10


def test_attention_and_recomputation():
    use = LinearUse(1, 2, 10, 20, recomputed=True)
    flops = count_flops(Trace([use], attention=100, attention_recomputed=True))
    assert flops.non_private == 2400 + 3 * 100 + (800 + 100)
    assert flops.second_backward == 800 + 2 * 100 + (800 + 100)


def test_roberta_base_pays_eight_percent_as_the_issue_says():
    square, up, down = (768, 768), (768, 3072), (3072, 768)
    uses = [LinearUse(i, 128, *size) for i, size in enumerate([square] * 4 + [up, down])]
    flops = flops_of(*uses)
    assert flops.norms / flops.non_private == pytest.approx(0.083, abs=0.001)


def test_the_trace_of_a_tied_decoder():
    workload = Workload("tiny", length=10, threads=1)
    trace = trace_model(build_model(workload), workload)
    h, t = 16, 10
    block = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    assert sorted((u.inputs, u.outputs) for u in trace.linear) == sorted([*block, *block, (h, 64)])
    assert all(u.positions == t and u.trains and u.input_gradient for u in trace.linear)
    assert trace.attention == 2 * 4 * t * t * h
    assert trace.lookups[trace.linear[-1].weight] == t  # the head's weight is the token embedding's
    grams = 2 * sum(min(2 * t * t * (d + p), 2 * t * d * p) for d, p in block) + min(
        2 * t * t * 80, 2 * t * h * 64
    )
    assert count_flops(trace).norms == grams + 2 * t * t * h


def test_the_trace_of_a_classifier_sees_that_its_head_has_one_position():
    workload = Workload("tiny-bert", length=10, threads=1)
    trace = trace_model(build_model(workload), workload)
    assert sorted(u.positions for u in trace.linear) == [1, 1] + [10] * 12  # pooler and classifier


def test_the_trace_of_lora():
    workload = Workload("tiny", length=10, threads=1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(build_model(workload), config)
    trace = trace_model(model.train(), workload)
    trained = [(u.inputs, u.outputs, u.input_gradient) for u in trace.linear if u.trains]
    # below the first block nothing trains, so its A needs no input gradient
    assert trained == [(16, 4, False), (4, 48, True), (16, 4, True), (4, 48, True)]
    frozen = [u.input_gradient for u in trace.linear if not u.trains]
    assert frozen == [False] + [True] * 8
    assert count_flops(trace).norms == sum(
        min(200 * (d + p), 20 * d * p) for d, p, _ in trained
    )  # no tie: it is frozen


def test_checkpointed_blocks_run_twice():
    plain, checkpointed = (
        count_flops(trace_model(build_model(w), w))
        for w in (
            Workload("tiny", threads=1),
            Workload("tiny", threads=1, gradient_checkpointing=True),
        )
    )
    t, h = 12, 16
    blocks = 2 * (2 * t * 12 * h * h) + 2 * 4 * t * t * h
    assert checkpointed.non_private == plain.non_private + blocks
    assert checkpointed.norms == plain.norms


def test_the_trace_leaves_no_hook_and_no_gradient():
    workload = Workload("tiny", threads=1)
    model = build_model(workload)
    state = torch.get_rng_state()
    trace_model(model, workload)
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, nn.Linear))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())

"""Every number of ``tests/golden/accounting.json``, which names its source."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest

from hf_dp.accounting import (
    BestOfRandomRuns,
    Gaussian,
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    calibrate_noise_multiplier,
    epsilon,
    gdp_clt,
)
from hf_dp.errors import AccountingRangeError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "accounting.json").read_text())
SST2, SST2_STEPS, SST2_DELTA = 1024 / 67349, 198, 1 / (2 * 67349)


def rows(name: str, fast: Callable[[dict], bool] = lambda row: row["steps"] <= 2000) -> list:
    """All rows; those that are not ``fast`` take seconds each."""
    return [
        pytest.param(row, marks=[] if fast(row) else [pytest.mark.slow]) for row in GOLDEN[name]
    ]


def event_of(row: dict) -> PoissonSampledGaussian:
    return PoissonSampledGaussian(row["sigma"], row["q"], row["steps"])


# One whose losses of a step are below the coarse grid is among the fast ones, and none between two
# others.
@pytest.mark.parametrize(
    "row",
    rows(
        "grid",
        lambda row: row["tight"] == 0.0593450952 or (row["steps"] <= 1000 and row["sigma"] != 0.6),
    ),
)
def test_grid(row):
    event, delta, tight = event_of(row), row["delta"], row["tight"]
    assert tight - 1e-5 <= epsilon(event, delta).value <= tight + 1.6e-3
    assert row["rdp"] * (1 - 1e-7) <= epsilon(event, delta, "rdp").value <= row["rdp"] * 1.003
    # Without sampling the limit is not needed: ours is exact there, the table's is not.
    clt = row["clt"] if row["q"] < 1 else tight
    assert epsilon(event, delta, "gdp_clt").value == pytest.approx(clt, rel=1e-6)
    try:
        prv = epsilon(event, delta, "prv")
    except AccountingRangeError:  # its own defects, tested elsewhere
        return
    assert prv.estimate == pytest.approx(row["prv"], abs=1e-5)
    assert tight <= prv.value <= tight + 0.013


@pytest.mark.parametrize("row", rows("grid", lambda row: row["steps"] <= 100))
def test_the_oracle_agrees_with_the_grid(row):
    assert oracle.epsilon([(row["sigma"], row["q"], row["steps"])], row["delta"]) == pytest.approx(
        row["tight"], abs=2e-4
    )


SMALL = {(1.0, 1e-12), (0.8, 1e-8)}  # (1e-11 in test_tilted.py, in extended precision)


@pytest.mark.parametrize(
    "row", rows("tiny_delta", lambda row: row["q"] == 1 or (row["sigma"], row["delta"]) in SMALL)
)
def test_tiny_deltas(row):
    """No bound below the truth, whatever delta; PLD refuses below 1e-11."""
    event, delta, tight = event_of(row), row["delta"], row["tight"]
    assert oracle.epsilon([(row["sigma"], row["q"], row["steps"])], delta) == pytest.approx(
        tight, abs=5e-4
    )
    if "rdp" in row:  # the table's has fewer orders
        assert row["rdp"] * (1 - 1e-3) <= epsilon(event, delta, "rdp").value <= row["rdp"] * 1.003
    if row["q"] == 1:  # in closed form, with no limit on delta
        assert epsilon(event, delta).value == pytest.approx(tight, abs=1e-5)
    elif delta >= 1e-11:
        assert tight <= epsilon(event, delta).value <= tight + 1.6e-3
    else:
        with pytest.raises(AccountingRangeError, match='accountant="rdp"'):
            epsilon(event, delta)
    if delta >= 1e-11:
        assert tight <= epsilon(event, delta, "prv").value <= tight + 0.013


# "compose tradeoff func." of Li et al. 2021, Table 1: 1024 x factor examples a step; E2E with the
# public script's delta.
PRINTED_PRV = {"1024xfactor", "delta_8e-6_repo"}
# The central-limit column: not SST-2's, whose two printed figures come from different runs.
PRINTED_CLT = {"MNLI", "QQP", "QNLI", "E2E"}


def in_table_1(row: dict) -> bool:
    return row["config"] == "1024xfactor" and row["task"] == "SST2"


@pytest.mark.parametrize("row", rows("li_2021", in_table_1))
def test_li_2021(row):
    event, delta = event_of(row), row["delta"]
    assert epsilon(event, delta, "rdp").value == pytest.approx(row["target"], rel=2e-3)
    assert epsilon(event, delta, "gdp_clt").value == pytest.approx(row["clt"], rel=1e-6)
    prv = epsilon(event, delta, "prv")
    assert prv.estimate == pytest.approx(row["prv"], abs=1e-3)
    assert prv.estimate <= epsilon(event, delta).value <= prv.estimate + 1.6e-3
    if row["config"] == "1024xfactor":
        # To the digit, to nearest; our bounds lie above.
        assert round(prv.estimate, 2) == row["printed"]["prv"]
        assert epsilon(event, delta).rounded_up(2) >= row["printed"]["prv"]
    if row["config"] in PRINTED_PRV and row["task"] == "E2E":
        assert prv.estimate == pytest.approx(row["printed"]["prv"], abs=0.011)
    if row["config"] == "1024xfactor" and row["task"] in PRINTED_CLT:
        assert epsilon(event, delta, "gdp_clt").value == pytest.approx(
            row["printed"]["gdp_clt"], abs=0.055
        )


def test_the_central_limit_figure_of_sst2_is_of_another_run():
    """Table 1 prints 1.73 and 4.33, which its own columns do not give.

    The run of the other columns gives 1.544 and 4.039. 2000 examples a step and 102 steps give the
    printed figures, but then the composed trade-off function gives 2.50 and 6.76 where 2.41 and 6.69
    are printed.
    """
    for target, printed in ((3, 1.73), (8, 4.33)):
        found = {
            row["config"]: row
            for row in GOLDEN["li_2021"]
            if row["task"] == "SST2" and row["target"] == target
        }
        other = found["B2000_matches_clt_only"]
        assert epsilon(event_of(found["1024xfactor"]), SST2_DELTA, "gdp_clt").value < printed - 0.18
        assert epsilon(event_of(other), SST2_DELTA, "gdp_clt").value == pytest.approx(
            printed, abs=0.005
        )
        assert epsilon(event_of(other), SST2_DELTA, "prv").estimate > other["printed"]["prv"] + 0.06


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in GOLDEN["li_2021"] if row["config"] == "1024xfactor"]
)
def test_noise_calibrated_by_pld(row):
    found = calibrate_noise_multiplier(row["target"], row["delta"], row["q"], row["steps"])
    # Above it by our slack of 1e-3 of epsilon.
    assert row["sigma_pld"] * (1 - 1e-5) <= found <= row["sigma_pld"] * (1 + 5e-4)


@pytest.mark.parametrize(
    "row", rows("frost", lambda row: row["delta"] == 1e-5 and row["target"] == 0.5)
)
def test_frost_pairs(row):
    events = [
        PoissonSampledGaussian(row[f"sigma_{part}"], row[f"q_{part}"], row[f"steps_{part}"])
        for part in ("selection", "training")
    ]
    delta, alone = row["delta"], [epsilon(event, row["delta"], "rdp").value for event in events]
    assert row["tight"] - 1e-4 <= epsilon(events, delta).value <= row["tight"] + 1.6e-3
    assert row["rdp"] * (1 - 1e-6) <= epsilon(events, delta, "rdp").value <= row["rdp"] * 1.002
    assert epsilon(reversed(events), delta) == epsilon(events, delta)
    assert epsilon(events, delta, "prv").estimate == pytest.approx(row["tight"], abs=1e-3)
    assert epsilon(events, delta, "gdp_clt").value == pytest.approx(row["clt"], rel=1e-6)
    assert alone[0] == pytest.approx(row["rdp_selection_alone"], rel=3e-3)
    mechanisms = [(event.noise_multiplier, event.sample_rate, event.steps) for event in events]
    assert oracle.epsilon(mechanisms, delta) == pytest.approx(row["tight"], abs=2e-4)
    assert sum(alone) > 1.3 * row["rdp"]  # Composing epsilons instead of curves would not do.


@pytest.mark.parametrize("row", GOLDEN["dp_fp"])
def test_dp_fp_calibration(row):
    """Du and Mi 2021: noise by equation 11, for the epsilon of the central limit theorem."""
    found = gdp_clt.noise_multiplier(row["clt"], row["delta"], row["q"], row["steps"])
    assert found == pytest.approx(row["sigma"], abs=1e-6)
    total = math.sqrt(math.expm1(found**-2) * row["steps"]) * row["q"]
    assert gdp_clt.gaussian_epsilon(total, row["delta"]) == pytest.approx(row["clt"], abs=1e-9)
    again = epsilon(event_of({**row, "sigma": found}), row["delta"], "gdp_clt").value
    assert row["clt"] * (1 - 1e-11) <= again <= row["clt"]  # never above its target


@pytest.mark.slow
@pytest.mark.parametrize("row", GOLDEN["dp_fp"])
def test_what_dp_fp_would_cost_by_other_accountants(row):
    """Figures that would follow if the amplification held that the paper claims.

    It prints Li et al.'s figures there: 3 and 2.41, 8 and 6.69.
    """
    event = event_of(row)
    assert row["tight"] - 1e-3 <= epsilon(event, row["delta"]).value <= row["tight"] + 3e-3
    by_rdp = epsilon(event, row["delta"], "rdp").value
    assert row["rdp"] * (1 - 1e-3) <= by_rdp <= row["rdp"] * 1.004
    assert epsilon(event, row["delta"], "prv").estimate == pytest.approx(row["prv"], abs=1e-3)


SAMPLERS = [
    GOLDEN["samplers"][0],
    *(pytest.param(row, marks=pytest.mark.slow) for row in GOLDEN["samplers"][1:]),
]


@pytest.mark.parametrize("row", SAMPLERS)
def test_relations_and_samplers(row):
    event = PoissonSampledGaussian(row["sigma"], SST2, SST2_STEPS)
    for relation, tight in (
        ("zero_out", row["poisson"]),
        ("add_remove", row["poisson"]),
        ("replace_one", row["poisson_replace_one"]),
    ):
        assert tight - 1e-6 <= epsilon(event, SST2_DELTA, relation=relation).value <= tight + 1.6e-3
    # Shuffled batches: one Gaussian an epoch is all that can be claimed.
    once = Gaussian(row["sigma"], 3)
    assert epsilon(once, SST2_DELTA).value == pytest.approx(row["once_per_epoch"], abs=2e-3)
    replaced = epsilon(once, SST2_DELTA, relation="replace_one").value
    assert replaced == pytest.approx(row["once_per_epoch_replace_one"], abs=2e-3)
    assert replaced == pytest.approx(
        oracle.gaussian(2 * math.sqrt(3) / row["sigma"], SST2_DELTA), abs=2e-3
    )


@pytest.mark.slow  # (fast, and independent of dp-accounting, in test_sampled_sums.py)
@pytest.mark.parametrize("row", GOLDEN["samplers"])
@pytest.mark.parametrize("cap", ["1152", "1088", "1216"])
def test_truncated_samples(row, cap):
    event = TruncatedPoissonSampledGaussian(row["sigma"], SST2, SST2_STEPS, 67349, int(cap))
    assert epsilon(event, SST2_DELTA).value == pytest.approx(row["capped"][cap] + 1e-3, abs=1e-4)
    assert epsilon(event, SST2_DELTA).value > row["poisson"]


SHAPES = {"logarithmic": 0.0, "tnb_0.5": 0.5, "geometric": 1.0}


@pytest.mark.parametrize("row", GOLDEN["tuning"])
def test_tuning(row):
    run, kind = PoissonSampledGaussian(row["sigma"], SST2, SST2_STEPS), row["distribution"]
    if kind == "naive_composition_pld":  # of so many runs, all of which may be released
        found = epsilon([run] * row["mean_runs"], SST2_DELTA).value
        assert row["epsilon"] <= found + 1e-6 <= row["epsilon"] + 1.6e-3
        return
    shape = (
        {"distribution": "poisson", "shape": None} if kind == "poisson" else {"shape": SHAPES[kind]}
    )
    search = BestOfRandomRuns((run,), row["mean_runs"], **shape)
    assert epsilon(search, SST2_DELTA, "rdp").value == pytest.approx(row["epsilon"], rel=1e-6)

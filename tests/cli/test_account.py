"""``hf-dp account`` as a user calls it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from quick import run_quickly
from statements import rewrite

from hf_dp.accounting import Ledger, LedgerEntry, PoissonSampledGaussian, epsilon, round_up
from hf_dp.cli.main import main
from hf_dp.cli.options import Parser
from hf_dp.plans import PrivacyPlan
from hf_dp.run.ledger_file import LEDGER, Lines, write_head, write_line
from hf_dp.statement import evidence as document
from hf_dp.statement.durable import Beside
from hf_dp.statement.facts import RunFacts, Weaknesses
from hf_dp.statement.statement import PrivacyStatement

RUN = ["--sample-rate", "0.0152043831", "--steps", "198", "--delta", "7.424e-6"]
EPSILON = ["account", "epsilon", "--noise-multiplier", "0.82539", *RUN]


# Accountant, kind, epsilon.
EVERY = [
    ["pld", "bound", "2.412"],
    ["rdp", "bound", "3.001"],
    ["prv", "bound", "2.421"],
    ["gdp_clt", "estimate", "1.545"],
]
IMPORTED = """
import os, sys
from hf_dp.cli.main import main
for name in ("gdp_clt", "pld", "prv"):
    assert main([*sys.argv[1:], "--accountant", name]) == 0
    heavy = {"torch", "transformers", "dp_accounting", "prv_accountant"} & set(sys.modules)
    print(os.times().user + os.times().system, *sorted(heavy))
import hf_dp.cards.card, hf_dp.statement.evidence
assert main("plan --num_examples 300 --expected_batch_size 32 --noise_multiplier 1".split()) == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_numbers_and_cards_need_no_torch_and_an_accountants_package_only_when_asked_for():
    """(CPU time: the machine may be busy.)"""
    words = [sys.executable, "-c", IMPORTED, *EPSILON]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    estimate, pld, prv = [line.split() for line in done.stdout.splitlines()[2:9:3]]
    assert float(estimate[0]) < 1.0 and float(pld[0]) < 3.0
    assert estimate[1:] == [] and pld[1:] == ["dp_accounting"]
    assert prv[1:] == ["dp_accounting", "prv_accountant"]


def test_every_accountant_with_its_kind(printed):
    rows = [line.split() for line in printed(*EPSILON, "--cross-check").splitlines()]
    assert [row[:3] for row in rows[1:]] == EVERY


def test_module_form_and_help_is_quick():
    done = run_quickly("-m", "hf_dp.cli.main", "account", "noise", "--help")
    assert done.returncode == 0
    for text in ("default: pld", "example", "--target-epsilon", "batch size"):
        assert text in done.stdout


def test_json_and_one_accountant(printed):
    data = json.loads(printed(*EPSILON, "--accountant", "rdp", "--json"))
    event = PoissonSampledGaussian(0.82539, 0.0152043831, 198)
    value = round_up(epsilon(event, 7.424e-6, "rdp").value)
    assert data == {
        "event": event.to_dict(),
        "delta": 7.424e-6,
        "relation": "zero_out",
        "results": [{"accountant": "rdp", "kind": "bound", "epsilon": value}],
    }


def test_no_noise_is_inf(printed):
    words = ["account", "epsilon", "--noise-multiplier", "0", *RUN, "--json", "--cross-check"]
    results = json.loads(printed(*words))["results"]
    assert [row["epsilon"] for row in results] == ["inf"] * 4


def test_noise_in_both_spellings(printed):
    words = [*RUN, "--accountant=rdp", "--target-epsilon", "3"]
    found = json.loads(printed("account", "noise", *words, "--json"))
    assert found["event"]["noise_multiplier"] == pytest.approx(0.8254, abs=1e-4)
    assert found["results"][0]["epsilon"] <= 3
    words[-2] = "--target_epsilon"
    first, _, row = printed("account", "noise", *words).splitlines()
    assert first == f"noise multiplier {found['event']['noise_multiplier']}"
    assert row.split() == ["rdp", "bound", "3.000"]


def test_one_accountant_out_of_range_does_not_hide_the_others(printed, refused):
    words = ["account", "epsilon", "--noise-multiplier", "0.2", *RUN]
    lines = printed(*words, "--cross-check").splitlines()
    assert "not computed" in lines[1]
    assert lines[2].split()[:2] == ["rdp", "bound"]
    refused([*words, "--accountant", "pld"], 'Use accountant="rdp"')


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["account", "epsilon", "--noise-multiplier", "1", "--sample-rate", "1.5", "--steps", "1", "--delta", "1e-5"],
         "`sample_rate` to be in [0, 1], got 1.5. It is expected_batch_size / num_examples"),
        (["account", "noise", "--target-epsilon", "3", *RUN, "--accountant", "gdp_clt"], "Calibration needs a bound"),
        (["account", "noise", "--target-epsilon", "-3", *RUN], "`target_epsilon` to be > 0"),
        (["acount"], "got 'acount'. Did you mean 'account'?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_on_stderr(words, match, refused):
    refused(words, match)


def test_missing_and_abbreviated_options(capsys):
    for words in (
        ["account", "epsilon"],
        ["account"],
        [*EPSILON, "--accountant", "moments"],
        [*EPSILON[:2], "--noise", "1", *RUN],
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
    assert "--noise-multiplier" in capsys.readouterr().err


def test_top_level(printed, capsys):
    assert "account" in printed("--help")
    assert main([]) == 2
    assert capsys.readouterr().out == ""


def test_names_of_options_have_hyphens_or_underscores_and_values_stay():
    parser = Parser("x")
    parser.add_argument("--a-b")
    parser.add_argument("--c_d", nargs=2)
    words = ["--a_b=c_d", "--c-d", "e_f", "x", "--g_h"]
    given, others = parser.parse_known_args(words)
    assert (given.a_b, given.c_d, others) == ("c_d", ["e_f", "x"], ["--g_h"])


def test_one_accountant_by_default_and_a_relation(printed, refused):
    replaced = [*EPSILON, "--relation", "replace_one"]
    for words, value in ((EPSILON, "2.412"), (replaced, "2.901")):
        assert printed(*words).splitlines()[1].split() == ["pld", "bound", value]
    refused([*replaced, "--accountant", "rdp"], "does not know relation 'replace_one'")


class TestLedger:
    """``hf-dp account ledger``: what a run recorded, computed again."""

    @pytest.fixture
    def folder(self, tmp_path):
        plan = PrivacyPlan.create(
            num_examples=67349, expected_batch_size=1024, clipping_norm=0.1,
            noise_multiplier=0.82539, max_steps=198,
        )  # fmt: skip
        ledger = Ledger()
        ledger.append(plan.event(), "training")
        facts = RunFacts("all parameters", "float32", "SFC64, seeded by the system", "the system's")
        statement = PrivacyStatement.from_ledger(plan, ledger, facts)
        evidence = document.Evidence(plan, ledger, "a-run").stating(statement, Beside())
        document.write(tmp_path, evidence)
        return tmp_path

    def test_is_computed_again(self, folder, printed):
        out = printed("account", "ledger", str(folder), "--cross-check")
        assert "run a-run, status: proven" in out
        event = "PoissonSampledGaussian(noise_multiplier 0.82539, sample_rate 0.0152"
        assert f"training: {event}" in out
        assert "stated epsilon: 2.412; consistent: it follows from the plan and the ledger" in out
        rows = [line.split()[:3] for line in out.splitlines()]
        assert all(row in rows for row in EVERY)
        found = json.loads(printed("account", "ledger", str(folder / "privacy.json"), "--json"))
        assert found["stated_epsilon"] == 2.412
        assert found["results"] == [{"accountant": "pld", "kind": "bound", "epsilon": 2.412}]

    @pytest.mark.parametrize(
        ("edit", "match"),
        [
            (lambda data: data["statement"].update(epsilon=1.5), "epsilon is stated as 1.5"),
            (lambda data: data["plan"].update(steps="a"), "was edited"),
        ],
    )
    def test_what_does_not_follow_from_the_ledger(self, folder, refused, edit, match):
        """Each kind of it: tests/cards/test_document.py."""
        rewrite(folder / "privacy.json", edit)
        refused(["account", "ledger", str(folder)], match)

    def test_where_no_epsilon_holds_none_is_printed(self, folder, tmp_path, printed):
        known = document.read(folder)
        for weak, reason in (
            ({"insecure_seed": True}, "noise and sampling came from a fixed seed"),
            ({"observers": ("spy",)}, "spy, which is not hf_dp's, saw"),
        ):
            running = replace(known, weaknesses=Weaknesses(**weak), facts=None, statement=None)
            document.write(path := tmp_path / reason[:4], running)
            (line,) = [
                each for each in printed("account", "ledger", str(path)).splitlines() if each.startswith("pld")
            ]  # fmt: skip
            assert "not computed" in line and reason in line and "bound" not in line

    def test_a_looser_bound_of_another_version_is_consistent(self, folder, printed):
        path = folder / "privacy.json"
        rewrite(path, lambda data: data["statement"].update(epsilon=2.5))
        assert "stated epsilon: 2.5; consistent" in printed("account", "ledger", str(folder))

    def test_a_run_is_counted_by_its_own_ledger_which_must_not_go_back(
        self, folder, printed, refused
    ):
        plan = document.read(folder).plan
        lines = Lines("a-run", plan)
        line = lines.next([LedgerEntry(plan.event(199), "training")], Weaknesses())
        write_line(folder / LEDGER, 0, line)
        lines.take(line)
        write_head(folder, lines.head)
        assert "steps 199)" in printed("account", "ledger", str(folder))
        write_head(folder, replace(lines.head, lines=2))
        for path in (folder, folder / "privacy.json"):
            refused(["account", "ledger", str(path)], "went back")

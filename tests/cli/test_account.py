"""``hf-dp account`` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from hf_dp.accounting import ACCOUNTANTS, PoissonSampledGaussian, epsilon, round_up
from hf_dp.cli import account
from hf_dp.cli.main import hyphenated, main

RUN = ["--sample-rate", "0.0152043831", "--steps", "198", "--delta", "7.424e-6"]
EPSILON = ["account", "epsilon", "--noise-multiplier", "0.82539", *RUN]


def run(*words, code="from hf_dp.cli.main import main; raise SystemExit(main())"):
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_every_accountant_with_its_kind_and_no_torch():
    done = run(
        *EPSILON,
        code="import sys; from hf_dp.cli.main import main; code = main(); "
        "assert not {'torch', 'transformers'} & set(sys.modules); raise SystemExit(code)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["pld", "bound", "2.412"],
        ["rdp", "bound", "3.001"],
        ["prv", "bound", "2.421"],
        ["gdp_clt", "estimate", "1.545"],
    ]


def test_module_form_and_help_is_quick():
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hf_dp.cli.main", "account", "noise", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.perf_counter() - start < 2
    assert done.returncode == 0
    for text in ("default: pld", "example", "--target-epsilon", "batch size"):
        assert text in done.stdout


def test_json_and_one_accountant(capsys):
    assert main([*EPSILON, "--accountant", "rdp", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    event = PoissonSampledGaussian(0.82539, 0.0152043831, 198)
    value = round_up(epsilon(event, 7.424e-6, "rdp").value)
    assert data == {
        "event": event.to_dict(),
        "delta": 7.424e-6,
        "results": [{"accountant": "rdp", "kind": "bound", "epsilon": value}],
    }


def test_no_noise_is_inf(capsys):
    assert main(["account", "epsilon", "--noise-multiplier", "0", *RUN, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [row["epsilon"] for row in results] == ["inf"] * 4


def test_noise_in_both_spellings(capsys):
    outputs = []
    for option in ("--target-epsilon", "--target_epsilon"):
        assert main(["account", "noise", option, "3", *RUN, "--accountant=rdp", "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1]
    assert outputs[0]["event"]["noise_multiplier"] == pytest.approx(0.8254, abs=1e-4)
    assert outputs[0]["results"][0]["epsilon"] <= 3
    assert main(["account", "noise", "--target-epsilon", "3", *RUN, "--accountant=rdp"]) == 0
    first, _, row = capsys.readouterr().out.splitlines()
    assert first == f"noise multiplier {outputs[0]['event']['noise_multiplier']}"
    assert row.split() == ["rdp", "bound", "3.000"]


def test_one_accountant_out_of_range_does_not_hide_the_others(capsys):
    words = ["account", "epsilon", "--noise-multiplier", "0.2", *RUN]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not computed" in lines[1]
    assert lines[2].split()[:2] == ["rdp", "bound"]
    assert main([*words, "--accountant", "pld"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert 'Use accountant="rdp"' in captured.err


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["account", "epsilon", "--noise-multiplier", "1", "--sample-rate", "1.5", "--steps", "1", "--delta", "1e-5"],
         "`sample_rate` to be in [0, 1], got 1.5. It is expected_batch_size / num_examples"),
        (["account", "noise", "--target-epsilon", "3", *RUN, "--accountant", "gdp_clt"], "Calibration needs a bound"),
        (["account", "noise", "--target-epsilon", "-3", *RUN], "`target_epsilon` to be > 0"),
        (["acount"], "unknown command 'acount'; known: train, account"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_on_stderr(words, match, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert match in captured.err
    assert len(captured.err.splitlines()) == 1


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


def test_top_level(capsys):
    assert main(["--help"]) == 0
    assert "account" in capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().out == ""


def test_tables_agree():
    assert account.ACCOUNTANTS == ACCOUNTANTS
    assert hyphenated(["--a_b=c_d", "e_f", "--g_h", "-x_y"]) == ["--a-b=c_d", "e_f", "--g-h", "-x_y"]

"""The commands with which a reader of a card checks its epsilon."""

from __future__ import annotations

from hf_dp.accounting import Gaussian, PoissonSampledGaussian, event_from_dict
from hf_dp.statement.statement import PrivacyStatement


def check_commands(statement: PrivacyStatement) -> str:
    """Return commands that give the same epsilons.

    For one mechanism it is a command line, for several it is Python.
    """
    merged: dict[tuple[float, float], int] = {}
    for row in statement.mechanisms:
        event = event_from_dict({key: value for key, value in row.items() if key != "purpose"})
        if not isinstance(event, Gaussian | PoissonSampledGaussian) or event.beside:
            return "```bash\nhf-dp account ledger privacy.json --cross-check\n```"
        key = (event.noise_multiplier, getattr(event, "sample_rate", 1.0))
        merged[key] = merged.get(key, 0) + event.steps
    if statement.privacy_mode != "dp_sgd":
        return "```bash\nhf-dp account ledger privacy.json --cross-check\n```"
    merged = merged or {(statement.noise_multipliers[0], statement.sample_rates[0]): 0}
    if len(merged) == 1:
        ((sigma, rate), steps), *_ = merged.items()
        return (
            f"```bash\nhf-dp account epsilon --noise-multiplier {sigma!r} --sample-rate {rate!r} "
            f"--steps {steps} --delta {statement.delta!r} --cross-check\n```"
        )
    events = "".join(
        f"    PoissonSampledGaussian(noise_multiplier={sigma!r}, sample_rate={rate!r}, "
        f"steps={steps}),\n"
        for (sigma, rate), steps in merged.items()
    )
    return (
        "```python\nfrom hf_dp.accounting import ACCOUNTANTS, PoissonSampledGaussian, epsilon\n\n"
        f"events = [\n{events}]\nfor accountant in ACCOUNTANTS:\n"
        f"    print(accountant, epsilon(events, {statement.delta!r}, accountant).rounded_up())\n```"
    )

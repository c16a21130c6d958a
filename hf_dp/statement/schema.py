"""Versions of ``privacy.json``: what older ones did not say, and when they can still be read.

- 1: up to hf_dp 0.1.0. The plan is flat. For earlier runs it holds the releases only, not what
  weakened them.
- 2: the plan has a ``mechanism`` of its own, and the run has ``earlier``, ``rows_are_chunks`` and
  ``evaluation_compared``. Codes say what a statement means; nothing is read from prose.
- 3: there is a ``card``, and there are ``digests`` once the run has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dp.accounting import EARLIER, Ledger
from hf_dp.errors import ConfigError, LedgerError
from hf_dp.plans import dp_fp
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.draws import draw_of
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.rounding import rounding_margin
from hf_dp.plans.selection import SelectionPlan
from hf_dp.statement.statement import NOT_ESTABLISHED, what_ran
from hf_dp.statement.weaknesses import NAMES

SCHEMA_VERSION = 3

_KEYS = ("schema_version", "hf_dp_version", "status", "plan", "ledger", "statement")
_KEYS_SINCE_3 = ("card", "digests")

# What a file of version 1 does not say. Its evaluation sets were not compared with the training
# rows.
_SINCE_2: dict[str, Any] = {"rows_are_chunks": False, "evaluation_compared": False, "earlier": []}
_OF_THE_RUN = ("run_id", *NAMES)


def keys_of(version: int) -> tuple[str, ...]:
    """Return the keys of a document of one version."""
    return _KEYS if version < 3 else (*_KEYS, *_KEYS_SINCE_3)


def upgraded(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return a document as the current version would have written it.

    Raises:
        LedgerError: the file is of version 1 and has earlier runs; it does not say what weakened
            them.
        ConfigError, TypeError, ValueError, KeyError: version 1 could not have written the plan.
    """
    if data["schema_version"] >= 3:
        return data
    data = {**data, **dict.fromkeys(_KEYS_SINCE_3)}
    if data["schema_version"] == 2:
        return _with_a_mechanism(data)
    rows = data["ledger"] if isinstance(data["ledger"], list) else []
    if any(isinstance(row, Mapping) and row.get("purpose") == EARLIER for row in rows):
        raise LedgerError(
            f"{path} has schema version 1, and counts earlier runs without what weakened them: "
            "un-noised quantities that they released, labels that they left public. Expected "
            f"schema version {SCHEMA_VERSION}, which records it. This version can neither resume "
            "the run nor take it for an earlier one. Read its claim with hf_dp "
            f"{data['hf_dp_version']}, which wrote it; it holds no further than that of each run "
            "that it counts."
        )
    if not isinstance(data["plan"], Mapping):
        return data  # refused where plans are read
    if added := sorted(set(_SINCE_2) & set(data["plan"])):
        raise LedgerError(
            f"{path} was edited: schema version 1 has no {added}. Restore the `schema_version` "
            "that it was written with."
        )
    statement = data["statement"]
    if isinstance(statement, Mapping) and isinstance(statement.get("facts"), Mapping):
        facts = {**statement["facts"], **_SINCE_2}
        statement = {**statement, "facts": facts}
    return _with_a_mechanism({**data, "plan": {**data["plan"], **_SINCE_2}, "statement": statement})


def _with_a_mechanism(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a document whose plan has a mechanism of its own, from one whose plan is flat.

    (The first files of version 2 were as flat as those of version 1.)
    """
    if not isinstance(data["plan"], Mapping) or "mechanism" in data["plan"]:
        return data
    of_run = {name: data["plan"][name] for name in _OF_THE_RUN if name in data["plan"]}
    plan = _plan({name: value for name, value in data["plan"].items() if name not in of_run})
    statement = data["statement"]
    if isinstance(statement, Mapping) and isinstance(statement.get("facts"), Mapping):
        statement = _statement(statement, plan, Ledger.from_list(data["ledger"]))
    return {**data, "plan": {**plan.to_dict(), **of_run}, "statement": statement}


def _plan(values: Mapping[str, Any]) -> PrivacyPlan:
    """Read a flat plan. Raises: ConfigError for one that is not what hf_dp would have written."""
    given = dict(values)
    del given["sample_rate"], given["noise_std"]
    numbers = {name: given.pop(name) for name in ("noise_multiplier", "clipping_norm", "clipping")}
    mechanism = _mechanism(given.pop("forward"), numbers, given.pop("max_batch_size"))
    if given["selection"] is not None:
        chosen = dict(given["selection"])
        given["selection"] = SelectionPlan.from_dict({"quantity": chosen.pop("release"), **chosen})
    plan = PrivacyPlan(**given, mechanism=mechanism)
    if _flat(plan) != dict(values):
        raise ConfigError("it contradicts itself")
    return plan


def _flat(plan: PrivacyPlan) -> dict[str, Any]:
    """Return a plan as it was written when it was flat."""
    mechanism = plan.mechanism
    most, rows = (
        getattr(getattr(mechanism, "draw", None), "max_batch_size", None),
        plan.num_examples,
    )
    margin = rounding_margin(plan.expected_batch_size, rows if most is None else min(most, rows))
    selection = None
    if plan.selection is not None:
        chosen = plan.selection.to_dict()
        selection = {"release": chosen.pop("quantity"), **chosen}
    own = {
        name: getattr(plan, name)
        for name in (
            "num_examples",
            "expected_batch_size",
            "steps",
            "noise_multiplier",
            "clipping_norm",
            "delta",
            "accountant",
            "target_epsilon",
            "clipping",
            "privacy_unit",
            "neighboring_relation",
            "sample_rate",
        )
    }
    std = plan.noise_multiplier * (plan.clipping_norm * (1 + margin))
    return {
        **own,
        "max_batch_size": most,
        "selection": selection,
        "forward": _forward(mechanism),
        "noise_std": std,
    }


def _forward(mechanism: MechanismPlan) -> dict[str, Any] | None:
    if not isinstance(mechanism, dp_fp.ForwardPlan):
        return None
    return {
        "variant": mechanism.variant,
        "num_micro_batches": getattr(mechanism, "num_micro_batches", 1),
        "release": getattr(mechanism, "reuse", dp_fp.FRESH),
        "draws": getattr(mechanism, "draws", dp_fp.SEPARATE),
        "record_clipping_norm": getattr(mechanism, "record_clipping_norm", None),
        "record_noise_multiplier": getattr(mechanism, "record_noise_multiplier", None),
        "budget_ratio": getattr(mechanism, "budget_ratio", None),
        "label_epsilon": getattr(mechanism, "label_epsilon", None),
        "labels_in_vector": mechanism.labels_in_vector,
        "num_classes": mechanism.num_classes,
    }


def _mechanism(forward: Any, flat: Mapping[str, Any], most: int | None) -> MechanismPlan:
    sigma, norm = flat["noise_multiplier"], flat["clipping_norm"]
    if forward is None:
        return DpSgdPlan(norm, sigma, flat["clipping"], draw_of(max_batch_size=most))
    of_labels = {name: forward[name] for name in ("labels_in_vector", "num_classes")}
    if forward["variant"] == dp_fp.PUBLISHED:
        return dp_fp.PublishedPlan(norm, sigma, forward["num_micro_batches"])
    if forward["variant"] == dp_fp.FROZEN:
        return dp_fp.FrozenPlan(
            norm,
            sigma,
            forward["num_micro_batches"],
            forward["release"],
            forward["label_epsilon"],
            **of_labels,
        )
    if forward["variant"] != dp_fp.PRIVATE_ENCODER:
        raise ConfigError(f"it has an unknown dp_fp_variant {forward['variant']!r}")
    given = {
        name: forward[name]
        for name in ("draws", "record_clipping_norm", "record_noise_multiplier", "budget_ratio")
    }
    return dp_fp.PrivateEncoderPlan(norm, sigma, flat["clipping"], **given, **of_labels)


def _statement(values: Mapping[str, Any], plan: PrivacyPlan, ledger: Ledger) -> dict[str, Any]:
    """Return a statement with what is now in codes, and in American spelling."""
    facts = dict(values["facts"])
    if facts.pop("privacy_mode") != plan.mechanism.privacy_mode:
        raise ConfigError("its privacy_mode is not that of the statement")
    none = values["status"] == NOT_ESTABLISHED
    respelled = {
        name: values[name].replace("randomised", "randomized")
        for name in ("neighboring_relation", "mechanism")
    }
    added = {
        "unit_code": "none" if none else plan.mechanism.unit,
        "relation_code": "none" if none else plan.mechanism.relation,
        "privacy_mode": plan.mechanism.privacy_mode,
        "mechanism_name": plan.words.name,
        "sampling_code": plan.words.sampling_code,
        "tag": plan.words.tag,
        "not_established": list(plan.event().reasons) if none else [],
        "what_ran": what_ran(plan, ledger, values["status"]),
    }
    if unknown := sorted(set(added) & set(values) - {"unit_code"}):
        raise ConfigError(f"a statement of that version has no {unknown}")
    return {**added, **values, "facts": facts, **respelled}

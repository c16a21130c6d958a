"""No call of an isolated function finds what an earlier one left, wherever it was left."""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import tiny
import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from hf_dp.batches import isolation
from hf_dp.batches.isolation import Isolated
from hf_dp.errors import DataError
from hf_dp.trainer.trainer import DPTrainer

SEEN: list[int] = []
TABLE = {"calls": 0}
COUNTER = itertools.count()
NUMPY, TORCH, PYTHON = np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)


def in_a_global(rows):
    SEEN.append(1)
    return len(SEEN)


NUMBER = 0


def in_a_number(rows):
    global NUMBER
    NUMBER += 1
    return NUMBER


def in_a_new_global(rows):
    global UNKNOWN
    try:
        UNKNOWN += 1
    except NameError:
        UNKNOWN = 1
    return UNKNOWN


def in_a_global_dictionary(rows):
    TABLE["calls"] += 1
    return TABLE["calls"]


def by_an_iterator(rows):
    return next(COUNTER)


def in_a_nested_function(rows):
    def inner():
        SEEN.extend(rows)
        return len(SEEN)

    return inner()


def in_a_default(rows, kept=[]):  # noqa: B006
    kept.append(1)
    return len(kept)


def in_a_keyword_default(rows, *, kept={}):  # noqa: B006
    kept[len(kept)] = 1
    return len(kept)


def on_the_function(rows):
    on_the_function.calls.append(1)
    return len(on_the_function.calls)


on_the_function.calls = []  # type: ignore[attr-defined]


def on_the_function_anew(rows):
    on_the_function_anew.calls = getattr(on_the_function_anew, "calls", 0) + 1
    return on_the_function_anew.calls


def in_a_closure():
    calls = 0

    def collate(rows):
        nonlocal calls
        calls += 1
        return calls

    return collate


class OnTheInstance:
    def __init__(self):
        self.kept: list[int] = []

    def __call__(self, rows):
        self.kept.append(1)
        return len(self.kept)

    def method(self, rows):
        return self(rows)


class OnTheClass:
    kept: list[int] = []
    calls = 0

    def __call__(self, rows):
        self.kept.append(1)
        type(self).calls += 1
        return len(self.kept), type(self).calls


class OnTheClassAnew:
    def __call__(self, rows):
        cls = type(self)
        cls.calls = getattr(cls, "calls", 0) + 1
        return cls.calls


class Registry:
    kept: list[int] = []


def in_a_registry(rows):
    Registry.kept.append(1)
    return len(Registry.kept)


ELSEWHERE = types.ModuleType("elsewhere")
ELSEWHERE.kept = []  # type: ignore[attr-defined]


def in_another_module(rows):
    ELSEWHERE.kept.append(1)
    return len(ELSEWHERE.kept)


INSIDE = types.ModuleType("elsewhere_inside")
INSIDE.kept = []  # type: ignore[attr-defined]
ELSEWHERE.inside = INSIDE  # type: ignore[attr-defined]
sys.modules["elsewhere_inside"] = INSIDE


def in_a_module_of_a_package(rows):
    ELSEWHERE.inside.kept.append(1)
    return len(ELSEWHERE.inside.kept)


def in_a_module_imported_in_the_call(rows):
    import elsewhere_inside

    elsewhere_inside.kept.append(1)
    return len(elsewhere_inside.kept)


class AsAModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept: list[int] = []

    def forward(self, rows):
        self.kept.append(1)
        return len(self.kept)


@functools.lru_cache
def kept() -> list[int]:
    return []


def in_a_cached_function(rows):
    kept().append(1)
    return len(kept())


class InACachedMethod:
    @functools.lru_cache  # noqa: B019
    def kept(self) -> list[int]:
        return []

    def __call__(self, rows):
        self.kept().append(1)
        return len(self.kept())

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return True


SHARED_TOKENIZER = tiny.tokenizer()


def on_a_tokenizer(rows):
    SHARED_TOKENIZER.calls = getattr(SHARED_TOKENIZER, "calls", 0) + 1
    return SHARED_TOKENIZER.calls


class StaticMethod:
    calls = 0

    @staticmethod
    def collate(rows):
        StaticMethod.calls += 1
        return StaticMethod.calls


class ClassMethod:
    calls = 0

    @classmethod
    def collate(cls, rows):
        cls.calls += 1
        return cls.calls


class OwnData(torch.utils.data.Dataset):
    def __init__(self):
        self.kept: list[int] = []

    def collate(self, rows):
        self.kept.append(1)
        return len(self.kept)


class InSlots:
    __slots__ = ("kept",)

    def __init__(self):
        self.kept = [0]

    def __call__(self, rows):
        self.kept[0] += 1
        return self.kept[0]


class InAMethodsGlobal:
    def __call__(self, rows):
        return in_a_global(rows)


@dataclass
class Nested:
    inner: dict = field(default_factory=lambda: {"deep": ([], OnTheInstance())})

    def __call__(self, rows):
        self.inner["deep"][0].append(1)
        return len(self.inner["deep"][0]), self.inner["deep"][1](rows)


STATEFUL = {
    "global": lambda: in_a_global,
    "global dictionary": lambda: in_a_global_dictionary,
    "iterator": lambda: by_an_iterator,
    "cached function": lambda: in_a_cached_function,
    "cached method": InACachedMethod,
    "attribute of a tokenizer": lambda: on_a_tokenizer,
    "static method": lambda: StaticMethod.collate,
    "class method": lambda: ClassMethod.collate,
    "data set of one's own": lambda: OwnData().collate,
    "class used by name": lambda: in_a_registry,
    "another module": lambda: in_another_module,
    "module of a package": lambda: in_a_module_of_a_package,
    "module imported in the call": lambda: in_a_module_imported_in_the_call,
    "module of torch": AsAModule,
    "module of torch inside": lambda: torch.nn.Sequential(torch.nn.Identity(), AsAModule()),
    "number": lambda: in_a_number,
    "new global": lambda: in_a_new_global,
    "new attribute of a class": OnTheClassAnew,
    "new attribute of a function": lambda: on_the_function_anew,
    "nested function": lambda: in_a_nested_function,
    "default": lambda: in_a_default,
    "keyword default": lambda: in_a_keyword_default,
    "attribute of a function": lambda: on_the_function,
    "closure": in_a_closure,
    "instance": OnTheInstance,
    "class": OnTheClass,
    "slots": InSlots,
    "global of a method": InAMethodsGlobal,
    "nested": Nested,
    "bound method": lambda: OnTheInstance().method,
    "partial": lambda: functools.partial(lambda kept, rows: kept.append(1) or len(kept), []),
    "wrapped": lambda: functools.wraps(in_a_global)(in_a_closure()),
}


def finds_what_was_left(make) -> bool:
    isolated = Isolated(make())
    return len({repr(isolated([1])) for _ in range(3)}) > 1


@pytest.mark.parametrize("name", STATEFUL)
def test_every_call_is_the_first(name):
    assert not finds_what_was_left(STATEFUL[name])


def test_a_module_in_a_closure_or_attribute():
    import math as held

    class Holding:
        def __init__(self):
            self.held = held

        def __call__(self, rows):
            return self.held.sqrt(4) + held.sqrt(4)

    assert Isolated(Holding())([1]) == 4


def test_a_growing_vocabulary_is_refused():
    words = tiny.tokenizer()

    def collate(rows):
        words.add_tokens([f"word {len(words)}"])

    with pytest.raises(DataError, match="adds tokens to the tokenizer"):
        Isolated(collate)([1])


def test_a_slow_copy_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(isolation.logger, "warning", lambda *args: said.append(args[0]))
    monkeypatch.setattr(isolation, "_SLOW", 0.0)
    Isolated(OnTheInstance())
    assert "each example gets a copy" in said[0]


def test_a_method_of_a_trainer_is_refused(tmp_path):
    class Collating(DPTrainer):
        def collate(self, rows):
            return rows

    with pytest.raises(DataError, match="reaches a Trainer"):
        Isolated(tiny.trainer(tmp_path, cls=Collating).collate)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_function_itself_would_find_it(name):
    function = STATEFUL[name]()
    assert len({repr(function([1])) for _ in range(3)}) > 1


def test_the_original_is_left_as_it_was():
    before = len(SEEN), dict(TABLE), OnTheClass.calls
    for function in (in_a_global, in_a_global_dictionary, OnTheClass()):
        Isolated(function)([1])
    assert (len(SEEN), TABLE, OnTheClass.calls) == before


def test_it_is_left_so_after_an_error_too():
    def fails(rows):
        SEEN.append(1)
        raise ValueError("no")

    before = len(SEEN)
    with pytest.raises(ValueError, match="no"):
        Isolated(fails)([1])
    assert len(SEEN) == before


def by_global_generators(rows):
    return float(NUMPY.random()), float(torch.rand(1, generator=TORCH)), PYTHON.random()


class OwnGenerators:
    def __init__(self):
        self.numpy, self.old = np.random.default_rng(0), np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def __call__(self, rows):
        return (
            float(self.numpy.random()),
            float(self.old.random()),
            float(torch.rand(1, generator=self.torch)),
        )


@pytest.mark.parametrize("make", [lambda: by_global_generators, OwnGenerators])
def test_generators_are_seeded_from_the_private_stream(make):
    """Each call depends on the secret stream alone.

    Equal states of the stream give equal results, which are not those of the public seed.
    """
    isolated = Isolated(make())
    found = []
    for seed in (1, 1, 2):
        random.seed(seed)
        found.append(isolated([1]))
    assert found[0] == found[1] != found[2]
    public = make()([1])
    assert all(one != other for one, other in zip(found[0], public, strict=True))


def test_a_seed_is_replaced():
    class Telling(DataCollatorForLanguageModeling):
        def __call__(self, rows):
            return self.seed

    isolated = Isolated(Telling(tiny.tokenizer(), mlm=False, seed=42))
    assert len({*(isolated([{}]) for _ in range(3)), 42}) == 4


def test_tokenizers_models_and_data_are_shared():
    words, model, data = tiny.tokenizer(), tiny.model(), tiny.dataset()

    class Collator:
        def __init__(self):
            self.words, self.model, self.data = words, model, data

        def __call__(self, rows):
            return self.words is words and self.model is model and self.data is data

    isolated = Isolated(Collator())
    assert isolated([1]) and isolated.data == (data,)


def test_a_tokenizer_of_ones_own_is_copied():
    class Counting(type(tiny.tokenizer())):  # type: ignore[misc]
        calls: list[int] = []

        def pad(self, *args, **kwargs):
            self.calls.append(1)
            assert len(self.calls) == 1
            return super().pad(*args, **kwargs)

    words = Counting(
        tokenizer_object=tiny.tokenizer()._tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    isolated = Isolated(DataCollatorWithPadding(words))
    for _ in range(2):
        assert isolated([{"input_ids": [1, 2], "attention_mask": [1, 1]}])["input_ids"].shape == (
            1,
            2,
        )


@pytest.mark.parametrize("make", [lambda: (number for number in range(3)), lambda: open(__file__)])
def test_what_cannot_be_copied_is_refused(make):
    held = make()

    def collate(rows):
        return next(held)

    with pytest.raises(
        DataError, match="collate to be copyable, since each example gets a fresh copy"
    ):
        Isolated(collate)


def plant_no_slots(patch):
    patch.setattr(
        isolation._Reach, "_slot", lambda self, slot, assigned=False: self.visit(slot.get())
    )


def plant_no_copies(patch):
    patch.setattr(Isolated, "__call__", lambda self, *args: self._state[0](*args))


@pytest.mark.parametrize(("plant", "name"), [(plant_no_slots, "global"), (plant_no_slots, "closure"),
                                             (plant_no_copies, "instance"), (plant_no_copies, "nested")])  # fmt: skip
def test_planted(plant, name, monkeypatch):
    plant(monkeypatch)
    assert finds_what_was_left(STATEFUL[name])

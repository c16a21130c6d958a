"""Each row finds a collator as if it had never been called, and what cannot be so is said."""

import contextlib
import functools
import itertools
import os
import random
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import tiny
import torch
from torch.utils.data import Subset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    ProcessorMixin,
    default_data_collator,
)

from hf_dp.batches import isolation
from hf_dp.batches.isolation import Isolated
from hf_dp.errors import DataError
from hf_dp.trainer.trainer import DPTrainer

SEEN: list[int] = []
TABLE = {"calls": 0}
COUNTER = itertools.count()
NUMBER = 0
NUMPY, TORCH, PYTHON = np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)
BITS = np.random.PCG64(0)


def count(kept):
    """How often something was kept: what one row leaves behind for the next."""
    kept.append(1)
    return len(kept)


def in_a_global(rows):
    SEEN.append(1)
    return len(SEEN)


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


def in_a_default(rows, kept=[]):  # noqa: B006
    return count(kept)


def in_a_keyword_default(rows, *, kept={}):  # noqa: B006
    kept[len(kept)] = 1
    return len(kept)


def on_the_function(rows):
    return count(on_the_function.calls)


on_the_function.calls = []  # type: ignore[attr-defined]


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
        return count(self.kept)

    def method(self, rows):
        return self(rows)


def module(name, **held):
    made = types.ModuleType(name)
    vars(made).update(held)
    return made


INSIDE = sys.modules["elsewhere_inside"] = module("elsewhere_inside", kept=[])
ELSEWHERE = module("elsewhere", kept=[], inside=INSIDE)


def in_a_module_imported_in_the_call(rows):
    import elsewhere_inside

    return count(elsewhere_inside.kept)


SHARED_TOKENIZER = tiny.tokenizer()


def on_a_tokenizer(rows):
    SHARED_TOKENIZER.calls = getattr(SHARED_TOKENIZER, "calls", 0) + 1
    return SHARED_TOKENIZER.calls


class OwnData(torch.utils.data.Dataset):
    def __init__(self):
        self.kept: list[int] = []

    def collate(self, rows):
        return count(self.kept)


class OnTheClass:
    kept: list[int] = []

    def __call__(self, rows):
        return count(self.kept)


class InSlots:
    __slots__ = ("kept",)

    def __init__(self):
        self.kept = []

    def __call__(self, rows):
        return count(self.kept)


class InAMethodsGlobal:
    def __call__(self, rows):
        return in_a_global(rows)


@dataclass
class Nested:
    inner: dict = field(default_factory=lambda: {"deep": ([], OnTheInstance())})

    def __call__(self, rows):
        kept, instance = self.inner["deep"]
        return count(kept), instance(rows)


class OnItsClass:
    number = 0

    def __call__(self, rows):
        type(self).number += 1
        return self.number


class OnItsClassFirst:
    def __call__(self, rows):
        type(self).late = getattr(type(self), "late", 0) + 1
        return self.late


class InAStaticMethod:
    @staticmethod
    def counted(kept=[]):  # noqa: B006
        return count(kept)

    def __call__(self, rows):
        return self.counted()


class InAModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept: list[int] = []

    def forward(self, rows):
        return count(self.kept)


@functools.lru_cache
def cached(text):
    return []


class InACacheOfItsOwn:
    @functools.cache  # noqa: B019
    def held(self):
        return []

    def __call__(self, rows):
        return self.held()


def reads_the_class(collator, rows):
    return count(collator.kept_by_another)


class ReadByAFunction:
    kept_by_another: list = []

    def __init__(self):
        self.read = reads_the_class

    def __call__(self, rows):
        return self.read(self, rows)


class KeptLater:
    """Is looked at after the function that names its list."""

    kept_later: list = []


STATEFUL = {
    "attribute of a tokenizer": lambda: on_a_tokenizer,
    "data set of one's own": lambda: OwnData().collate,
    "default": lambda: in_a_default,
    "keyword default": lambda: in_a_keyword_default,
    "attribute of a function": lambda: on_the_function,
    "closure": in_a_closure,
    "instance": OnTheInstance,
    "slots": InSlots,
    "nested": Nested,
    "bound method": lambda: OnTheInstance().method,
    "partial": lambda: functools.partial(lambda kept, rows: kept.append(1) or len(kept), []),
    "partial of an object": lambda: functools.partial(OnTheInstance()),
    "wrapped": lambda: functools.wraps(in_a_global)(in_a_closure()),
    "default of a helper": lambda: lambda rows: in_a_default(rows),
    "number in a global": lambda: in_a_number,
    "new global": lambda: in_a_new_global,
    "number of the class": OnItsClass,
    "new attribute of the class": OnItsClassFirst,
    "default of a static method": InAStaticMethod,
    "bound method of a list": lambda: functools.partial(
        lambda add, rows: add(1) or add.__self__, [].append
    ),
    "module without weights": InAModule,
    "iterator": lambda: functools.partial(lambda numbers, rows: next(numbers), iter(range(9))),
}
SHARED = {
    "SEEN": in_a_global,
    "TABLE": in_a_global_dictionary,
    "COUNTER": lambda rows: next(COUNTER),
    "kept": OnTheClass(),
    "kept_by_another": ReadByAFunction(),
    "kept_later": functools.partial(lambda held, rows: count(held.kept_later), KeptLater()),
    "SEEN, by a method": InAMethodsGlobal(),
    "SEEN, by a helper": lambda rows: in_a_global(rows),
    "SEEN, by a nested function": lambda rows: (lambda: count(SEEN))(),
    "cached": lambda rows: count(cached("a")),
    "held": InACacheOfItsOwn(),
    "kept, of a module": lambda rows: count(ELSEWHERE.kept),
    "kept, of a module in a package": lambda rows: count(ELSEWHERE.inside.kept),
    "kept, of a module imported in the call": in_a_module_imported_in_the_call,
}


def called(isolated, rows):
    with isolated.fresh() as collate:
        return collate(rows)


def finds_what_was_left(make) -> bool:
    isolated = Isolated(make())
    return len({repr(called(isolated, [1])) for _ in range(3)}) > 1


@pytest.fixture
def said(warnings_of):
    return warnings_of("batches.isolation")


@pytest.mark.parametrize("name", STATEFUL)
def test_every_call_is_the_first(name, said):
    assert not finds_what_was_left(STATEFUL[name])
    function = STATEFUL[name]()  # which by itself would find what was left
    assert len({repr(function([1])) for _ in range(3)}) > 1


@pytest.mark.parametrize("name", SHARED)
def test_a_global_that_all_rows_share_is_named(name, said):
    Isolated(SHARED[name])
    assert len(said) == 1 and f"all rows share: {name.partition(',')[0]}. If" in said[0]


LABELS, NAMES, WORDS = ("a", "b"), frozenset("ab"), tiny.tokenizer()


def reading_constants(rows):
    return LABELS, NAMES, WORDS, NUMPY.random(), torch.long, np.add(1, 2), tiny.WORDS, os.environ


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataCollatorWithPadding(WORDS),
        lambda: DataCollatorForLanguageModeling(WORDS, mlm=False, seed=1),
        lambda: DataCollatorForSeq2Seq(WORDS, model=tiny.model()),
        lambda: default_data_collator,
        lambda: torch.utils.data.default_collate,
    ],
)
def test_stock_collators_are_silent_and_little_is_looked_at(make, said, monkeypatch):
    looked_at = []
    original = Isolated._add
    monkeypatch.setattr(
        Isolated, "_add", lambda *args, **how: looked_at.append(1) or original(*args, **how)
    )
    Isolated(make())
    assert not said and len(looked_at) < 5


def test_constants_generators_and_libraries_are_not_warned_of(said):
    Isolated(reading_constants)
    assert len(said) == 1 and "all rows share: WORDS. If" in said[0]  # that of tiny, a list


def test_a_module_in_a_closure_or_attribute():
    import math as held

    class Holding:
        def __init__(self):
            self.held = held

        def __call__(self, rows):
            return self.held.sqrt(4) + held.sqrt(4)

    assert called(Isolated(Holding()), [1]) == 4


def test_a_method_of_a_trainer_is_refused(tmp_path):
    class Collating(DPTrainer):
        def collate(self, rows):
            return rows

    with pytest.raises(DataError, match="refers to a Trainer"):
        Isolated(tiny.trainer(tmp_path, cls=Collating).collate)


def test_the_original_is_left_as_it_was_also_after_an_error():
    class Failing(OnTheInstance):
        def __call__(self, rows):
            NUMPY.random()
            super().__call__(rows)
            raise ValueError("no")

    failing, state = Failing(), NUMPY.bit_generator.state
    with pytest.raises(ValueError, match="no"):
        called(Isolated(failing), [1])
    assert failing.kept == [] and NUMPY.bit_generator.state == state


def by_global_generators(rows):
    return _helped(), float(torch.rand(1, generator=TORCH)), PYTHON.random()


def _helped():
    return float(NUMPY.random()), float(NUMPY.spawn(1)[0].random()), float(BITS.random_raw())


class OwnGenerators:
    def __init__(self):
        self.numpy, self.old = np.random.default_rng(0), {"one": [np.random.RandomState(0)]}
        self.torch = torch.Generator().manual_seed(0)

    def __call__(self, rows):
        return (
            float(self.numpy.random()),
            float(self.old["one"][0].random()),
            float(torch.rand(1, generator=self.torch)),
        )


class OfTheClass(OwnGenerators):
    numpy, old = np.random.default_rng(0), {"one": [np.random.RandomState(0)]}
    torch = torch.Generator().manual_seed(0)

    def __init__(self):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: by_global_generators,
        OwnGenerators,
        OfTheClass,
        lambda: functools.partial(lambda one, rows: (one.random(),), random.Random(0)),
        lambda: lambda rows, one=OwnGenerators(): one(rows),  # noqa: B008
        lambda: lambda rows: HELD(rows),
    ],
)
def test_generators_are_seeded_from_the_private_stream(make, said):
    """Each call depends on the secret stream alone: equal states of it give equal results."""
    isolated = Isolated(make())
    found = []
    for seed in (1, 1, 2):
        random.seed(seed)
        found.append(called(isolated, [1]))
    assert found[0] == found[1] != found[2]
    assert all(one != other for one, other in zip(found[0], make()([1]), strict=True))


HELD = OwnGenerators()


def test_a_seed_is_replaced():
    class Telling(DataCollatorForLanguageModeling):
        def __call__(self, rows):
            return self.seed

    isolated = Isolated(Telling(tiny.tokenizer(), mlm=False, seed=42))
    assert len({*(called(isolated, [{}]) for _ in range(3)), 42}) == 4


def test_tokenizers_models_and_data_are_shared():
    words, model, data = tiny.tokenizer(), tiny.model(), tiny.dataset()

    class Collator:
        def __init__(self):
            self.words, self.model, self.data = words, model, data

        def __call__(self, rows):
            return self.words is words and self.model is model and self.data is data

    isolated = Isolated(Collator())
    assert called(isolated, [1]) and all(each is data for each in isolated.data) and isolated.data


def test_rows_that_grow_while_they_are_read_are_refused():
    """A long container of a data set is shared: what one row adds, later rows would see."""

    class Numbered(torch.utils.data.Dataset):
        def __init__(self):
            self.ids = {str(number): number for number in range(70)}

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return self.ids.setdefault(["3", "new"][index], len(self.ids))

    isolated = Isolated(Numbered(), has_rows=True)
    with isolated.fresh() as rows:
        assert rows[0] == 3
    with pytest.raises(DataError, match="rows to a data set.*Add them before"):
        with isolated.fresh() as rows:
            assert rows[1] == 70


@pytest.mark.parametrize("held", ["tokenizer", "processor"])
def test_a_growing_vocabulary_is_refused(held, monkeypatch):
    """A vocabulary is not put back: a word that one row adds, later rows would be read with."""
    words = tiny.tokenizer()
    processor = ProcessorMixin() if held == "processor" else None
    if processor is not None:
        processor.tokenizer = words

    def collate(rows, through=processor or words):
        getattr(through, "tokenizer", through).add_tokens([f"word {len(words)}"])

    with pytest.raises(DataError, match="adds tokens to a tokenizer.*Add them before"):
        called(Isolated(collate), [1])
    assert "word 19" in words.get_vocab()  # so a row after it would see the word
    called(Isolated(lambda rows: words("good film")), [1])
    monkeypatch.setattr(
        isolation.Isolated, "_growing", property(lambda self: [], lambda *_: None), raising=False
    )  # planted
    called(Isolated(collate), [1])


def test_what_is_loaded_when_first_needed_stays(tmp_path):
    class Late(torch.utils.data.Dataset):
        words = None

        def __init__(self):
            self.mine = None

        def __getitem__(self, index):
            if self.mine is None:
                (tmp_path / str(len(list(tmp_path.iterdir())))).touch()
                self.mine = tiny.tokenizer()
            return self.mine("good")["input_ids"]

    isolated = Isolated(Late(), has_rows=True)
    for _ in range(3):
        with isolated.fresh() as data:
            assert data[0]
    assert len(list(tmp_path.iterdir())) == 1


LATE = None


def test_so_does_what_a_global_gets(tmp_path):
    def collate(rows):
        global LATE
        if LATE is None:
            (tmp_path / str(len(list(tmp_path.iterdir())))).touch()
            LATE = tiny.tokenizer()
        return len(LATE)

    isolated = Isolated(collate)
    assert [called(isolated, [1]) for _ in range(3)] == [19] * 3
    assert len(list(tmp_path.iterdir())) == 1


def test_a_data_set_of_its_function_counts_anew_and_may_read_its_rows():
    raw, seen = tiny.dataset(), []

    class Local(torch.utils.data.Dataset):
        def __getitem__(self, index):
            seen.append(index)
            return len(seen), raw[index]["label"]

    isolated = Isolated(Local(), has_rows=True)
    for _ in range(2):
        with isolated.fresh() as data:
            assert data[1] == (1, 1)
    assert isolated.data == [] and seen == []


@pytest.mark.parametrize("make", [lambda: (number for number in range(3)), lambda: open(__file__)])
def test_what_cannot_be_copied_is_refused(make):
    held = make()

    def collate(rows):
        return next(held)

    with pytest.raises(DataError, match="collate to be copyable, since each example gets a fresh"):
        Isolated(collate)


@pytest.mark.parametrize("held", [lambda data: data, lambda data: functools.partial(max, data)])
def test_rows_and_files_of_a_data_set_are_not_copied(held):
    class Filed(torch.utils.data.Dataset):
        def __init__(self, file):
            self.file, self.rows, self.count = file, [[i] for i in range(100)], []

        def __getitem__(self, index):
            self.count.append(1)
            return self.file, self.rows, len(self.count)

    with open(__file__) as file:
        data = Filed(file)
        all_rows = data.rows
        isolated = Isolated(held(data), has_rows=held(data) is data)
        for _ in range(2):
            with isolated.fresh() as fresh:
                opened, rows, count = (getattr(fresh, "args", [fresh])[0])[0]
                assert opened is file and rows is all_rows and count == 1


RAW = tiny.dataset()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RAW.with_transform(lambda batch: RAW[:1] and batch),
        lambda: RAW.with_transform(functools.partial(lambda data, batch: batch, RAW.select([1]))),
        lambda: Subset(RAW.with_transform(lambda batch, data=RAW: batch), [0, 1]),
    ],
)
def test_a_transform_that_reads_other_training_rows_is_refused(make, tmp_path):
    with pytest.raises(DataError, match="or a transform of the training set, holds rows of the"):
        tiny.trainer(
            tmp_path, given={"train_dataset": make()}, expected_batch_size=2, eval_strategy="no"
        ).train()


def test_what_a_data_set_reads_itself_is_not():
    class Wrapped(torch.utils.data.Dataset):
        def __init__(self):
            self.raw, self.get = RAW, lambda index: self.raw[index]

        def __getitem__(self, index):
            return self.get(index)

    assert Isolated(Wrapped(), has_rows=True).data == []


PACKAGE = {
    "__init__": "",
    "state": "import numpy as np\nrng, SEEN = np.random.default_rng(0), []\n",
    "steps": "from theirs.state import rng\nKEPT = []\ndef step(rows): return rng.random()\n"
    "def keep(rows):\n    KEPT.append(1)\n    return len(KEPT)\n",
    "collate": "from theirs import state\nfrom theirs.steps import step\n"
    "def collate(rows):\n    return step(rows), state.rng.random()\n"
    "from theirs import steps\ndef keeping(rows): return steps.keep(rows)\n"
    "def counting(rows):\n    state.SEEN.append(1)\n    return len(state.SEEN)\n",
}


def test_a_package_of_the_users_own_counts_as_theirs(tmp_path, monkeypatch, said):
    """One that is installed editable, so that it does not lie among installed packages."""
    (tmp_path / "theirs").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "theirs" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import theirs.collate

    isolated, found = Isolated(theirs.collate.collate), []
    for seed in (1, 1, 2):
        random.seed(seed)
        found.append(called(isolated, [1]))
    assert found[0] == found[1] != found[2] and not said
    Isolated(theirs.collate.counting)
    Isolated(theirs.collate.keeping)
    assert "all rows share: SEEN. If" in said[0] and "all rows share: KEPT. If" in said[1]


# -- each guard broken on purpose ---


def plant_shared_functions(patch):
    patch.setattr(isolation, "_is_shared", callable)


def plant_no_copies(patch):
    patch.setattr(Isolated, "fresh", lambda self: contextlib.nullcontext(self._root))


def plant_no_code(patch):
    patch.setattr(Isolated, "_look_up", lambda *args: None)


def plant_nothing_put_back(patch):
    put = isolation._put
    patch.setattr(isolation, "_put", lambda space, *of: isinstance(space, dict) and put(space, *of))
    patch.setattr(OnItsClass, "number", 0)


@pytest.mark.parametrize(
    ("plant", "name"),
    [(plant_shared_functions, "closure"), (plant_no_copies, "instance"), (plant_no_copies, "nested"),
     (plant_no_code, "default of a helper"), (plant_nothing_put_back, "number of the class")],
)  # fmt: skip
def test_planted(plant, name, monkeypatch):
    plant(monkeypatch)
    assert finds_what_was_left(STATEFUL[name])


def test_planted_code_not_looked_at(monkeypatch, said):
    plant_no_code(monkeypatch)
    Isolated(in_a_global)
    monkeypatch.undo()
    monkeypatch.setattr(isolation.logger, "warning", said.append)
    monkeypatch.setattr(isolation, "_is_own", lambda *args: False)  # so that caches are shared
    Isolated(InACacheOfItsOwn())
    assert not said

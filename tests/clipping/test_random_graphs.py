"""Random small module graphs against a loop over single examples.

They cover what no hand-written case thought of. A graph is a list of named steps on a hidden tensor
of shape (b, d) or (b, T, d). The seed and the list are in the message of a failure; ``graph(seed)``
draws the same graph again.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import EXACT, assert_equal, clipped, loop
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_dp.clipping.engine import STRATEGIES

SEEDS = range(60)
VOCABULARY = 7
Step = Callable[[Tensor], Tensor]


class Graph(nn.Module):
    """Steps applied in turn; ``description`` says which. Its output is one loss per example."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.draw = random.Random(seed)
        self.owners = nn.ModuleList()
        self.description: list[str] = []
        examples = self.draw.randint(1, 4)
        self.batch = (
            [examples] if self.coin() else [examples, self.draw.choice([1, 2, examples, 5, 12])]
        )
        self.positions = len(self.batch) == 2
        self.width = self.draw.randint(2, 6)
        self.tables: list[nn.Embedding] = []
        self.steps: list[Step] = [self.start()]
        for _ in range(self.draw.randint(4, 10)):
            self.steps.append(self.draw.choice(self.choices())())
        self.steps.append(self.affine())
        self.double()
        self.freeze()

    def forward(self, inputs: Tensor) -> Tensor:
        self.tokens, value = inputs, inputs
        self.earlier: list[Tensor] = []
        for step in self.steps:
            value = step(value)
            self.earlier.append(value)
        return torch.sin(value).flatten(1).sum(1) * (1 + value.flatten(1).square().mean(1))

    def __str__(self) -> str:
        frozen = [name for name, p in self.named_parameters() if not p.requires_grad]
        return f"{self.batch}: {' > '.join(self.description)}; frozen: {frozen}"

    # -- parts ---

    def own(self, module: nn.Module, text: str) -> Any:
        """A new owner of parameters, with values away from ones and zeros."""
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
        self.owners.append(module)
        self.description.append(text)
        return module

    def coin(self) -> bool:
        return self.draw.random() < 0.5

    def choices(self) -> list[Callable[[], Step]]:
        steps = [
            self.affine, self.affine, self.norm, self.norm, self.group_norm, self.activation, self.residual, self.tied,
            self.reuse, self.reuse, self.bare,
        ]  # fmt: skip
        if self.positions:
            steps += [self.mix, self.flattened, self.flattened, self.pool, self.positions_table]
        if self.tables:
            steps += [self.head, self.second_look]
        return steps

    # -- the first step ---

    def start(self) -> Step:
        if self.coin():
            self.description.append(f"input of width {self.width}")
            self.inputs = torch.randn(*self.batch, self.width, dtype=torch.float64)
            return nn.Identity()
        padding = self.draw.choice([None, 0, VOCABULARY - 1])
        table = self.own(
            nn.Embedding(VOCABULARY, self.width, padding_idx=padding),
            f"embedding, padding {padding}",
        )
        self.tables.append(table)
        self.inputs = torch.randint(0, VOCABULARY, self.batch)
        return table

    # -- steps that keep the shape, or change the width ---

    def affine(self) -> Step:
        before, self.width = self.width, self.width if self.coin() else self.draw.randint(2, 6)
        if self.coin():
            return self.own(
                nn.Linear(before, self.width, bias=self.coin()), f"linear {before}-{self.width}"
            )
        return self.own(Conv1D(self.width, before), f"conv1d {before}-{self.width}")

    def norm(self) -> Step:
        kind = self.draw.choice(["layer", "layer without bias", "rms"])
        if kind == "rms":
            return self.own(nn.RMSNorm(self.width, eps=1e-5), "rms norm")
        return self.own(nn.LayerNorm(self.width, bias=kind == "layer"), f"{kind} norm")

    def group_norm(self) -> Step:
        groups = self.draw.choice(
            [n for n in (1, 2, 3) if self.width % n == 0 and self.width // n > 1] or [1]
        )
        module = self.own(nn.GroupNorm(groups, self.width), f"group norm {groups}")
        # Conv1D asks for contiguous numbers.
        return lambda value: module(value.movedim(-1, 1)).movedim(1, -1).contiguous()

    def activation(self) -> Step:
        function = self.draw.choice([torch.tanh, torch.sigmoid, nn.functional.gelu])
        self.description.append(function.__name__)
        return function

    def residual(self) -> Step:
        self.description.append("residual")

        def add(value: Tensor) -> Tensor:
            numbers = (each for each in self.earlier if each.is_floating_point())
            same = [each for each in numbers if each.shape == value.shape]
            return value + torch.tanh(same[0]) if same else value

        return add

    def reuse(self) -> Step:
        """An earlier module a second time, where the width allows."""
        kinds = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
        fitting = [m for m in self.owners if isinstance(m, kinds) and m.weight.shape in self.square]
        if not fitting:
            return self.norm()
        module = self.draw.choice(fitting)
        self.description.append(f"reuse {type(module).__name__}")
        return module

    @property
    def square(self) -> list[tuple[int, ...]]:
        """Shapes of weights that keep the width."""
        return [(self.width,), (self.width, self.width)]

    def tied(self) -> Step:
        """Two linear layers, the second with the first one's weight; with its own bias or none."""
        first = self.own(nn.Linear(self.width, self.width), "linear")
        second = self.own(nn.Linear(self.width, self.width, bias=self.coin()), "tied linear")
        second.weight = first.weight
        return lambda value: second(torch.tanh(first(value)))

    def bare(self) -> Step:
        """A module without a rule that owns a child as well."""
        return self.own(Gate(self.width), "bare parameters")

    # -- steps on positions ---

    def mix(self) -> Step:
        self.description.append("attend")
        return lambda value: torch.softmax(value @ value.mT, -1) @ value

    def flattened(self) -> Step:
        """As OPT's feed-forward layers: all positions of the batch in one dimension."""
        linear = self.own(nn.Linear(self.width, self.width), "flattened linear")
        norm = self.own(nn.LayerNorm(self.width), "flattened norm")
        return lambda value: norm(linear(value.flatten(0, 1))).view(value.shape)

    def pool(self) -> Step:
        self.description.append("mean over positions")
        self.positions = False
        return lambda value: value.mean(1)

    def positions_table(self) -> Step:
        """Looked up with (1, T), shared by the batch, or with (b, T)."""
        table = self.own(nn.Embedding(12, self.width), "position table")
        if self.coin():
            return lambda value: value + table(torch.arange(value.shape[1])[None])
        return lambda value: value + table(torch.arange(value.shape[1]).expand(len(value), -1))

    # -- steps with the first table ---

    def head(self) -> Step:
        """Return a head tied to the embedding; the width becomes the vocabulary's."""
        (table,) = self.tables
        to = table.embedding_dim
        project = self.own(nn.Linear(self.width, to), f"linear {self.width}-{to}")
        head = self.own(nn.Linear(to, VOCABULARY, bias=self.coin()), "tied head")
        head.weight = table.weight
        self.width = VOCABULARY
        return lambda value: head(torch.tanh(project(value)))

    def second_look(self) -> Step:
        """The same table looked up with other tokens, and pooled to a factor for each example."""
        (table,) = self.tables
        self.description.append("second look-up")

        def scale(value: Tensor) -> Tensor:
            looked_up = table((self.tokens + 1) % VOCABULARY).flatten(1).mean(1)
            return value * (1 + looked_up.view(-1, *[1] * (value.dim() - 1)))

        return scale

    def freeze(self) -> None:
        parameters = list(self.parameters())
        for parameter in parameters[:-1]:
            parameter.requires_grad_(self.draw.random() < 0.75)


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, width))
        self.gain = nn.Parameter(torch.randn(width))
        self.child = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.child(value) * self.gain) + self.token


def loss(graph: Graph, value: Tensor) -> Tensor:
    return graph(value)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graph(seed):
    model = Graph(seed)
    expected = loop(model, model.inputs.split(1), loss=lambda graph, value: graph(value)[0])
    for strategy in STRATEGIES:
        try:
            found = clipped(model, model.inputs, expected.clipping_norm, strategy, loss=loss)
            assert_equal(*found, expected, EXACT)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {strategy}: {model}\n{error}") from error


def test_the_graphs_differ_and_reach_every_kind_of_step():
    graphs = [Graph(seed) for seed in SEEDS]
    words = " ".join(text for graph in graphs for text in graph.description)
    kinds = (
        "embedding, padding None|embedding, padding 0|linear|conv1d|layer norm|without bias|"
        "rms norm|group norm|reuse Linear|reuse LayerNorm|reuse RMSNorm|tied linear|tied head|"
        "second look-up|bare|residual|attend|flattened|position table"
    ).split("|")
    assert [kind for kind in kinds if kind not in words] == []
    assert {len(graph.batch) for graph in graphs} == {1, 2}
    assert len({str(graph) for graph in graphs}) == len(SEEDS)


def norms_of(graph: Graph) -> Tensor:
    return loop(graph, graph.inputs.split(1), loss=lambda graph, value: graph(value)[0]).norms


def test_the_graphs_can_tell_a_missing_cross_term():
    """If the uses of a weight count as untied, some graph has another norm."""
    told = 0
    for seed in SEEDS:
        tied, untied = Graph(seed), Graph(seed)
        for module in untied.owners:
            if isinstance(module, nn.Linear):
                weight = module.weight
                module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        told += not torch.allclose(norms_of(tied), norms_of(untied), rtol=1e-6)
    assert told > 5

"""Units of module trees: every parameter in exactly one, in the order of use, of one kind each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.inspection.insides import list_params, module_tree
from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import Unit, UnitRules, find_units


def units_of(
    model: nn.Module, cast: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype, **rules: int | None
) -> list[Unit]:
    specs = list_params(model, cast)
    return find_units(module_tree(model, specs), list(specs.values()), UnitRules(**rules))  # type: ignore[arg-type]


def names_of(units: list[Unit]) -> list[list[str]]:
    return [[entry.param.name for entry in unit.entries] for unit in units]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Stack(nn.Module):
    def __init__(self, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)


def test_embeddings_are_known_by_their_module() -> None:
    model = nn.Sequential(Stack(), nn.EmbeddingBag(8, 16))
    model[0].head.weight = model[0].embed.weight
    specs = list_params(model, lambda dtype: dtype)
    assert [spec.name for spec in specs.values() if spec.embedding] == ["0.embed.weight", "1.weight"]
    assert not any(spec.embedding for spec in list_params(Block(), lambda dtype: dtype).values())


def test_a_block_is_a_unit() -> None:
    units = units_of(Stack())
    assert [unit.module for unit in units] == ["embed", *(f"blocks.{i}" for i in range(6)), "norm", "head"]
    parts = ("norm", "up", "down")
    assert names_of(units)[1] == [f"blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    assert [unit.index for unit in units] == list(range(9))


def test_a_tied_parameter_moves_once_and_knows_its_names() -> None:
    model = Stack()
    model.head.weight = model.embed.weight
    specs = list_params(model, lambda dtype: dtype)
    assert len(specs) == len(list(model.parameters()))
    assert specs[model.embed.weight].name == "embed.weight"
    assert specs[model.embed.weight].aliases == ("head.weight",)
    names = [name for unit in names_of(units_of(model)) for name in unit]
    assert names.count("embed.weight") == 1 and "head.weight" not in names


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        list_params(nn.ReLU(), lambda dtype: dtype)


def test_kinds_are_kept_apart() -> None:
    block = Block()
    block.up.weight.requires_grad_(False)
    block.down.weight = nn.Parameter(block.down.weight.to(torch.bfloat16))
    block.register_parameter("table", nn.Parameter(torch.zeros(9, dtype=torch.uint8), requires_grad=False))
    units = units_of(block, size_cap_numel=10**9)
    assert {(unit.dtype, unit.trainable) for unit in units} == {
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.uint8, False),
    }
    assert len({unit.name for unit in units}) == len(units) == 4


def test_the_cast_is_the_dtype_on_the_device() -> None:
    units = units_of(Stack(), cast=lambda dtype: torch.bfloat16 if dtype.is_floating_point else dtype)
    assert {unit.dtype for unit in units} == {torch.bfloat16}


def test_small_parameters_persist_up_to_their_total() -> None:
    model = Stack(depth=2)
    persistent = [unit for unit in units_of(model, persistence_numel=16) if unit.persistent]
    kept = {entry.param.name for unit in persistent for entry in unit.entries}
    assert kept == {name for name, param in model.named_parameters() if param.numel() <= 16}
    capped = [unit for unit in units_of(model, persistence_numel=16, max_persistent_numel=40) if unit.persistent]
    assert sum(entry.param.numel for unit in capped for entry in unit.entries) == 32, "two of 16, a third would pass 40"
    assert not any(unit.persistent for unit in units_of(model, persistence_numel=0))


@pytest.mark.parametrize("cap", [1, 1000, 10**9])
def test_the_cap_descends_only_while_it_must(cap: int) -> None:
    model = Stack()
    for unit in units_of(model, size_cap_numel=cap):
        module = model.get_submodule(unit.module)
        numel = sum(entry.param.numel for entry in unit.entries)
        assert numel <= cap or not list(module.children()), "a unit over the cap is a leaf, which cannot be cut"


def test_containers_are_walked_and_mixtures_of_experts_reach_their_experts() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)])

    model = nn.Module()
    model.layers = nn.ModuleList([Moe(), Moe()])
    units = units_of(model, size_cap_numel=10**9)
    modules = {unit.module for unit in units}
    assert {f"layers.{i}.gate" for i in range(2)} <= modules
    experts = {module for module in modules if ".experts." in module}
    assert {module.split(".experts.")[0] + module.split(".experts.")[1][0] for module in experts} == {
        f"layers.{i}{k}" for i in range(2) for k in range(4)
    }, "each expert moves by itself"


def test_many_ranks_gather_a_block_with_all_its_experts() -> None:
    """A dictionary of parts is no list of blocks; a list in it is."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "blocks": nn.ModuleList(Routed() for _ in range(2))})
    apart = [unit.module for unit in units_of(model)]
    together = [unit.module for unit in units_of(model, world_size=2)]
    assert apart[:3] == ["embed", "blocks.0.norm", "blocks.0.experts.0"]
    assert together == ["embed", "blocks.0", "blocks.1"]


def test_many_ranks_gather_a_block_that_is_a_list_itself() -> None:
    """A Sequential of blocks runs all of them, on every rank."""
    experts = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))
    stages = nn.ModuleList(nn.Sequential(*(Block() for _ in range(3))) for _ in range(2))
    model = nn.ModuleDict({"experts": experts, "stages": stages})
    together = [unit.module for unit in units_of(model, world_size=2)]
    assert together == ["experts.0", "experts.1", *(f"stages.{i}.{j}" for i in range(2) for j in range(3))]
    assert [unit.module for unit in units_of(model)][:6] == [f"experts.{i}.{j}" for i in range(2) for j in range(3)]


class Parts(nn.Module):
    """A block with seven parts in a list, small or large ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.query = nn.Linear(64, width)
        self.parts = nn.ModuleList(nn.Linear(64, width) for _ in range(7))
        self.gate = nn.Parameter(torch.ones(64))


def test_small_parts_of_a_block_move_together() -> None:
    def blocks(num: int, **rules: int) -> list[Unit]:
        return units_of(nn.ModuleList(Parts(256) for _ in range(num)), **rules)

    assert [unit.module for unit in blocks(96)] == [f"{index}" for index in range(96)], "all of a small block"
    large = blocks(4)
    assert names_of(large)[:2] == [["0.gate", "0.norm.weight", "0.norm.bias"], ["0.query.weight", "0.query.bias"]]
    assert [unit.module for unit in large[:9]] == ["0", "0.query", *(f"0.parts.{index}" for index in range(7))]
    vectors, *matrices = blocks(4, persistence_numel=256)[:9]
    assert (vectors.module, vectors.params_numel, vectors.persistent) == ("0", 64 * 3 + 256 * 8, True)
    assert not any(unit.persistent for unit in matrices)
    some = blocks(16)
    most = sum(param.numel() for param in Parts(256).parameters()) * 16 // 64
    assert all(unit.params_numel <= most for unit in some), "what a batch does not use is small"
    assert [unit.module for unit in some[:8]] == ["0", *(f"0.parts.{index}" for index in range(7))]


def test_parameters_of_a_descended_module_are_its_own_unit() -> None:
    model = Stack()
    model.scale = nn.Parameter(torch.ones(()))
    units = units_of(model)
    assert names_of(units)[0] == ["scale"]
    assert units[0].module == ""


def test_empty_and_scalar_parameters() -> None:
    model = nn.Module()
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.scalar = nn.Parameter(torch.tensor(2.0))
    (unit,) = units_of(model, persistence_numel=0)
    assert names_of([unit]) == [["empty", "scalar"]]
    only_empty = nn.Module()
    only_empty.empty = nn.Parameter(torch.empty(0))
    assert units_of(only_empty) == [], "nothing to move"


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    module: nn.Module = draw(st.sampled_from([nn.Module, nn.ModuleList, nn.Sequential]))()
    for k in range(draw(st.integers(0, 3))):
        shape = draw(st.sampled_from([(), (0,), (3,), (5, 7), (40, 50)]))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        module.register_parameter(f"p{k}", nn.Parameter(torch.zeros(shape, dtype=dtype), draw(st.booleans())))
    for k in range(draw(st.integers(0, 3)) if depth else 0):
        module.add_module(str(k), draw(trees(depth=depth - 1)))
    return module


@given(
    model=trees(),
    cap=st.one_of(st.none(), st.integers(1, 5000)),
    persistence=st.integers(0, 50),
    tie=st.booleans(),
    world_size=st.integers(1, 4),
)
def test_any_tree_is_partitioned(
    model: nn.Module, cap: int | None, persistence: int, tie: bool, world_size: int
) -> None:
    owners = [m for m in model.modules() if m._parameters]
    if not owners:
        return
    if tie and len(owners) > 1:
        owners[-1].register_parameter("tied", next(iter(owners[0]._parameters.values())))
    specs = list_params(model, lambda dtype: dtype)
    tree, listed = module_tree(model, specs), list(specs.values())
    rules = UnitRules(size_cap_numel=cap, persistence_numel=persistence, world_size=world_size)
    units = find_units(tree, listed, rules)
    placed = [entry.param for unit in units for entry in unit.entries]
    assert len({spec.index for spec in placed}) == len(placed), "each once"
    assert {spec.index for spec in specs.values() if spec.numel} <= {spec.index for spec in placed}, "none left out"
    for unit in units:
        module = model.get_submodule(unit.module)
        own = {id(param) for param in module.parameters()}
        for entry in unit.entries:
            assert (entry.param.dtype, entry.param.trainable) == (unit.dtype, unit.trainable)
            assert unit.persistent == (0 < entry.param.numel <= persistence)
            assert id(next(p for p, spec in specs.items() if spec is entry.param)) in own
    again = find_units(module_tree(model, specs), listed, rules)
    assert [(u.name, u.entries, u.bounds) for u in units] == [(u.name, u.entries, u.bounds) for u in again]


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_block_is_cut_only_where_a_cap_is_given_or_it_is_the_whole_model() -> None:
    model = Stack(depth=2)
    parts = [unit.module for unit in units_of(model)]
    model.compile(backend="eager")
    assert [unit.module for unit in units_of(model)] == parts
    for block in model.blocks:
        block.compile(backend="eager")
    assert [unit.module for unit in units_of(model)] == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert len(units_of(model, size_cap_numel=1200)) > 5

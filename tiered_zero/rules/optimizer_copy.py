"""Run a torch optimizer's own code on chosen parameters: copy the optimizer without state, step it, flatten its
state."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from tiered_zero.errors import ModelError
from tiered_zero.rules.rule import Run

State = dict[str, Any]
Group = dict[str, Any]
DEVICE_CHUNK_NUMEL = 1 << 26
_CHUNK_NUMEL = 1 << 18
_GRAIN_NUMEL = 1 << 16
_MARKS: dict[type, str] = {list: "items of a list: ", tuple: "items of a tuple: ", dict: "items of a dict: "}
_PLAIN = (bool, int, float, str, type(None))
"""Types whose values need no copy. Almost all values of a param group have one of them."""


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of the optimizer without parameters, state, step hooks, or a scheduler's wrapper around `step`.
    Tensors among its attributes, and containers of them, are copied, because a step may move them to its device."""
    bare = type(optimizer).__new__(type(optimizer))
    omitted = ("step", "param_groups", "state")
    bare.__dict__.update({name: copied(value) for name, value in optimizer.__dict__.items() if name not in omitted})
    bare.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    bare.param_groups = []
    bare.state = defaultdict(dict)
    return bare


def copied(value: Any) -> Any:
    """Copy tensors and plain containers; return everything else as it is."""
    if type(value) is torch.Tensor:
        return value.detach().clone()
    if type(value) in (dict, OrderedDict):
        return type(value)(zip(value, map(copied, value.values()), strict=True))
    if type(value) in (list, tuple, set):
        return type(value)(map(copied, value))
    return value


def copied_group(group: Mapping[str, Any]) -> Group:
    """Return a copy of a param group's values, without "params"."""
    own = {**group}
    own.pop("params", None)
    for name, value in group.items():
        if name != "params" and type(value) not in _PLAIN:
            own[name] = copied(value)
    return own


def advance(
    optimizer: Optimizer,
    leaves: Sequence[torch.Tensor],
    group: Mapping[str, Any],
    states: Sequence[State],
    tracks_group: bool = False,
) -> tuple[list[State], Group]:
    """Step `optimizer` with `leaves` as its only parameters, whose state is `states`. Return each leaf's state after
    the step, and the values of the param group that the step changed; `group` itself does not change. `tracks_group`:
    whether to look for such values; False for classes known not to change their group."""
    own = copied_group(group) if tracks_group else group
    optimizer.param_groups = [{**own, "params": list(leaves)}]
    optimizer.state = defaultdict(dict, zip(leaves, states, strict=True))
    try:
        optimizer.step()
        after = optimizer.param_groups[0]
        return [dict(optimizer.state[leaf]) for leaf in leaves], changes(group, after) if tracks_group else {}
    finally:
        optimizer.param_groups = []
        optimizer.state = defaultdict(dict)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Group:
    """Return the items of `after` that are new or different, except "params"."""
    return {
        name: value
        for name, value in after.items()
        if name != "params" and (name not in before or not same(before[name], value))
    }


def numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of the optimizer itself that are numbers or tensors of one element."""
    return {
        name: copied(value)
        for name, value in vars(optimizer).items()
        if type(value) in (int, float) or (type(value) is torch.Tensor and value.numel() == 1)
    }


def same(left: Any, right: Any) -> bool:
    """Return whether two values have the same type and the same contents; a NaN equals a NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.is_meta == right.is_meta and not left.is_meta and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left is right or bool(left == right) or (isinstance(left, float) and left != left and right != right)


def cloned(scalars: Mapping[str, Any]) -> State:
    """Return a copy of a mapping, with its tensors copied too."""
    return {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in scalars.items()}


def cloned_all(scalars: Sequence[Mapping[str, Any]]) -> list[State]:
    """Return copies of many mappings and of the tensors in them, with one launch per device and dtype."""
    copies, pairs = [dict(each) for each in scalars], defaultdict(list)
    for each in copies:
        for name, value in each.items():
            if isinstance(value, torch.Tensor):
                each[name] = torch.empty_like(value)
                pairs[value.device, value.dtype].append((each[name], value))
    for alike in pairs.values():
        torch._foreach_copy_([copy for copy, _ in alike], [value for _, value in alike])
    return copies


def flattened(state: Mapping[str, Any]) -> State:
    """Return a parameter's state without nesting: each item of a list, tuple or dict gets a name of its own, and each
    container becomes a text from which `nested` rebuilds it. Raises ModelError if two items get one name."""
    flat: State = {}
    for name, value in state.items():
        _flatten(name, value, flat)
    return flat


def _flatten(name: str, value: Any, flat: State) -> None:
    if name in flat:
        raise ModelError(f"The state of a parameter was expected to have one value named {name}; found two.")
    if type(value) not in (list, tuple, dict):
        flat[name] = value
        return
    items = value if isinstance(value, dict) else dict(enumerate(value))
    if other := [key for key in items if not isinstance(key, (str, int))]:
        raise ModelError(f"The keys of the state {name} were expected to be str or int; found {other[0]!r}.")
    flat[name] = _MARKS[type(value)] + json.dumps(list(items))
    for key, item in items.items():
        _flatten(f"{name}.{key}", item, flat)


def nested(flat: Mapping[str, Any]) -> State:
    """Return the state with its lists, tuples and dicts, from the result of `flattened`."""
    left = dict(flat)

    def take(name: str) -> Any:
        value = left.pop(name)
        for kind, mark in _MARKS.items():
            if isinstance(value, str) and value.startswith(mark):
                items = {key: take(f"{name}.{key}") for key in json.loads(value.removeprefix(mark))}
                return items if kind is dict else kind(items.values())
        return value

    marked = [name for name, value in flat.items() if isinstance(value, str) and value.startswith("items of a ")]
    outer_first = [*sorted(marked, key=len), *flat]
    return {name: take(name) for name in outer_first if name in left}


def example_leaf(values: torch.Tensor) -> torch.Tensor:
    """Make `values` a parameter whose gradient is 1 everywhere, and return it."""
    values.requires_grad_().grad = torch.ones_like(values)
    return values


def leaves_of(runs: Sequence[Run]) -> list[torch.Tensor]:
    """Return the masters of `runs` as parameters with their scaled gradients."""
    leaves = [run.master.detach().requires_grad_() for run in runs]
    grads = [run.grad for run in runs]
    if any(grad.dtype != torch.float32 for grad in grads):
        floats = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        torch._foreach_copy_(floats, grads)
        grads = floats
    if (scale := runs[0].grad_scale) != 1.0:
        torch._foreach_mul_(grads, scale)
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad
    return leaves


def pieces_of(run: Run) -> list[Run]:
    """Cut an elementwise run into pieces. On the CPU a piece is just large enough that every thread has work and calls
    cost little: torch's temporaries then stay in the cache. (AdamW on one thread takes about half the time of an uncut
    run with pieces of 256 Ki to 512 Ki elements.) On a GPU the cuts only limit temporary memory."""
    on_cpu = run.master.device.type == "cpu"
    size = max(_CHUNK_NUMEL, _GRAIN_NUMEL * torch.get_num_threads()) if on_cpu else DEVICE_CHUNK_NUMEL
    return [run.part(start, start + size) for start in range(0, max(1, run.master.numel()), size)]


@contextmanager
def dry_steps() -> Iterator[None]:
    """Run the block, which steps a copy of an optimizer, without autograd and without changing the user's random
    state."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield

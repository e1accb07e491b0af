"""Make an update rule that steps with the code of any torch.optim class.

The functions at the top copy an optimizer, step chosen parameters, and flatten their state."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from tiered_zero.errors import ModelError
from tiered_zero.rules.rule import Slice, StateField, UpdateRule

State = dict[str, Any]
Group = dict[str, Any]
DEVICE_CHUNK_NUMEL = 1 << 26
_CHUNK_NUMEL = 1 << 18
_GRAIN_NUMEL = 1 << 16
_MARKS: dict[type, str] = {list: "items of a list: ", tuple: "items of a tuple: ", dict: "items of a dict: "}
_PLAIN = (bool, int, float, str, type(None))
"""Types whose values need no copy. Almost all values of a param group have one of them."""


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """Copy an optimizer, except its param groups, its state, its step hooks, and the wrapper around `step` that a
    scheduler adds."""
    bare = type(optimizer).__new__(type(optimizer))
    omitted = ("step", "param_groups", "state")
    # Tensors are copied too: a step may move them to its device.
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


def on_cpu(value: Any) -> Any:
    """Copy tensors and plain containers to the CPU; return everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return {name: on_cpu(item) for name, item in value.items()} if isinstance(value, Mapping) else value


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
    """Step `optimizer` once on `leaves`, its only parameters. `group`: the values of their param group. `states`: the
    state of each leaf. Return each leaf's new state, and the group values that the step changed. `tracks_group`:
    whether to look for changed group values; False: return {} for them."""
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
    """Return copies of the optimizer's attributes that are numbers or tensors of one element, such as step counts."""
    return {
        name: copied(value)
        for name, value in vars(optimizer).items()
        if type(value) in (int, float) or (type(value) is torch.Tensor and value.numel() == 1)
    }


def same(left: Any, right: Any) -> bool:
    """Return whether two values have the same type and contents. Two float NaNs are the same; tensors with a NaN, or on
    the meta device, never are."""
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
    """Return a parameter's state without nested containers: an item of a list, tuple or dict `name` is called
    "name.key". `nested` reverses this. Raises ModelError if two items get the same name or a key is neither str nor
    int."""
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
    """Rebuild the lists, tuples and dicts of a state that `flattened` has flattened."""
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


def leaves_of(slices: Sequence[Slice]) -> list[torch.Tensor]:
    """Return the masters of `slices` as leaf tensors. The `.grad` of a leaf is its slice's gradient in fp32, multiplied
    by `grad_scale`, which all slices share."""
    leaves = [part.master.detach().requires_grad_() for part in slices]
    grads = [part.grad for part in slices]
    if any(grad.dtype != torch.float32 for grad in grads):
        floats = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        torch._foreach_copy_(floats, grads)
        grads = floats
    if (scale := slices[0].grad_scale) != 1.0:
        torch._foreach_mul_(grads, scale)
    for leaf, grad in zip(leaves, grads, strict=True):
        leaf.grad = grad
    return leaves


def pieces_of(part: Slice) -> list[Slice]:
    """Cut a slice for an elementwise rule into shorter slices, to limit temporary memory."""
    on_cpu = part.master.device.type == "cpu"
    # On the CPU temporaries then stay in the cache: on one thread AdamW takes half the time.
    size = max(_CHUNK_NUMEL, _GRAIN_NUMEL * torch.get_num_threads()) if on_cpu else DEVICE_CHUNK_NUMEL
    return [part.cut(start, start + size) for start in range(0, max(1, part.master.numel()), size)]


@contextmanager
def dry_steps() -> Iterator[None]:
    """A context manager for trial steps: its block runs without autograd, and the CPU's random state is restored
    afterwards."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
}
"""Classes that give the same bits wherever a slice is cut, if `fused` is off. Subclasses are not included, because they
may change the step. rules/native_rules.py adds Lion."""

TEMPORARIES: dict[type[Optimizer], int] = {
    **dict.fromkeys((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam), 1),
    **dict.fromkeys((torch.optim.ASGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop), 2),
    torch.optim.Adadelta: 3,
}
"""Maps an optimizer class to the number of temporary arrays that torch's foreach code needs (see
`UpdateRule.temporaries`). This code steps many parameters with one launch."""

REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it evaluates the model several times within a step and couples all parameters",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients are dense here",
}

PROBE_STEPS = 8
"""The number of trial steps in `_refuse_coupling`. RAdam and similar classes change their formula after five steps."""
_INITIALIZED = "initialized"
_ABSENT = "absent"  # for a scalar with an array's name: torch does not have the array yet (SGD without momentum)

_Constructor = Callable[[list[Any]], Optimizer]


class TorchRule(UpdateRule):
    """Steps with the code of an optimizer's class. Results equal, bit for bit, those of the optimizer with whole fp32
    parameters and gradients.

    A class in ELEMENTWISE gets slices of shape [n], cut anywhere, unless `fused` is set. Any other class gets whole
    parameters, one at a time, and must update each independently of the others. `Slice.state` holds the arrays of
    the state, and `Slice.scalars` all other state."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Make the rule for `optimizer`, which is neither changed nor stepped. Raises ModelError as `refuse_class`
        does."""
        kind = type(optimizer)
        refuse_class(kind)
        defaults = optimizer.defaults
        fused = bool(defaults.get("fused")) or any(group.get("fused") for group in optimizer.param_groups)
        self.name = kind.__name__
        self.defaults = dict(defaults)
        self.elementwise = kind in ELEMENTWISE and not fused
        self.temporaries = TEMPORARIES.get(kind, self.temporaries)
        self._optimizer = bare_copy(optimizer)
        self._construct: _Constructor | None = None
        """The constructor of the optimizer, if it creates the state, as Adagrad's does; None if the first step creates
        the state."""
        self._expected: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        """For each param group of this step: the values that the step reads, and the new values of the options that the
        step changes."""
        self._fields: dict[tuple[tuple[int, ...], str], list[StateField]] = {}
        names = inspect.signature(kind).parameters
        construct = partial(cast(Any, kind), **{name: value for name, value in defaults.items() if name in names})
        with contextlib.suppress(Exception):  # a user's constructor may need other arguments, and most create no state
            if (optimizer.state or kind in ELEMENTWISE) and construct([torch.zeros(1, 1, requires_grad=True)]).state:
                self._construct = construct

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        """Find the state arrays by two trial steps. Raises ModelError if a step fails, if the state is neither tensors
        nor plain values, or if the update of a parameter depends on other parameters."""
        self._refuse_options(hyper)
        options = repr(sorted((name, value) for name, value in hyper.items() if name != "params"))
        key = ((1,) if self.elementwise else shape, options)
        if self.elementwise:
            if key not in self._fields:
                self._fields[key] = self._dry_run((1,), hyper, "cpu")
            return [replace(found, shape=shape) for found in self._fields[key]]
        if key not in self._fields:
            self._refuse_coupling(tuple(min(length, 3) for length in shape), hyper)
            try:
                self._fields[key] = self._dry_run(shape, hyper, "meta")
            except ModelError:
                self._fields[key] = self._dry_run(shape, hyper, "cpu")
        return list(self._fields[key])

    def update(self, slices: Sequence[Slice]) -> None:
        """Make one step on every slice. Any thread may call this, but only one thread at a time."""
        for part in slices:
            self._refuse_options(part.hyper, part.master.device)
        with torch.no_grad():
            for batch in self._batches(slices):
                self._step(batch)

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> State:
        """Return the state that the constructor creates; {} if the first step creates it."""
        return {} if self._construct is None else self._first_state(torch.zeros(shape, requires_grad=True), hyper)

    def export_state(self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> State:
        return self._state_of(state, cloned(scalars)) if scalars else {}

    def check_state(self, values: Mapping[str, Any], shape: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        fields, values = {found.name: found for found in self.state_fields(shape, hyper)}, flattened(values)
        arrays = {name: values[name] for name in fields if isinstance(values.get(name), torch.Tensor)}
        rest, _ = self._split({name: value for name, value in values.items() if name not in arrays})
        self.refuse_unplanned(rest, fields)
        for name, array in arrays.items():
            if tuple(array.shape) != fields[name].shape:
                raise ModelError(
                    f"The state {name} was expected to have shape {fields[name].shape}; found {tuple(array.shape)}. "
                    "Load the state of an optimizer over the same parameters, in the same order."
                )
        if self.elementwise:
            self._try_state({**values, **{name: torch.zeros(1) for name in arrays}}, hyper)

    def import_state(
        self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]
    ) -> State:
        """Copy state in torch's format to the arrays `state`, and return the scalars. Scalar tensors become fp32 on the
        CPU, but a step count keeps its dtype. If the param group sets fused or capturable, all scalar tensors become
        fp32 on the device of the arrays."""
        scalars = flattened(values)
        for name, home in state.items():
            if isinstance(scalars.get(name), torch.Tensor):
                home.copy_(scalars.pop(name))
            else:
                scalars.setdefault(name, _ABSENT)
        by_device = hyper.get("fused") or hyper.get("capturable")
        device = next(iter(state.values())).device if state and by_device else torch.device("cpu")
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                is_count = name.rpartition(".")[2] == "step"
                dtype = value.dtype if is_count and not by_device else torch.float32  # as in torch
                scalars[name] = value.detach().to(device, dtype, copy=True)
        return scalars or {_INITIALIZED: True}

    def load_scalars(self, scalars: Mapping[str, Any]) -> State:
        """Return a copy of `scalars`. A float step count, as the native rules have it, becomes a tensor."""
        own = dict(scalars)
        if isinstance(own.get("step"), float):
            own["step"] = torch.tensor(own["step"], dtype=torch.float32)
        return own

    def _try_state(self, state: State, hyper: Mapping[str, Any]) -> None:
        """Try to step one element that has the state `state`. Raises ModelError if that fails."""
        leaf = example_leaf(torch.zeros(1))
        try:
            with dry_steps():
                advance(bare_copy(self._optimizer), [leaf], hyper, [cloned(state)])
        except Exception as error:
            raise ModelError(
                f"{self.name} cannot go on from state with {sorted(state) or 'nothing'} alone; it raised "
                f"{type(error).__name__}: {error}. Load the whole state of such an optimizer."
            ) from error

    def _batches(self, slices: Sequence[Slice]) -> Iterator[list[tuple[Slice, Slice]]]:
        """Yield lists of (piece of a slice, the whole slice). torch steps all pieces of a list in one call."""
        is_known = type(self._optimizer) in ELEMENTWISE
        waiting: dict[tuple[int, float], list[tuple[Slice, Slice]]] = {}
        for part in slices:
            for piece in pieces_of(part) if self.elementwise else (part,):
                # Other classes step one parameter at a time; the CPU gains nothing from one launch for many.
                if part.master.is_cpu or not is_known:
                    yield [(piece, part)]
                    continue
                batch = waiting.setdefault((id(part.hyper), part.grad_scale), [])
                if batch and sum(each.master.numel() for each, _ in batch) + piece.master.numel() > DEVICE_CHUNK_NUMEL:
                    yield batch
                    batch.clear()
                batch.append((piece, part))
        yield from waiting.values()

    def _step(self, batch: Sequence[tuple[Slice, Slice]]) -> None:
        """Step pieces of one param group with torch's own code. `batch`: pairs of a piece and the whole `Slice` from
        which it was cut."""
        pieces = [piece for piece, _ in batch]
        leaves, group = leaves_of(pieces), pieces[0].hyper
        states = [
            self._state_of(piece.state, scalars) if scalars else self._first_state(leaf, group)
            for piece, leaf, scalars in zip(pieces, leaves, cloned_all([each.scalars for each in pieces]), strict=True)
        ]
        tracks_group = type(self._optimizer) not in ELEMENTWISE
        afters, changed = advance(self._optimizer, leaves, group, states, tracks_group)
        self._check_group(group, changed)
        for (piece, part), leaf, after in zip(batch, leaves, afters, strict=True):
            self._store(piece, leaf, after)
            part.scalars = piece.scalars  # all pieces were cut before: a slice that is cut makes one step
        if outs := [piece.out for piece in pieces if piece.out is not None]:
            torch._foreach_copy_(outs, [piece.master for piece in pieces if piece.out is not None])

    def _store(self, part: Slice, leaf: torch.Tensor, after: State) -> None:
        """Copy a step's results, the parameter `leaf` and the state `after`, to the arrays of `part` except `out`,
        and to `part.scalars`."""
        arrays, scalars = self._split(after)
        part.scalars = (
            scalars if type(self._optimizer) in ELEMENTWISE else cloned(scalars)
        )  # others may keep references
        for name, home in part.state.items():
            if name in arrays:
                self._write_back(name, arrays.pop(name), home)
            else:
                part.scalars.setdefault(name, _ABSENT)
        self.refuse_unplanned(arrays, part.state)
        if not part.scalars:
            part.scalars = {_INITIALIZED: True}
        self._write_back("parameter", leaf, part.master)

    def _state_of(self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> State:
        absent = {name for name, value in scalars.items() if isinstance(value, str) and value == _ABSENT}
        kept = {name: value for name, value in scalars.items() if name not in {_INITIALIZED, *absent}}
        return nested({name: home.detach() for name, home in state.items() if name not in scalars} | kept)

    def _first_state(self, leaf: torch.Tensor, group: Mapping[str, Any]) -> State:
        if self._construct is None:
            return {}
        return dict(self._construct([{**group, "params": [leaf]}]).state[leaf])

    def _write_back(self, name: str, value: torch.Tensor, home: torch.Tensor) -> None:
        """Copy `value`, a result of the step, to `home`. Raises ModelError if dtype or shape differ."""
        if value.shape != home.shape or value.dtype != home.dtype:
            raise ModelError(
                f"{self.name} was planned with {name} of {home.dtype} {tuple(home.shape)}; its step left {value.dtype} "
                f"{tuple(value.shape)}. Its state must keep dtype and shape."
            )
        if value.data_ptr() != home.data_ptr():  # the first step, or a class that replaces its arrays
            home.copy_(value.detach())

    def _split(self, state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], State]:
        """Split state into arrays and scalars (0-d tensors and plain values). Raises ModelError for anything else."""
        arrays: dict[str, torch.Tensor] = {}
        scalars: State = {}
        for name, value in flattened(state).items():
            if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise ModelError(
                    f"{self.name} was expected to keep plain tensors as state; found {name}: {type(value).__name__}, a "
                    "tensor subclass, whose parts cannot be moved between tiers. Take torch.optim.AdamW (or Adam) with "
                    "tiered_zero.state_format lossy_8bit_moments or lossy_bf16_moments instead."
                )
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                arrays[name] = value.detach()
            elif value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
                scalars[name] = value
            else:
                raise ModelError(
                    f"{self.name} was expected to keep tensors and plain values as state; found {name}: "
                    f"{type(value).__name__}. Such an optimizer cannot be moved between tiers."
                )
        return arrays, scalars

    def _dry_run(self, shape: tuple[int, ...], hyper: Mapping[str, Any], device: str) -> list[StateField]:
        """Make two trial steps on a parameter of ones, and describe the state arrays after them. Set
        `keeps_group_state` if the first step changes the param group. Raises ModelError if a step fails or an array is
        empty."""
        optimizer = bare_copy(self._optimizer)
        leaf = example_leaf(torch.ones(shape, device=device))
        try:
            with dry_steps():
                first, tracks_group = self._first_state(leaf, hyper), not self.elementwise
                states, changed = advance(optimizer, [leaf], hyper, [first], tracks_group)
                [after], _ = advance(optimizer, [leaf], {**hyper, **changed}, states)
                arrays, _ = self._split(after)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.name} was expected to step a parameter of shape {shape} with a gradient and no closure; "
                f"it raised {type(error).__name__}: {error}. Give such parameters another optimizer."
            ) from error
        if leaf.numel() and (empty := [name for name, array in arrays.items() if not array.numel()]):
            raise ModelError(
                f"{self.name} was expected to keep state whose size follows from the parameter's shape; {empty} has no "
                "elements after a step on ones, as where a class selects by values. Choose another optimizer."
            )
        self.keeps_group_state |= bool(changed)
        return [
            StateField(name=name, shape=tuple(array.shape), dtype=array.dtype, stride=_stride(array, shape))
            for name, array in arrays.items()
        ]

    def advance_groups(self, groups: Sequence[dict[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> None:
        """Change the user's `groups` as one step of the optimizer would. A trial step on a small parameter finds the
        changes. `frozen`: the values of the groups before the step."""
        self._expected = []
        if not self.keeps_group_state:
            return
        for group, values in zip(groups, frozen, strict=True):
            shape = tuple(min(length, 3) for length in group["params"][0].shape) if group["params"] else (1,)
            leaf = example_leaf(torch.ones(shape))
            with dry_steps():
                first = self._first_state(leaf, values)
                _, changed = advance(bare_copy(self._optimizer), [leaf], values, [first], tracks_group=True)
            group.update(copied(changed))
            self._expected.append((values, changed))

    def _check_group(self, hyper: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        expected = next((values for frozen, values in self._expected if frozen is hyper), {})
        if other := sorted({*changes(expected, changed), *(expected.keys() - changed.keys())}):
            raise ModelError(
                f"{self.name} was expected to update each parameter by itself; {other} of its param group became other "
                "values for one parameter than for another, as when it sums over parameters. It cannot be split "
                "between tiers: choose another optimizer."
            )

    def _refuse_coupling(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        """Raise ModelError if the optimizer class does not update each parameter independently. As a test, the class
        steps two small parameters together, and this rule steps them one by one. The results must have equal bits. If
        the class cannot step such small parameters, nothing is raised."""
        generator = torch.Generator().manual_seed(0)
        starts = torch.randn((2, *shape), generator=generator)
        grads = torch.randn((PROBE_STEPS, 2, *shape), generator=generator)
        together = [start.clone().requires_grad_() for start in starts]
        own = copied_group(hyper)
        with dry_steps():
            torch.manual_seed(0)
            try:
                optimizer = bare_copy(self._optimizer)
                optimizer.param_groups = [{**copied_group(own), "params": together}]
                optimizer.state.update({leaf: self._first_state(leaf, own) for leaf in together})
                for pair in grads:
                    counted = numbers(optimizer)
                    for leaf, grad in zip(together, pair, strict=True):
                        leaf.grad = grad.clone()
                    optimizer.step()
            except Exception:
                return  # the class does not accept this small shape: the dry run on the real shape decides
            fields = self._dry_run(shape, own, "cpu")
            rule = copy(self)
            rule._optimizer = bare_copy(self._optimizer)
            state = [{found.name: torch.zeros(found.shape, dtype=found.dtype) for found in fields} for _ in starts]
            apart = [
                Slice(master=start.clone(), grad=start, state=arrays, scalars={}, hyper=own)
                for start, arrays in zip(starts, state, strict=True)
            ]
            torch.manual_seed(0)
            group = {**own, "params": together}
            for pair in grads:
                frozen = copied_group(group)
                rule.advance_groups([group], [frozen])
                for part, grad in zip(apart, pair, strict=True):
                    part.grad, part.hyper = grad.clone(), frozen
                rule.update(apart)
        pairs = zip(together, apart, strict=True)
        alike = all(torch.equal(a.detach().view(torch.int32), b.master.view(torch.int32)) for a, b in pairs)
        counting = changes(counted, numbers(optimizer))
        if not alike or counting or changes(group, optimizer.param_groups[0]):
            found = f"it counts {sorted(counting)} in itself" if counting else "it may sum over parameters"
            raise ModelError(
                f"{self.name} was expected to update each parameter by itself; stepping two parameters one after the "
                f"other is not the same as together ({found}). It cannot be split between tiers: choose another "
                "optimizer."
            )

    def _refuse_options(self, hyper: Mapping[str, Any], device: torch.device | None = None) -> None:
        if hyper.get("differentiable"):
            raise ModelError(f"{self.name}: differentiable=True needs a graph over the update; set it to False.")
        if hyper.get("capturable") and device is not None and device.type == "cpu":
            raise ModelError(f"{self.name}: capturable=True needs an update on a GPU, and this one runs on the CPU.")
        if self.elementwise and hyper.get("fused"):
            raise ModelError(
                f"{self.name} was planned without fused=True; found it in a param group. It rounds otherwise at a cut: "
                "set it when the optimizer is made, so that whole parameters are stepped."
            )


def _stride(array: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a state array that is dense but not row-major. Return None for any other array, and for an
    array of the parameter's shape, `shape`."""
    # The order, such as that of eigenvectors, decides how products round.
    is_usual = tuple(array.shape) == shape or array.is_contiguous()
    return None if is_usual or not torch.ops.aten.is_non_overlapping_and_dense(array) else array.stride()


def refuse_class(kind: type[Optimizer]) -> None:
    """Raise ModelError for a class that cannot train across tiers: a wrapper of another optimizer, a ScheduleFree
    class, or one of REFUSED."""
    if isinstance(inspect.getattr_static(kind, "param_groups", None), property):
        raise ModelError(
            f"{kind.__name__} cannot train across tiers: it wraps another optimizer, which has its param groups and "
            "state. Pass the inner optimizer."
        )
    if any("ScheduleFree" in base.__name__ for base in kind.__mro__):
        raise ModelError(
            f"{kind.__name__} cannot train across tiers: its eval() and train() exchange weights for averages in its "
            "state, which is not at hand between steps. Choose an optimizer with a schedule, such as AdamW."
        )
    for refused, reason in REFUSED.items():
        if issubclass(kind, refused):
            raise ModelError(
                f"{kind.__name__} cannot train across tiers: {reason}. Choose an optimizer that steps each parameter "
                "by itself, such as AdamW."
            )

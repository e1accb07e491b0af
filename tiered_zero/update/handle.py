"""Provide the torch.optim.Optimizer that `initialize()` returns, and the base class of optimizers with state on
tiers."""

from __future__ import annotations

import logging
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain, count, islice
from types import MethodType
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.rules.torch_rule import bare_copy
from tiered_zero.update.policy import UpdatePolicy
from tiered_zero.update.state_view import ParamState, StateView

logger = logging.getLogger("tiered_zero")

NO_COPY = "An optimizer whose state rests on tiers cannot be copied or pickled. Save optimizer.state_dict() instead."


def creates_state(groups: Sequence[Mapping[str, Any]], grads: Collection[torch.Tensor]) -> bool:
    """Return whether `step` was called only to create state: every lr is 0, there are `grads`, and all of them are 0.
    torch.distributed.checkpoint makes such a call for an optimizer that has no state yet."""
    return bool(grads) and all(group.get("lr") == 0 for group in groups) and not any(grad.any() for grad in grads)


def refuse_state(*_: object) -> NoReturn:
    raise ModelError(
        "optimizer.state is not at hand: the state of each parameter rests on its tier. Read it with "
        "optimizer.state_dict() or read_state(param), change it with load_state_dict(), and drop all of it with "
        "optimizer.state = {}."
    )


@final
class OffloadedState:
    """The value of `optimizer.state[param]`. Iteration yields the names of the state tensors. Every other use raises
    ModelError."""

    def __init__(self, access: StateAccess, param: nn.Parameter) -> None:
        self._access, self._param = access, param

    def __iter__(self) -> Iterator[str]:
        return iter(self._access.read(self._param).get(self._param, {}))

    __getitem__ = __setitem__ = __delitem__ = __len__ = __bool__ = __contains__ = refuse_state
    get = items = keys = values = pop = setdefault = update = clear = copy = refuse_state


@final
class StateAccess(Mapping[nn.Parameter, ParamState]):
    """The mapping `optimizer.state` while the state rests on tiers. Keys: the parameters that have state. Values:
    `OffloadedState`, which gives no access to state tensors, because changes to them would be lost. Used on the driver
    thread."""

    def __init__(self, policy: UpdatePolicy) -> None:
        self._policy = policy
        self._view: StateView | None = policy.view

    def __len__(self) -> int:
        return len(self._open().stepped())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._open().stepped())

    def __contains__(self, param: object) -> bool:
        return any(param is stepped for stepped in self._open().stepped())

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        return OffloadedState(self, param)  # type: ignore[return-value]

    def __setitem__(self, param: nn.Parameter, value: object) -> None:
        """Ignore an `OffloadedState`, because code that moves state to a device assigns values back. Raises ModelError
        for any other value."""
        if not isinstance(value, OffloadedState):
            refuse_state()

    __delitem__ = pop = popitem = setdefault = update = clear = refuse_state

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise ModelError(NO_COPY)

    def read(self, only: nn.Parameter | None = None) -> dict[nn.Parameter, ParamState]:
        """Return copies of the state of `only` (None: of all parameters that have state). Waits for the updates under
        way."""
        return self._flushed().read(only)

    def check_groups(self, groups: list[dict[str, Any]]) -> None:
        """Raise ModelError if `groups`, new values of the param groups, need state that was not planned."""
        self._flushed().check_groups(groups)

    def replace(self, states: Mapping[nn.Parameter, ParamState], groups: list[dict[str, Any]]) -> None:
        """Replace the state of all parameters by `states`. A parameter missing in `states` then has no state. `groups`:
        the new values of the param groups, which the caller sets afterwards. Raises ModelError, with nothing changed,
        if `states` and `groups` do not fit. If writing fails, every later step raises."""
        view = self._open()

        def check() -> None:
            self._policy.check_untouched("Optimizer state is loaded")
            self._policy.finish(before_write=True)
            view.check(states, groups)

        view.shards.change("optimizer state is checked", check)
        try:
            view.shards.change("optimizer state is loaded", lambda: view.write(states, groups))
        except Exception as error:
            self._policy.failures.set(error)  # state is partly old and partly new
            raise

    @property
    def is_open(self) -> bool:
        return self._view is not None

    def close(self) -> None:
        """Make every later access raise ModelError. Called when the run closes."""
        self._view = None

    def _flushed(self) -> StateView:
        view = self._open()
        self._policy.check_untouched("Optimizer state is read")
        self._policy.finish()
        return view

    def _open(self) -> StateView:
        if self._view is None:
            raise ModelError("The run is closed, and the optimizer state is gone. Read it before close().")
        return self._view


# -- calls on state ----------------------------------------------------------------------------------------------------


class TierStateOptimizer(Optimizer):
    """The base class of optimizers with state on tiers. `_source`: a plain torch optimizer of the user's class; it is
    never stepped."""

    _source: Optimizer
    _access: StateAccess
    _copies: dict[nn.Parameter, ParamState] | None = None
    """Copies of the state, while `state_dict` runs torch's code on them; else None."""

    @property  # type: ignore[override]
    def state(self) -> Mapping[nn.Parameter, ParamState]:
        """A mapping whose keys are the parameters that have state. Assigning an empty mapping resets all state."""
        return self._state_access() if self._copies is None else self._copies

    @state.setter
    def state(self, value: Any) -> None:
        if isinstance(value, StateAccess) or not hasattr(self, "_access"):  # torch's constructor sets a dict
            self._access = value
        elif len(value):
            refuse_state()
        else:
            self._reset()

    def _state_access(self) -> StateAccess:
        return self._access

    @hold_interrupts()
    def _reset(self) -> None:
        self._access.replace({}, self.param_groups)

    @hold_interrupts()
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state in torch's format: fp32 CPU tensors in the parameters' shapes. Waits for the
        updates under way. If state is sharded (many ranks, stage 1 and up), every rank calls this and gets the whole
        state. Raises BudgetError if the copies do not fit into free host memory.

        An engine's optimizer leaves out the fp32 masters. If a load of the model's state_dict changes a parameter, the
        parameter's master gets the new value. An optimizer without an engine includes the masters, under the key
        "master"."""
        before, self._copies = self._copies, self._state_access().read()
        try:
            return super().state_dict()
        finally:
            self._copies = before

    @hold_interrupts()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict of this optimizer, or of a plain torch optimizer of the user's class. Param groups are
        changed in place. State is rounded if tiered_zero.state_format has fewer bits. With many ranks every rank calls
        this with the whole state. Raises ModelError, with nothing changed, if groups, shapes or keys do not fit."""
        given = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = pre_hook(self, given) or given
        states, groups = self._matched(given)
        self._replace_state(states, groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @hold_interrupts()
    def read_state(self, param: nn.Parameter) -> ParamState:
        """Return a copy of one parameter's state, in the format of `state_dict()`. It is empty before the parameter's
        first step. If state is sharded, every rank calls this."""
        return self._state_access().read(param).get(param, {})

    def _replace_state(self, states: Mapping[nn.Parameter, ParamState], groups: list[dict[str, Any]]) -> None:
        """Replace all state with `states`, and the values of the param groups with those in `groups`. Raises
        ModelError, with nothing changed, if `states` or `groups` do not fit."""
        self._state_access().replace(states, groups)
        replace_values(self.param_groups, groups)

    def __getstate__(self) -> NoReturn:
        raise ModelError(NO_COPY)

    def _matched(self, given: Mapping[str, Any]) -> tuple[dict[nn.Parameter, ParamState], list[dict[str, Any]]]:
        """Match `given`, a state_dict, with this optimizer's param groups. Return (parameter -> its state, the param
        groups of `given` with all options). Raises ModelError if `given` does not fit."""
        try:
            states, saved = given["state"], deepcopy(given["param_groups"])
            sizes = [len(group["params"]) for group in saved]
        except (KeyError, TypeError) as error:
            raise ModelError(
                'An optimizer state_dict was expected: {"state": ..., "param_groups": [{"params": ...}, ...]}; reading '
                f"it raised {type(error).__name__}: {error}."
            ) from error
        own = [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise ModelError(
                f"The state_dict was expected to have param groups of {own} parameters, as this optimizer has; found "
                f"{sizes}. Load the state of an optimizer over the same parameters in the same groups."
            )
        ids = chain.from_iterable(group["params"] for group in saved)
        params = dict(zip(ids, chain.from_iterable(group["params"] for group in self.param_groups), strict=True))
        if unknown := [key for key in states if key not in params]:
            raise ModelError(
                "The state_dict was expected to hold state of the parameters in its param groups alone; found state "
                f"of {unknown[:3]}. Load the state of an optimizer of this class."
            )
        for group, new in zip(self.param_groups, saved, strict=True):
            new["params"] = group["params"]
            if "param_names" in group:
                new.setdefault("param_names", group["param_names"])
        twin = bare_copy(self._source)  # its __setstate__() converts what older versions of torch have saved
        found = {params[key]: dict(values) for key, values in states.items()}
        try:
            twin.__setstate__({"state": defaultdict(dict, found), "param_groups": saved})
        except Exception as error:
            raise ModelError(
                f"The state_dict was expected to be one of {type(self._source).__name__}, which raised "
                f"{type(error).__name__} over it: {error}. Load the state of an optimizer of this class."
            ) from error
        for group, new in zip(self.param_groups, saved, strict=True):
            # torch's __setstate__() fills in options; a class may lack some of them
            if missing := sorted((self._source.defaults.keys() & group.keys()) - new.keys()):
                raise ModelError(
                    f"The state_dict was expected to have every option of {type(self._source).__name__} in its param "
                    f"groups; missing: {', '.join(missing)}. Load the state of an optimizer of this class, or, from a "
                    "checkpoint, none (load_optimizer_states=False)."
                )
        return {param: twin.state[param] for param in found}, saved


def replace_values(groups: list[dict[str, Any]], values: list[dict[str, Any]]) -> None:
    """Replace the contents of each dict in `groups`, in place, by the contents of the dict at the same index in
    `values`."""
    for group, new in zip(groups, values, strict=True):
        group.clear()
        group.update(new)


# -- the optimizer of an engine ----------------------------------------------------------------------------------------


class TieredOptimizer(TierStateOptimizer):
    """The optimizer that `initialize()` returns. Its state rests on the tiers.

    A value that is changed in `param_groups` takes effect at the next step, so any torch LR scheduler works. An
    optimizer passed by the user shares its group dicts and hooks with this one, so its schedulers work too."""

    overflow = False
    """Whether the last step was skipped because its gradients were not finite."""

    def __init__(self, source: Optimizer) -> None:
        super().__init__([{"params": list(group["params"])} for group in source.param_groups], dict(source.defaults))
        self.param_groups = source.param_groups
        self._source = source
        self._engine: Any = None
        """The engine; None before `connect`. Typed Any, because this file cannot import the engine's class."""
        self._refused: Any = None
        for name in _HOOKS:
            setattr(self, name, getattr(source, name))

    def _state_access(self) -> StateAccess:
        self.take_reset()
        return self._access

    def take_reset(self) -> None:
        """Reset the state if user code has assigned an empty mapping to `state` of the user's own optimizer. Raises
        ModelError if the mapping is not empty. Called before every use of the state. A reset is impossible while an
        update that began in backward waits for its step(): the first call then raises ModelError, and later calls keep
        the old state."""
        given = self._source.state
        if given is self._access or not isinstance(self._access, StateAccess) or not self._access.is_open:
            return
        if not given:
            try:
                self._reset()
            except ModelError:
                if self._refused is given:  # step() uses the old state; the next use after it resets
                    return
                self._refused = given
                raise
        self._source.state = self._access  # type: ignore[assignment]
        if given:
            refuse_state()

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward` multiplies the loss; 1 without fp16."""
        return float(self._calls().loss_scale)

    cur_scale = loss_scale

    def connect(self, engine: Any, policy: UpdatePolicy, at_end: Callable[[Callable[[], None]], None]) -> None:
        """Connect the optimizer to the run: its calls go to `engine`, it reads and writes state through `policy`, and
        calls of the user's own optimizer are redirected to this one. `at_end(act)`: makes the run call `act` when it
        closes."""
        self._engine = engine
        self.state = access = StateAccess(policy)
        at_end(access.close)
        _redirect(self._source, self, at_end)
        self._source.state = access  # type: ignore[assignment]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Call the closure, if any, then `engine.step()`. Return the closure's result. Weights are updated after the
        last micro-batch of an accumulation. Gradients are clipped only if the config has gradient_clipping. Pre-step
        hooks run after the closure."""
        calls, loss = self._calls(), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls.step(by_optimizer=True)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # so torch does not wrap it: `update` runs the hooks

    def check_scheduler(self, scheduler: Any) -> None:
        """Raise ConfigError if `engine.step()` cannot step this scheduler."""
        if not hasattr(scheduler, "step"):
            raise ConfigError(
                "lr_scheduler must be a scheduler, or a callable that makes one of an optimizer; found "
                f"{type(scheduler).__name__}."
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau needs a metric, which engine.step() does not have. Build it on the returned "
                "optimizer, and call its step(metric) in your loop."
            )
        if getattr(scheduler, "optimizer", self) not in (self, self._source):
            raise ConfigError(
                "lr_scheduler drives an optimizer that is not this run's. Build it on the optimizer passed to "
                "initialize(), or pass a callable that takes the optimizer."
            )

    def update(self, act: Callable[[], None]) -> None:
        """Run `act`, one optimizer step, between the pre-step and post-step hooks. The engine calls this for each
        update."""

        @Optimizer.profile_hook_step
        def run(_: TieredOptimizer) -> None:
            act()

        run(self)
        self.overflow = False
        for optimizer in (self, self._source):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it for the order of calls

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call `engine.zero_grad(set_to_none)`."""
        self._calls().zero_grad(set_to_none)

    def group_options(self) -> list[dict[str, Any]]:
        """Return a copy of each param group's options. "params" is the number of parameters."""
        return [{**group, "params": len(group["params"])} for group in self.param_groups]

    def checked_group_options(self, options: Any) -> list[dict[str, Any]]:
        """Check a checkpoint's param group `options`, and return them with missing options filled in. Raises ModelError
        if `options` is malformed or does not fit the optimizer."""
        if type(options) is not list or not all(
            type(new) is dict and type(new.get("params")) is int for new in options
        ):
            raise ModelError(
                'The values of param groups were expected as a list of objects, each with "params": number.'
            )
        own = [len(group["params"]) for group in self.param_groups]
        if (sizes := [new["params"] for new in options]) != own:
            raise ModelError(
                f"The checkpoint was expected to have param groups of {own} parameters, as this optimizer has; found "
                f"{sizes[:20]}. Build the optimizer over the same parameters in the same groups, or load with "
                "load_optimizer_states=False and load_lr_scheduler_states=False."
            )
        ids = count()
        saved = [{**new, "params": list(islice(ids, new["params"]))} for new in options]
        _, completed = self._matched({"state": {}, "param_groups": saved})
        self._state_access().check_groups(completed)
        return completed

    def load_group_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set the param groups to `options`, a result of `checked_group_options`. Options missing in `options` keep
        their values. The options fused, capturable and differentiable are never changed, because each run chooses
        them."""
        for group, new in zip(self.param_groups, options, strict=True):
            for name, value in new.items():
                own = group.get(name)
                if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
                    own.copy_(value)  # schedulers share this tensor
                elif name not in ("params", *_CODE_OPTIONS):
                    group[name] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_engine"):
            raise ModelError(
                "Parameters cannot join after tiered_zero.initialize(): their state is laid out when the run starts. "
                "Pass all parameter groups to initialize(); set requires_grad=False or lr=0 for those that shall wait."
            )
        super().add_param_group(param_group)

    def _calls(self) -> Any:
        if self._engine is None:
            raise ModelError("The optimizer steps once tiered_zero.initialize() has returned; it was called before.")
        return self._engine


@final
class ParamGroupWatch:
    """Detects changes of param groups that a run does not support: another list of groups, other parameters in a group,
    other values of fused, capturable or differentiable. All other values may change. Used on the driver thread."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """`optimizers`: all optimizers that share the one list of param groups."""
        self._groups: list[dict[str, Any]] = optimizers[0].param_groups if optimizers else []
        self._params: list[list[nn.Parameter]] = [list(group["params"]) for group in self._groups]
        self._chosen = [[bool(group.get(option)) for option in _CODE_OPTIONS] for group in self._groups]
        self._names = sorted(optimizers[0].defaults) if optimizers else []
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]  # they may be freed before the engine

    def values(self) -> list[dict[str, str]]:
        """Return, for each param group, the options that the update reads, as text. They must be equal on all ranks."""
        return [
            {name: _describe(group[name]) for name in self._names if isinstance(group.get(name), _VALUES)}
            for group in self._groups
        ]

    def take_reset(self) -> None:
        """Call `TieredOptimizer.take_reset`, which resets the state if user code has assigned an empty `state`. Do
        nothing without a TieredOptimizer."""
        for ref in self._optimizers[:1]:
            if isinstance(handle := ref(), TieredOptimizer):
                handle.take_reset()

    def check(self) -> None:
        """Raise ModelError if the param groups have a change that the run does not support."""
        for ref in self._optimizers:
            if (owner := ref()) is not None and owner.param_groups is not self._groups:
                raise ModelError(
                    "optimizer.param_groups was replaced by another list, which the engine and its schedulers do not "
                    "see. Put the former list back, and set values in its groups: optimizer.param_groups[0]['lr'] = "
                    "0.1."
                )
        if len(self._groups) != len(self._params):
            raise ModelError(
                f"optimizer.param_groups was expected to have {len(self._params)} groups, as when the run started; "
                f"found {len(self._groups)}. Set lr to 0 in a group that shall wait, or requires_grad=False for its "
                "parameters."
            )
        for index, (group, own) in enumerate(zip(self._groups, self._params, strict=True)):
            found = group.get("params", ())
            if len(found) != len(own) or not all(map(operator.is_, found, own)):
                raise ModelError(
                    f"Group {index} of optimizer.param_groups was expected to have the {len(own)} parameters that it "
                    f"had when the run started, in their order; found {len(found)}, or others. Their state is laid out "
                    "once. For a parameter that shall not be updated set requires_grad=False, or param.grad = None "
                    "before step()."
                )
            for option, chosen in zip(_CODE_OPTIONS, self._chosen[index], strict=True):
                if bool(group.get(option)) != chosen:
                    raise ModelError(
                        f"Group {index} of optimizer.param_groups was expected to have {option}={chosen}, as when the "
                        f"run started; found {option}={group.get(option)}. It says by which code updates are made, "
                        "which is chosen once. Put it back, or give it to the optimizer before initialize()."
                    )


_CODE_OPTIONS = ("fused", "capturable", "differentiable")
"""Options that select torch's implementation of a step. `foreach` is left out, because its results equal those of the
for-loop."""
_VALUES = (bool, int, float, str, tuple, list, Tensor)


def _describe(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


@contextmanager
def restored_on_error(groups: list[dict[str, Any]]) -> Iterator[None]:
    """A context manager that restores the values of the param groups if the block raises. Used for a block that builds
    a scheduler, because this changes learning rates."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        replace_values(groups, before)
        raise


_HOOKED = ("step", "state_dict", "load_state_dict")
_HOOKS = [f"_optimizer_{call}_{when}_hooks" for call in _HOOKED for when in ("pre", "post")]
_REDIRECTED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")


def _redirect(source: Optimizer, handle: TieredOptimizer, at_end: Callable[[Callable[[], None]], None]) -> None:
    """Redirect the methods `_REDIRECTED` of `source`, the user's own optimizer, to those of `handle`. `at_end`: is
    called with a function that undoes the redirection. The run calls this function when the run closes."""
    owner = weakref.ref(handle)
    before = {name: vars(source)[name] for name in _REDIRECTED if name in vars(source)}
    redirects = {name: MethodType(_redirected(name, owner), source) for name in _REDIRECTED}
    own_state = source.state

    def restore() -> None:
        for name, redirect in redirects.items():
            if vars(source).get(name) is redirect:
                del vars(source)[name]
                vars(source).update({name: before[name]} if name in before else {})
        source.state = own_state

    at_end(restore)
    vars(source).update(redirects)


def _redirected(name: str, owner: weakref.ref[TieredOptimizer]) -> Callable[..., Any]:
    def call(source: Optimizer, *args: Any, **kwargs: Any) -> Any:
        handle = owner()
        if handle is None:
            raise ModelError(f"The engine that trains with this optimizer is gone; {name}() has nothing to act on.")
        return getattr(handle, name)(*args, **kwargs)

    call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers need not wrap it to see its steps
    return call

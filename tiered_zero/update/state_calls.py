"""A torch optimizer whose state rests on tiers: its calls that read and load that state, in torch's format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from tiered_zero.concurrency.interrupts import protected, shielded
from tiered_zero.errors import ModelError
from tiered_zero.rules.optimizer_copy import bare_copy
from tiered_zero.update.state_access import NO_COPY, StateAccess, refuse_state
from tiered_zero.update.state_view import ParamState


class TierStateOptimizer(Optimizer):
    """Reads and loads `state`, a `StateAccess`. `_source`: a plain optimizer of the class that is stepped."""

    _source: Optimizer
    _access: StateAccess

    @property  # type: ignore[override]
    def state(self) -> StateAccess:
        """The parameters that have state. Set it to an empty mapping to start the state of all of them anew."""
        return self._access

    @state.setter
    def state(self, value: Any) -> None:
        if isinstance(value, StateAccess) or not hasattr(self, "_access"):  # torch's constructor sets a dict
            self._access = value
        elif len(value):
            refuse_state()
        else:
            self._reset()

    @shielded
    def _reset(self) -> None:
        self._access.replace({}, self.param_groups)

    def create_state(self, params: Collection[nn.Parameter]) -> None:
        """Give `params` the state that a step with gradients of zero leaves. The engine's call; it counts as no
        step."""
        self._access.create(params)

    @protected
    def state_dict(self) -> dict[str, Any]:
        """Copy the state in torch's own format: fp32 CPU tensors in the parameters' shapes, from any tier and format.

        Waits for the updates under way. fp32 masters are no part of it: they follow `module.state_dict()`, in whose
        16 bits those of a 16-bit model lose their last ones. Raises BudgetError where the tensors do not fit into free
        host memory. Where state is sharded (many ranks, stage 1 and up) every rank calls this, and gets the whole.
        """
        with self.state.reading():
            return super().state_dict()

    @shielded
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict()` or a plain torch optimizer of the same class gave, as torch does.

        Values of the param groups change in place, so that schedulers and the engine see one list. Arrays are rounded
        where tiered_zero.state_format has fewer bits; a warning says so. Raises ModelError, with nothing changed, where
        groups, shapes or keys do not fit. With many ranks every rank calls this with the whole state.
        """
        given = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = pre_hook(self, given) or given
        states, groups = self._matched(given)
        self.state.replace(states, groups)
        replace_values(self.param_groups, groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @protected
    def read_state(self, param: nn.Parameter) -> ParamState:
        """Read one parameter's state, as `state_dict()` gives it, on every rank; empty before its first step."""
        return self.state.read_one(param)

    def __getstate__(self) -> NoReturn:
        raise ModelError(NO_COPY)

    def _matched(self, given: Mapping[str, Any]) -> tuple[dict[nn.Parameter, ParamState], list[dict[str, Any]]]:
        """Match state to parameters, and complete the groups' new values, with "params", as the class itself does."""
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
        twin = bare_copy(self._source)  # torch's classes convert what older versions of them have saved
        found = {params[key]: dict(values) for key, values in states.items()}
        try:
            twin.__setstate__({"state": defaultdict(dict, found), "param_groups": saved})
        except Exception as error:
            raise ModelError(
                f"The state_dict was expected to be one of {type(self._source).__name__}, which raised "
                f"{type(error).__name__} over it: {error}. Load the state of an optimizer of this class."
            ) from error
        for group, new in zip(self.param_groups, saved, strict=True):
            # torch's __setstate__() adds to the defaults what a class may not have as an option
            if missing := sorted((self._source.defaults.keys() & group.keys()) - new.keys()):
                raise ModelError(
                    f"The state_dict was expected to have every option of {type(self._source).__name__} in its param "
                    f"groups; missing: {', '.join(missing)}. Load the state of an optimizer of this class, or, from a "
                    "checkpoint, none (load_optimizer_states=False)."
                )
        return {param: twin.state[param] for param in found}, saved


def replace_values(groups: list[dict[str, Any]], values: list[dict[str, Any]]) -> None:
    """Give each group these values and no others, in place."""
    for group, new in zip(groups, values, strict=True):
        group.clear()
        group.update(new)

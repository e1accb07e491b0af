"""Load a file or a dict as a `Config`: read JSON with comments, rename or refuse keys, resolve "auto", validate."""

from __future__ import annotations

import difflib
import json
import operator
import os
import re
from collections.abc import Container, Mapping
from functools import reduce
from typing import Any

from pydantic import ValidationError

from tiered_zero.config.deepspeed_keys import (
    OPTIMIZER_ARGUMENTS,
    OPTIMIZERS,
    OTHER_WORDS,
    OTHERS,
    REFUSED_OPTIMIZERS,
    Fate,
    Key,
    Reading,
    asks_for_something,
    table,
)
from tiered_zero.config.schema import SCHEDULES, Config
from tiered_zero.config.section import number_or_same, shown, switch, whole
from tiered_zero.errors import ConfigError

_KEYS = table(Config)
_HONOURED_SECTIONS = {path.rpartition(".")[0] for path, key in _KEYS.items() if key.fate is Fate.HONOURED}
_HONOURED_SECTIONS |= {path.rpartition(".")[0] for path in _HONOURED_SECTIONS}
_SECTIONS = (_HONOURED_SECTIONS | {path.rpartition(".")[0] for path in _KEYS}) - {""}
_ARGUMENTS = [f"optimizer.params.{name}" for name in OPTIMIZER_ARGUMENTS]
_ARGUMENTS += [f"scheduler.params.{name}" for kind in SCHEDULES.values() for name in kind.model_fields]
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def load(
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
    args: object = None,
    world_size: int = 1,
    *,
    to_train: bool = True,
) -> Config:
    """Read and validate a config, and return it. Raises ConfigError. `config`: a dict, or the path of a JSON file;
    None: the file `args.deepspeed_config`. `world_size`: the number of ranks, from which missing batch sizes are
    computed. `to_train`: if true, refuse each "auto" that nothing fills in. If false, leave each such "auto" to a
    trainer (such as Transformers'); a micro-batch size that "auto" leaves open becomes 1."""
    named = getattr(args, "deepspeed_config", None)
    if (config is None) == (named is None):
        found = "neither" if config is None else f"both ({named} in args)"
        raise ConfigError(f"expected one of config and args.deepspeed_config; found {found}. Pass exactly one.")
    given = named if config is None else config
    given = read_json(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(given, Mapping):
        raise ConfigError(f"config: expected a dict or the path of a JSON file; found {type(given).__name__}.")
    reading = Reading()
    tree: dict[str, Any] = _plain(given, "", reading)
    _drop_dotted(tree, _KEYS.keys() | _SECTIONS, reading)
    _rename(tree, reading)
    values = _sort(tree, "", reading)
    _drop_offload_param(values, reading)
    values.update(_batch(values, world_size, reading, to_train))
    _check_optimizer(values.get("optimizer"))
    _check_scheduler(values.get("scheduler"), reading, to_train)
    try:
        result = Config.model_validate(values, context=reading.notices)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    _finish(result, reading)
    return result


# -- names -------------------------------------------------------------------------------------------------------------


def _idle_key(path: str, why: str, *, quiet: bool = False) -> Key:
    """Return a `Key` with the fate NO_EFFECT for `path`, even if the path is unknown. `quiet`: log no notice."""
    return Key(path=path, fate=Fate.NO_EFFECT, why=why, quiet=quiet)


def _plain(node: Any, path: str, reading: Reading) -> Any:
    """Copy a config without its comments (keys that begin with "_"). `path`: the keys that lead to `node`, each
    followed by a dot. Raises ConfigError for a key that is no string."""
    if isinstance(node, Mapping):
        for name in node:
            if not isinstance(name, str):
                raise ConfigError(f"{path}{shown(name)}: expected a string as key; found {type(name).__name__}.")
        comments = {name: value for name, value in node.items() if name.startswith("_")}
        for name, value in comments.items():
            text = value if isinstance(value, str) else shown(value)
            reading.idle.append((_idle_key(path + name, "a comment", quiet=True), text))
        kept = {name: value for name, value in node.items() if name not in comments}
        return {name: _plain(value, f"{path}{name}.", reading) for name, value in kept.items()}
    return [_plain(item, path, reading) for item in node] if isinstance(node, (list, tuple)) else node


def _drop_dotted(tree: dict[str, Any], known: Container[str], reading: Reading) -> None:
    """Drop top-level keys such as "section.key", which DeepSpeed does not read. `known`: the paths of all keys and
    sections. Raises ConfigError for keys of tiered_zero."""
    for name in [name for name in tree if "." in name and name in known]:
        section, _, inner = name.rpartition(".")
        if name.startswith("tiered_zero."):
            raise ConfigError(f"{shown(name)}: expected {inner!r} inside of {section}; found a dotted key. Nest it.")
        why = f"DeepSpeed reads no dotted keys; to set it, write {inner!r} inside of {section}"
        reading.idle.append((_idle_key(json.dumps(name), why), tree.pop(name)))


def _rename(tree: dict[str, Any], reading: Reading) -> None:
    if isinstance(tree.get("zero_optimization"), bool):
        stage = int(tree["zero_optimization"])
        reading.notices.append(f"zero_optimization: {bool(stage)} (deprecated) read as stage {stage}")
        tree["zero_optimization"] = {"stage": stage}
    for key in OTHERS:
        if key.fate is Fate.RENAMED:
            _rename_one(tree, key, reading)


def _rename_one(tree: dict[str, Any], key: Key, reading: Reading) -> None:
    *sections, name = key.path.split(".")
    node: Any = tree
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        return
    value = node.pop(name)
    if name in ("cpu_offload", "cpu_offload_param"):
        if not isinstance(value, bool) and value not in (None, "auto"):
            raise ConfigError(f"{key.path}: expected true or false; found {shown(value)}. Use {key.to} instead.")
        if value is not True:
            reading.idle.append((key, value))
            return
        value = {"device": "cpu"}
    *sections, name = key.to.split(".")
    target = tree
    for section in sections:
        if not isinstance(target.get(section), dict):
            target[section] = {}
        target = target[section]
    found = target.get(name)
    if found is not None and found != value and str(found) != str(value):  # 4 and "4" are one value
        raise ConfigError(
            f"{key.path}, {key.to}: expected one value; found {shown(value)} and {shown(found)}. Keep {key.to}."
        )
    target[name] = value
    reading.renamed.setdefault(key.to, key.path)


# -- fates -------------------------------------------------------------------------------------------------------------


def _sort(node: dict[str, Any], prefix: str, reading: Reading) -> dict[str, Any]:
    """Return the honoured values of the section `node`, and record the keys without effect. `prefix`: the section's
    path, with a dot at its end. Raises ConfigError for refused and unknown keys."""
    values: dict[str, Any] = {}
    off = prefix in ("fp16.", "bf16.") and switch(node.get("enabled")) in (None, "auto", False)
    for name, value in node.items():
        path = prefix + name
        key = _KEYS.get(path)
        if key is None and path in _SECTIONS:
            if value is not None and not isinstance(value, dict):
                raise ConfigError(f"{path}: expected an object; found {shown(value)}. Write its keys inside {{}}.")
            if value is None:
                reading.idle.append((_idle_key(path, "null is a section that is left out", quiet=True), None))
            inner = _sort(value or {}, f"{path}.", reading)
            if path in _HONOURED_SECTIONS and value is not None:
                values[name] = inner
        elif key is None:
            raise ConfigError(f"{path or shown(path)}: unknown key. {_nearest(path)}")
        elif key.fate is not Fate.HONOURED:
            _take_idle(key, value, reading, off)
        elif path in ("optimizer.params", "scheduler.params"):
            values[name] = _sort_params(path, value, reading)
        elif value == "auto" and key.default != "auto" and path != "tiered_zero.placement":
            reading.auto[path] = key.default
        elif value is not None:
            values[name] = value
    return values


def _drop_offload_param(values: dict[str, Any], reading: Reading) -> None:
    """Drop the section offload_param below stage 3, as DeepSpeed does, and add a notice."""
    zero = values.get("zero_optimization", {})
    section = zero.get("offload_param", {})
    try:
        below = whole(zero.get("stage", 0)) in (0, 1, 2)
    except ValueError:
        return  # the schema reports the error
    if below and (device := section.get("device", "none")) != "none":
        del zero["offload_param"]
        path, why = "zero_optimization.offload_param", "parameters stay on the device below stage 3, as in DeepSpeed"
        reading.idle += [(_idle_key(f"{path}.{name}", why, quiet=True), value) for name, value in section.items()]
        reading.notices.append(f"{path}.device {shown(device)} without effect: {why}; stage 3 pages them")


def _take_idle(key: Key, value: Any, reading: Reading, off: bool = False) -> None:
    """Record in `reading` that a key has no effect. Raises ConfigError instead if the key is refused and `value` would
    do something in DeepSpeed. `off`: whether the key's section is switched off; then the key is not refused."""
    if key.fate is Fate.REFUSED and not off and asks_for_something(key, value):
        taken = "it to be off" if False in key.allowed else " or ".join(map(json.dumps, key.allowed))
        raise ConfigError(f"{key.path}: expected {taken} or left out; found {shown(value)}. It is refused: {key.why}.")
    reading.idle.append((key, value))


def _sort_params(path: str, params: Any, reading: Reading) -> dict[str, Any]:
    """Return the arguments of the optimizer or schedule. Convert numeric strings to numbers, and leave out arguments
    that are "auto". Raises ConfigError."""
    if not isinstance(params, dict | None):
        raise ConfigError(f"{path}: expected an object; found {shown(params)}. Write the arguments inside {{}}.")
    values = {}
    for name, value in (params or {}).items():
        key = _KEYS.get(f"{path}.{name}")
        if key is not None:
            _take_idle(key, value, reading)
        elif value == "auto" or (isinstance(value, list) and "auto" in value):
            reading.auto[f"{path}.{name}"] = "its default"
        else:
            try:
                values[name] = number_or_same(value)
            except ValueError as error:
                raise ConfigError(f"{path}.{name}: {error}; found {shown(value)}.") from None
    return values


def _nearest(path: str) -> str:
    """Return advice on an unknown key: a valid key with a similar name, or the same name in another section, or "Remove
    it"."""
    section, _, name = path.rpartition(".")
    name = OTHER_WORDS.get(name, name)
    names = [*_KEYS, *_SECTIONS, *_ARGUMENTS]
    siblings = {known.rpartition(".")[2]: known for known in names if known.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if close:
        return f"Did you mean {siblings[close[0]]}?"
    elsewhere = [known for known in names if known.rpartition(".")[2] == name]
    likely = elsewhere or difflib.get_close_matches(path, names, n=1, cutoff=0.5)
    if likely and likely[0] != section:
        return f"Did you mean {likely[0]}?"
    known = f"{section} takes {', '.join(sorted(siblings))}" if section and siblings else ""
    return f"Remove it; {known or 'tiered-zero explain lists the keys in use'}."


# -- batch sizes -------------------------------------------------------------------------------------------------------


def _batch(values: dict[str, Any], world_size: int, reading: Reading, to_train: bool) -> dict[str, int]:
    """Return all three batch sizes. Compute missing ones from train = micro * accumulation * ranks. `to_train`: if it
    is false, neither train nor micro is a number, and one of them is "auto", micro becomes 1. Raises ConfigError if too
    few sizes are given, or if they contradict each other."""
    given: dict[str, int | None] = {}
    for name in _BATCH:
        try:
            given[name] = None if name not in values else whole(values[name])
        except ValueError as error:
            raise ConfigError(f"{name}: {error}; found {shown(values[name])}.") from None
        if (size := given[name]) is not None and size < 1:
            raise ConfigError(f"{name}: expected at least 1; found {size}.")
    train, micro, steps = (given[name] for name in _BATCH)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if train is None and micro is None:
        unfilled = {name for name in _BATCH if name in reading.auto}
        if to_train or not unfilled - {_BATCH[2]}:
            found = f'"auto" for {", ".join(sorted(unfilled))}' if unfilled else "neither"
            raise ConfigError(
                "train_batch_size, train_micro_batch_size_per_gpu: expected a number for at least one of them, from "
                f'which "auto" finds the others; found {found}. Write the samples per optimizer step, or the samples '
                "per forward; a trainer (Transformers, Accelerate) fills them in."
            )
        reading.unfilled |= unfilled
        micro = 1
    if steps is None:
        steps = 1 if train is None or micro is None else max(1, train // (micro * world_size))
    if micro is None:
        assert train is not None
        micro = max(1, train // (steps * world_size))
    if train is None:
        train = micro * steps * world_size
    if train != micro * steps * world_size:
        derived = ", ".join(name for name in _BATCH if given[name] is None)
        raise ConfigError(
            "train_batch_size: expected train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks; found "
            f"{train} against {micro} x {steps} x {world_size} = {micro * steps * world_size} ({ranks}"
            f"{f'; nearest whole {derived}' if derived else ''}). Change one, or leave one out."
        )
    reading.derived.update(name for name in _BATCH if given[name] is None)
    return dict(zip(_BATCH, (train, micro, steps), strict=True))


# -- optimizer and schedule --------------------------------------------------------------------------------------------


def _check_optimizer(section: dict[str, Any] | None) -> None:
    name = section.get("type") if section else None
    reason = REFUSED_OPTIMIZERS.get(name.strip().lower()) if isinstance(name, str) else None
    if reason is not None:
        known = ", ".join(OPTIMIZERS.values())
        raise ConfigError(
            f"optimizer.type: expected {known} or a class of torch.optim; found {shown(name)}. Refused: {reason}."
        )


def _check_scheduler(section: dict[str, Any] | None, reading: Reading, to_train: bool) -> None:
    """Check that a DeepSpeed schedule's arguments have known names and allowed values, and resolve "auto" among them.
    `to_train`: if true, refuse each "auto" that nothing fills in; if false, keep each such "auto" for a trainer to fill
    in."""
    kind = SCHEDULES.get(section["type"]) if section and isinstance(section.get("type"), str) else None
    if section is None or kind is None:
        return
    fields = kind.model_fields
    params = dict(section.get("params", {}))
    for name in params:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1) or list(fields)
            raise ConfigError(
                f"scheduler.params.{name}: expected an argument of {kind.__name__}; found {shown(name)}. Did you mean "
                f"{close[0]}?"
            )
    params = {name: value for name, value in params.items() if value is not None or fields[name].default is None}
    unfilled = {}
    for name, field in fields.items():
        path = f"scheduler.params.{name}"
        if field.is_required() and name not in params:
            if to_train or path not in reading.auto:
                raise ConfigError(
                    f"{path}: expected a number, {kind.__name__} has no default for it; found "
                    f"{'auto' if path in reading.auto else 'nothing'}. Write the number."
                )
            unfilled[name] = 1
            reading.unfilled.add(path)
        elif path in reading.auto:
            params[name] = None if name == "warmup_max_lr" else field.default  # trainers fill in the optimizer's rate
            reading.auto[path] = "the optimizer's lr" if params[name] is None else field.default
    try:
        read = kind.model_validate({**params, **unfilled})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = f"scheduler.params.{problem['loc'][0]}"
        raise ConfigError(f"{path}: {_expected(problem)}; found {shown(problem['input'])}.") from None
    section["params"] = {name: getattr(read, name) for name in params}


# -- the end -----------------------------------------------------------------------------------------------------------


def _finish(config: Config, reading: Reading) -> None:
    values = config.model_dump(by_alias=True)
    for path in reading.auto:
        if path in _KEYS:
            reading.auto[path] = reduce(operator.getitem, path.split("."), values)
    optimizer = config.optimizer
    if optimizer is not None and optimizer.algorithm.lower() != optimizer.type.lower():
        reading.notices.append(
            f"optimizer {optimizer.type} runs as {optimizer.algorithm}, as in DeepSpeed; "
            "optimizer.params.adam_w_mode false gives L2 decay"
        )
    if optimizer is not None and optimizer.algorithm == "AdamW":
        params = optimizer.params
        if params.get("weight_decay", "auto") == "auto" and params.get("torch_adam", "auto") in (False, "auto"):
            reading.notices.append(
                "optimizer.params.weight_decay 0 by default, as in DeepSpeed; torch's AdamW has 0.01"
            )
    zero = config.zero_optimization
    if zero.stage == 0 and zero.offload_optimizer.device != "none":
        reading.notices.append(
            f"offload_optimizer.device {zero.offload_optimizer.device} is honoured at stage 0, unlike in DeepSpeed"
        )
    if "gradient_clipping" not in config.model_fields_set:
        reading.notices.append(
            f"gradient_clipping {config.gradient_clipping} by default in engine.step(); 0 turns it off"
        )
    if config.tiered_zero.state_format.startswith("lossy"):
        reading.notices.append(
            f"tiered_zero.state_format {config.tiered_zero.state_format} rounds Adam's moments: numbers are not fp32's"
        )
    if config.tiered_zero.checkpoint.in_place and config.tiered_zero.checkpoint.async_save:
        reading.notices.append("tiered_zero.checkpoint.async without effect with in_place")
    config._reading = reading


def _describe(error: ValidationError) -> str:
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        parts = [str(part) for part in problem["loc"]]
        while len(parts) > 1 and ".".join(parts) not in _KEYS:
            parts.pop()
        path = ".".join(parts) if ".".join(parts) in _KEYS else ".".join(str(part) for part in problem["loc"])
        expected = _expected(problem)
        found = shown(problem["input"])
        rule = problem.get("ctx", {}).get("error")
        if isinstance(rule, ConfigError):  # a rule between keys: its text is complete
            lines.append(str(rule))
            continue
        if problem["type"] == "missing":
            expected, found = "expected a value", "none"
        about = f" ({_KEYS[path].why})" if path in _KEYS else ""
        line = f"{path}: {expected}; found {found}{about}."
        if not any(known.startswith(f"{path}:") for known in lines):
            lines.append(line)
    return "\n".join(lines)


def _expected(problem: Mapping[str, Any]) -> str:
    """Return a text that says which value was expected. `problem`: an error from pydantic, or from one of this
    package's validators."""
    text: str = problem["msg"]
    return text.removeprefix("Value error, ").replace("Input should be", "expected")


_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys its text has more than once."""

    twice: tuple[str, ...] = ()


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file and return its object. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"expected a JSON file; {os.fspath(path)}: {reason}. Give the path of a readable file."
        ) from error
    return parse_json(text, os.fspath(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse JSON text, with comments and trailing commas, and return its object. `name`: the text's name in errors.
    Raises ConfigError."""
    plain = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))  # blanks keep the line numbers of errors
    try:
        tree = json.loads(plain, object_pairs_hook=_object)
        if isinstance(tree, dict):
            _refuse_twice(tree, "", name)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"expected JSON in {name}; {error}. Comments and trailing commas are fine.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a JSON object in {name}; found {type(tree).__name__}.")
    return tree


def _blank(match: re.Match[str]) -> str:
    return match.group(1) or re.sub(r"[^\n]", " ", match.group())


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        result.twice = tuple(dict.fromkeys(name for name in names if names.count(name) > 1))
    return result


def _refuse_twice(node: Any, path: str, name: str) -> None:
    if isinstance(node, _Object):
        if node.twice:
            raise ConfigError(f"{path}{node.twice[0]}: expected once, found twice in {name}. Remove one of the two.")
        for key, value in node.items():
            _refuse_twice(value, f"{path}{key}.", name)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _refuse_twice(value, f"{path}{index}.", name)

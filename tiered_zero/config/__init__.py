"""Read the config, a DeepSpeed-style JSON (or dict), into one frozen, typed `Config`.

Promise: every key has exactly one fate. It is honoured, read under another name, without effect, or refused with a
reason. An unknown key is an error that suggests a similar key, if there is one. Owner: `schema` owns types, defaults
and the rules between keys; `deepspeed_keys` owns the fates; `load` applies both to a file. Defaults are those of
DeepSpeed's code (0.19). Sizes of parameters are counted in elements. Never: writes to the disk, imports torch, changes
numbers silently.
"""

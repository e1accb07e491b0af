"""Read the config, a DeepSpeed-style JSON (or dict), into one frozen, typed `Config`.

Promise: every key of the file is honoured, renamed with a notice, accepted without effect with a reason, or refused
with a reason (`deepspeed_keys`); an unknown key is an error that names the nearest one. `Config.explain` returns value,
origin and fate of each key; `Config.notices` the few lines worth logging at start. Owner: `schema` owns types, defaults
and the rules between keys; `deepspeed_keys` owns the fates; `load` joins them. Defaults are those of DeepSpeed's code
(0.19), not of its documentation. Sizes of parameters are counted in elements. Never: touches the disk except to read
the config file, imports torch, changes numbers silently.
"""

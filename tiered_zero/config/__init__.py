"""Read the config, a DeepSpeed-style JSON (or dict), into one frozen, typed `Config`.

Promise: every key of the file has one fate (`deepspeed_keys`): it is honoured, renamed with a notice, accepted without
effect and with a reason, or refused with a reason. An unknown key is an error that names the nearest one.
`Config.explain` returns value, source and fate of each key; `Config.notices` returns the lines to log at start.
Owner: `schema` owns types, defaults and the rules between keys; `deepspeed_keys` owns the fates; `load` applies both to
a file. Defaults are those of DeepSpeed's code (0.19), not of its documentation. Sizes of parameters are counted in
elements. Never: writes to the disk, imports torch, changes numbers silently.
"""

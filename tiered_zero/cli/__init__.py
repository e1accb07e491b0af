"""Words in, words out: `tiered-zero` and its commands, one file each.

Promise: results go to stdout, everything else to stderr, so that `--json` can be piped; an error of the TieredZeroError
family is one message without a traceback and exit code 1, wrong usage is 2, Ctrl-C is 130 and leaves nothing behind.
Owner: `main` the group, the logging and the exit codes; `options` what commands share; `console` how results look.
Never: a decision about training; whatever a command does, a script of three calls can do.
"""

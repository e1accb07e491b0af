"""Run `tiered-zero` and its commands, one file each.

Promise: results go to stdout, everything else to stderr, so that `--json` can be piped; an error of the TieredZeroError
family is one message without a traceback and exit code 1, wrong usage is 2, Ctrl-C is 130 and leaves nothing behind.
Owner: `main` owns the command group, the logging and the exit codes; `console` owns shared options and the look of
results.
Never: decides anything about training; a script of three calls can do whatever a command does.
"""

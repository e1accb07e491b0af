"""Run `tiered-zero` and its commands.

Promise: results go to stdout, everything else to stderr. An error of the TieredZeroError family gives one message and
exit code 1; wrong usage gives 2, Ctrl-C 130. Owner: `main` owns the command group and the exit codes; `console` owns
shared options, the logging and the format of results. Never: decides anything about training.
"""

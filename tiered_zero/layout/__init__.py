"""Compute the layout of parameters: which ones move together, where each lies, and how the optimizer cuts them.

Promise: functions do no I/O and keep no state; only an `ExtentMap` changes. Owner: the run's specification keeps units
and sub-groups; the maker of an `ExtentMap` keeps it. Never: imports torch, opens files, or computes with tensors.
`ParamSpec` and `Segment` only slice, view or reorder the tensors that they are given.
"""

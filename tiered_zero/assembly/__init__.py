"""Assemble a run: the one folder that knows every concrete class.

It specifies a run (`spec`), opens what the run works on (`open_machine`; an `OffloadedOptimizer` opens its tiers there
too), builds the movers and joins them to an engine (`build`).
"""

"""Assemble a run: the one folder that knows every concrete class.

It specifies a run (`spec`), opens what the run works on (`machine`; an `OffloadedOptimizer` opens its tiers there too),
builds the movers and joins them to an engine (`build`).
"""

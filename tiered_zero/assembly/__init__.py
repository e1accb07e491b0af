"""Assemble a run: the one folder that knows every concrete class.

It specifies a run (`spec`), opens what the run works on (`open_machine`), and joins the movers to an engine
(`build`).
"""

"""Assemble a run: the one folder that knows every concrete class.

It specifies a run (`spec`), opens its device and files (`open_machine`), and builds the engine and the objects that
move its bytes (`build`).
"""

"""The Python interface, `import warmd`: a session with a daemon, and its jobs as objects.

Enters: option values as keyword arguments. Leaves: `Session`, `Job`, `Sweep` and `Curriculum`
objects with plain values, and HTML in notebooks. A thin layer on `client`, like the command line.
Imports no torch.
"""

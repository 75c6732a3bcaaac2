"""The Python interface, `import warmd`: a session with a daemon, and its jobs as objects.

A thin layer on `client`, which the command line uses as well. Imports no torch.
"""

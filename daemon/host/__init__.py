"""This machine: the home folder, sockets between processes, their parents and children, memory,
and model files with their downloads. Shared by all processes of a daemon; imports no torch.
"""

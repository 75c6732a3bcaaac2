"""Environments: episodes that a policy plays turn by turn, in processes of their own.

`classes` drives a user's class by Gymnasium's or TRL's interface, in the process of the environment
(`server`); `pool` keeps these processes, with limits on time and memory, and gives each to one
episode after another. Nothing is sandboxed: the code has the rights of the user. Imports no torch.
"""

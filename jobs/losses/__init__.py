"""Losses: pure functions over tensors, each equal to TRL's of the same name.

Imports torch and the standard library only.
"""

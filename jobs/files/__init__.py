"""Atomic writes of files and folders, and readers of text documents."""

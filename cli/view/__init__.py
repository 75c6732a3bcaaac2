"""Presentation: tables, charts, progress lines, streamed text, events in words.

Plain values of `daemon.client` enter; lines for a terminal or a file leave. Knows no command.
"""

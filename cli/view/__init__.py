"""Presentation: tables, curves, progress lines, events in words. No commands."""

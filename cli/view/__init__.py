"""Presentation: tables, charts, progress lines, streamed text, events as text.

Enters: plain values and events from `daemon.client`. Leaves: lines for a terminal or a file, in the
terminal's width. `render` formats single values and tables, `describe` events, `chart` curves,
`live` and `progress` the line that is redrawn. Knows no command.
"""

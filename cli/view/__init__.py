"""How values look to people: tables, curves, progress lines, events in words. No commands here."""

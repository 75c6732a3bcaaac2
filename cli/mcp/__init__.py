"""`warmd mcp`: the jobs of a daemon as tools of the Model Context Protocol, for agents.

`gateway` sends a request to the HTTP API, `tools` has the tools and their descriptions. Only the
latter imports the package `mcp`, the extra of that name.
"""

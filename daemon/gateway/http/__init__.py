"""HTTP below the routes: connection limits, authorization, bounded bodies, strict parsing.

Every request passes through here before a route sees it; errors leave in OpenAI's format.
"""

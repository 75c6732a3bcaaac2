"""HTTP below the routes: connection limits, authorization, bounded bodies, strict parsing.

Enters: bytes of connections. Leaves: validated requests to the routes, and errors in OpenAI's
format. `connection` limits connections, `auth` checks token and origin, `bodies` and `strict` parse
JSON within limits, `errors` builds error responses. Knows no route.
"""

"""HTTP below the routes: connection limits, authorization, bounded bodies, strict parsing.

Enters: bytes of connections. Leaves: validated requests to the routes, and errors in OpenAI's
format. `connection` limits connections, `browser` refuses requests of other web pages, `auth`
checks token and session (`session`, `tickets`), `bodies` and `strict` parse JSON within limits,
`errors` builds error responses. Knows no route.
"""

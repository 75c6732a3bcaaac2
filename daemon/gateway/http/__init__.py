"""HTTP below the routes: connection limits, authorization, bounded bodies, strict parsing.

Enters: bytes of connections. Leaves: validated requests to the routes, and errors in OpenAI's
format. `connection` limits connections, `browser` refuses requests of other web pages, `auth` finds
the `client` by its token (`tokens`) or session (`session`, `tickets`) and checks its `rights`,
`open_requests` ends requests of clients that are shut out, `bodies` and `strict` parse JSON within
limits, `errors` builds error responses. Knows no route but by the table of `rights`.
"""

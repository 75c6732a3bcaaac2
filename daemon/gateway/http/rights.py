"""The rights that each route needs, in one table.

`read` shows what is there: jobs, files, metrics, events. `infer` runs models. `train` changes
things: it submits and steers jobs, uploads and deletes files, loads and unloads models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import Match
from starlette.types import Scope

from .errors import ApiError

READ, INFER, TRAIN = "read", "infer", "train"
ANY = "any"  # any token
OPEN = "open"  # no token

# Route -> method -> the right. The gateway does not start with a route that is missing here.
ROUTES: Mapping[str, Mapping[str, str]] = {
    "/openapi.json": {"GET": ANY, "HEAD": ANY},
    "/health": {"GET": OPEN, "HEAD": OPEN},
    "/livez": {"GET": OPEN, "HEAD": OPEN},
    "/readyz": {"GET": OPEN, "HEAD": OPEN},
    "/": {"GET": OPEN, "HEAD": OPEN},
    "/page/{name:path}": {"GET": OPEN, "HEAD": OPEN},
    "/v1/warmd/login": {"POST": OPEN},
    "/v1/warmd/logout": {"POST": ANY},
    "/v1/warmd/tickets": {"POST": ANY},  # what it opens needs its own right
    # Clients of each right list the models that they may name.
    "/v1/models": {"GET": ANY},
    "/v1/models/{name}": {"GET": ANY},
    "/v1/chat/completions": {"POST": INFER},
    "/v1/completions": {"POST": INFER},
    "/v1/responses": {"POST": INFER},
    "/v1/embeddings": {"POST": INFER},
    "/v1/rerank": {"POST": INFER},
    "/v2/rerank": {"POST": INFER},
    "/tokenize": {"POST": INFER},  # as vLLM has them
    "/detokenize": {"POST": INFER},
    "/metrics": {"GET": READ},
    "/v1/files": {"GET": READ, "POST": TRAIN},
    "/v1/files/{file_id}": {"GET": READ, "DELETE": TRAIN},
    "/v1/files/{file_id}/content": {"GET": READ},
    "/v1/warmd/files/{file_id}/records": {"GET": READ},
    "/v1/fine_tuning/jobs": {"GET": READ, "POST": TRAIN},
    "/v1/fine_tuning/jobs/{job_id}": {"GET": READ},
    "/v1/fine_tuning/jobs/{job_id}/cancel": {"POST": TRAIN},
    "/v1/fine_tuning/jobs/{job_id}/pause": {"POST": TRAIN},
    "/v1/fine_tuning/jobs/{job_id}/resume": {"POST": TRAIN},
    "/v1/fine_tuning/jobs/{job_id}/events": {"GET": READ},
    "/v1/fine_tuning/jobs/{job_id}/checkpoints": {"GET": READ},
    "/v1/fine_tuning/checkpoints/{checkpoint}/permissions": {"GET": READ, "POST": TRAIN},
    "/v1/fine_tuning/checkpoints/{checkpoint}/permissions/{permission_id}": {"DELETE": TRAIN},
    "/v1/fine_tuning/alpha/graders/run": {"POST": TRAIN},
    "/v1/fine_tuning/alpha/graders/validate": {"POST": TRAIN},
    "/v1/warmd/overview": {"GET": READ},
    "/v1/warmd/overview/stream": {"GET": READ},
    "/v1/warmd/kinds": {"GET": READ},
    # A check reads the data as a submission does, and says what it finds there.
    "/v1/warmd/check": {"POST": TRAIN},
    "/v1/warmd/jobs": {"GET": READ},
    "/v1/warmd/jobs/{job_id}": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/diff/{other_id}": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/events": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/events/stream": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/curves": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/completions": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/checkpoints": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/log": {"GET": READ},
    "/v1/warmd/jobs/{job_id}/cancel": {"POST": TRAIN},
    "/v1/warmd/jobs/{job_id}/kill": {"POST": TRAIN},
    "/v1/warmd/jobs/{job_id}/pause": {"POST": TRAIN},
    "/v1/warmd/jobs/{job_id}/unpause": {"POST": TRAIN},
    "/v1/warmd/jobs/{job_id}/resume": {"POST": TRAIN},
    "/v1/warmd/jobs/{job_id}/move": {"POST": TRAIN},
    "/v1/warmd/jobs/{job_id}/remove": {"POST": TRAIN},
    "/v1/warmd/runs": {"GET": READ},
    "/v1/warmd/evaluations": {"POST": TRAIN},
    "/v1/warmd/evaluations/{job_id}/questions": {"GET": READ},
    "/v1/warmd/sweeps": {"GET": READ, "POST": TRAIN},
    "/v1/warmd/sweeps/check": {"POST": TRAIN},
    "/v1/warmd/sweeps/{group_id}": {"GET": READ},
    "/v1/warmd/sweeps/{group_id}/pause": {"POST": TRAIN},
    "/v1/warmd/sweeps/{group_id}/remove": {"POST": TRAIN},
    "/v1/warmd/sweeps/{group_id}/{action}": {"POST": TRAIN},
    "/v1/warmd/curricula": {"GET": READ, "POST": TRAIN},
    "/v1/warmd/curricula/{group_id}": {"GET": READ},
    "/v1/warmd/curricula/{group_id}/pause": {"POST": TRAIN},
    "/v1/warmd/curricula/{group_id}/remove": {"POST": TRAIN},
    "/v1/warmd/curricula/{group_id}/{action}": {"POST": TRAIN},
    "/v1/warmd/models/{name}": {"GET": ANY},  # as /v1/models
    "/v1/warmd/models/load": {"POST": TRAIN},
    "/v1/warmd/models/unload": {"POST": TRAIN},
}


class RouteRights:
    """Finds the right that a request needs, by the routes that the application serves."""

    def __init__(self, routes: Iterable[Any]) -> None:
        """Raises LookupError for a route that is not in ROUTES."""
        self._routes = [(route, self._of(route)) for route in routes]
        # Matching all routes takes 0.2 ms.
        self._exact = {
            route.path: rights for route, rights in self._routes if "{" not in route.path
        }

    @staticmethod
    def _of(route: Any) -> dict[str, str]:
        stated = ROUTES.get(route.path, {})
        if missing := sorted(set(route.methods) - stated.keys()):
            raise LookupError(f"{route.path}: no right is stated for {', '.join(missing)}")
        return dict(stated)

    def needed(self, scope: Scope) -> str:
        """Return the right that a request needs; ANY for paths and methods that are not served."""
        method = scope["method"]
        if (right := self._exact.get(scope["path"], {}).get(method)) is not None:
            return right
        for route, rights in self._routes:
            if route.matches(scope)[0] is Match.FULL:
                return rights[method]
        return ANY


def refusal(name: str, rights: frozenset[str], needed: str, scope: Scope) -> ApiError:
    """Return the error for a token that lacks a right."""
    may = ", ".join(right for right in (READ, INFER, TRAIN) if right in rights)
    return ApiError(
        403,
        f"Authorization: must be a token with the right {needed} for {scope['method']} "
        f"{scope['path'][:200]}, got {name} ({may})",
        code="insufficient_permissions",
    )

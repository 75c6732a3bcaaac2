"""A server that speaks OpenEnv's protocol: a game of text, or a game of tools.

`python openenv_server.py GAME PORT MOST` serves at most MOST sessions at a time and prints the
port. The policy of a test says what goes wrong: see `Text.step`. GET /sessions counts those that
are open and those that have been.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from http import HTTPStatus
from typing import Any, ClassVar

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.sync.server import serve

HANGS_S = 1000  # longer than any limit in the tests
METADATA = {"type": "object", "additionalProperties": True}


class Text:
    """Find a number from 0 to 9 in four guesses; other actions do what their name says."""

    schema: ClassVar[dict[str, Any]] = {
        "guess": {"type": "string"},
        "certainty": {"type": "number", "default": 1.0},
    }

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.number, self.guesses = random.Random(data["seed"]).randrange(10), 0
        self.begins = data.get("begins", {})
        return {"observation": {"text": "?=", "metadata": {}}, "done": False, **self.begins}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        guess = action["guess"].strip()
        match guess:
            case "hang":
                time.sleep(HANGS_S)
            case "die":
                os._exit(3)
            case "raise":
                raise RuntimeError("no more cards")
            case "nan":
                return {"observation": {"text": ""}, "reward": float("nan"), "done": False}
            case "fields":
                seen = {"left": 2, "name": "é", "metadata": {"x": 1}}
                return {"observation": seen, "reward": None, "done": False}
            case "shapeless":
                return {"reward": 1.0}
        self.guesses += 1
        found = guess == str(self.number)
        text = "" if found else "low=" if guess < str(self.number) else "high="
        return {
            "observation": {"text": text, "metadata": {"success": found}},
            "reward": float(found),
            "done": found or self.guesses == 4,
        }


class Tools:
    """Read the cells of a table, one of which is asked for; the answer is a call, too."""

    schema: ClassVar[dict[str, Any]] = {
        "type": {"const": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    }
    number: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
    }

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.cells = data.get("cells", [])
        return {"observation": {"metadata": {}}, "done": False, "reward": None}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        seen: dict[str, Any] = {"metadata": {}}
        if action["type"] == "list_tools":
            described = {"description": "Read or answer.", "input_schema": self.number}
            tools = [{"name": name, **described} for name in ("read", "answer")]
            return {"observation": {"tools": tools}, "done": False, "reward": None}
        name, given = action["tool_name"], action["arguments"]
        seen |= {"tool_name": name, "error": None, "result": None}
        if name == "read" and given["number"] < len(self.cells):
            content = [{"type": "text", "text": str(self.cells[given["number"]])}]
            seen["result"] = {"content": content, "data": None, "is_error": False}
            return {"observation": seen, "done": False, "reward": 0.25}
        if name == "answer":
            right = given["number"] == self.cells[-1]
            seen["result"] = {"content": [], "data": {"right": right}}
            seen["metadata"] = {"success": right}
            return {"observation": seen, "done": True, "reward": 1.0}
        seen["error"] = {"error_type": "tool_not_found", "message": f"no {name} of {given}"}
        return {"observation": seen, "done": False, "reward": None}


class Several(Text):
    schema: ClassVar[dict[str, Any]] = {
        "text": {"type": "string"},
        "other": {"anyOf": [{"type": "string"}, {}]},
    }


class Array(Text):
    schema: ClassVar[dict[str, Any]] = {"moves": {"type": "array"}}


class Nothing(Text):
    schema: ClassVar[dict[str, Any]] = {}


GAMES: dict[str, Any] = {
    "text": Text,
    "tools": Tools,
    "several": Several,
    "array": Array,
    "nothing": Nothing,
}


class Server:
    """All sessions of a game."""

    def __init__(self, game: type[Any], most: int) -> None:
        self.game = game
        self.most = most
        self.lock = threading.Lock()
        self.open = self.ever = 0

    def http(self, _: Any, request: Any) -> Response | None:
        found: Any
        if request.path == "/ws":
            return None
        if request.path == "/schema":
            fields = {**self.game.schema, "metadata": METADATA}
            found = {"action": {"properties": fields, "required": list(self.game.schema)[:1]}}
        else:
            found = {"open": self.open, "ever": self.ever}
        body = json.dumps(found).encode()
        headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
        return Response(HTTPStatus.OK, "OK", headers, body)

    def session(self, connection: Any) -> None:
        with self.lock:
            if self.open >= self.most:
                connection.send(error("CAPACITY_REACHED", f"most is {self.most}"))
                return
            self.open += 1
            self.ever += 1
        try:
            self.play(connection, self.game())
        except ConnectionClosed:
            pass
        finally:
            with self.lock:
                self.open -= 1

    def play(self, connection: Any, game: Any) -> None:
        for text in connection:
            message = json.loads(text)
            if message["type"] == "close":
                return
            if message["type"] == "step" and message["data"].get("guess") == "garbage":
                connection.send("nonsense")
                continue
            if message["type"] == "step" and message["data"].get("guess") == "leave":
                return
            try:
                data = getattr(game, message["type"])(message["data"])
                connection.send(json.dumps({"type": "observation", "data": data}))
            except Exception as fault:
                connection.send(error("EXECUTION_ERROR", str(fault)))


def error(code: str, words: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": words}})


if __name__ == "__main__":
    made = Server(GAMES[sys.argv[1]], int(sys.argv[3]))
    with serve(made.session, "127.0.0.1", int(sys.argv[2]), process_request=made.http) as server:
        sys.stdout.write(f"{server.socket.getsockname()[1]}\n")
        sys.stdout.flush()
        server.serve_forever()

"""The completions of one request, as its pieces arrive. Imports torch, by the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import Stopped
from .request import End, Piece, Request


@dataclass
class Answer:
    """The completions of a submitted request: text, number of tokens and finish reason of each."""

    request: Request
    texts: list[str] = field(init=False)
    tokens: list[int] = field(init=False)
    reasons: list[str | None] = field(init=False)

    def __post_init__(self) -> None:
        count = self.request.num_completions
        self.texts, self.tokens, self.reasons = [""] * count, [0] * count, [None] * count

    def add(self, piece: Piece) -> object:
        """Append a piece to its completion."""
        self.texts[piece.index] += piece.text
        self.tokens[piece.index] += len(piece.ids)
        self.reasons[piece.index] = piece.finish_reason
        return None

    def wait(self) -> None:
        """Add the pieces up to the end. Raises Stopped when canceled, and errors of the engine."""
        while not isinstance(piece := self.request.pieces.get(), End):
            self.add(piece)
        if piece.error is not None:
            raise piece.error
        self.check_complete()

    def check_complete(self) -> None:
        """Raise Stopped when a completion was canceled."""
        if any(reason in (None, "cancelled") for reason in self.reasons):
            raise Stopped(0)

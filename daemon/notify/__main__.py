"""The notifier's process: `python -m warmd.daemon.notify HOME PARENT`, its settings on stdin."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from ..host.home import Home
from ..host.messages import NotifierSettings, decode
from ..host.parent_death import end_with_parent
from .delivery import deliver
from .scanner import Scanner

_INTERVAL_S = 2.0

log = logging.getLogger(__name__)


def main() -> None:
    """Deliver notifications until the supervisor is gone."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, NotifierSettings)
    scanner = Scanner(Home(Path(sys.argv[1])), settings.events)
    while True:
        try:
            for notification in scanner.due():
                problem = deliver(settings.target, notification)
                outcome = problem or "delivered"
                log.info("notify: %s %s: %s", notification.job, notification.event, outcome)
        except OSError as error:  # a full disk: events that were not marked are delivered again
            log.warning("notify: %s", error)
        time.sleep(_INTERVAL_S)


if __name__ == "__main__":
    main()

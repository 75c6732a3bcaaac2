"""What warmd needs of a Redis user: commands, keys and a channel.

Without one of them the daemon would start, take jobs and run none. `missing` tries each command on
keys of its own, with the prefixes of the real ones.
"""

from __future__ import annotations

import secrets
import shlex
from typing import Any

import redis

from . import keys
from .rq_format import PREFIX
from .sockets import connect

# Each command that warmd and RQ's record format use, except INFO (health.py) and the optional
# CONFIG GET. `{h}`: a hash, `{l}`: a list, `{z}`: a sorted set, `{s}`: a set, `{x}`: a
# stream, `{t}`: text. Scripts run other commands under the rights of their caller.
COMMANDS = """
TIME
CLIENT ID
CLIENT UNBLOCK 0
SCAN 0 MATCH {t} COUNT 1
SET {t} 0
GET {t}
EXISTS {t}
TYPE {t}
EXPIRE {t} 60
PEXPIRE {t} 60000
PTTL {t}
PERSIST {t}
HSET {h} field 0
EXPIRE {h} 60
HSETNX {h} field 0
HGET {h} field
HMGET {h} field
HGETALL {h}
HKEYS {h}
HEXISTS {h} field
HINCRBY {h} field 1
HINCRBYFLOAT {h} field 1
HDEL {h} other
RPUSH {l} a
EXPIRE {l} 60
LPUSH {l} b
LINSERT {l} BEFORE a c
LPOS {l} a
LRANGE {l} 0 -1
LLEN {l}
LREM {l} 1 none
LMOVE {l} {l} LEFT RIGHT
BLMOVE {l} {l} LEFT RIGHT 0.001
SADD {s} a
EXPIRE {s} 60
SMEMBERS {s}
SCARD {s}
SREM {s} b
ZADD {z} 0 a
EXPIRE {z} 60
ZSCORE {z} a
ZMSCORE {z} a
ZCARD {z}
ZRANGE {z} 0 -1
ZREVRANGE {z} 0 -1
ZRANGEBYSCORE {z} 0 0
ZREVRANK {z} a
ZSCAN {z} 0
ZDIFF 1 {z}
ZREM {z} b
ZREMRANGEBYSCORE {z} 1 1
XADD {x} 1-0 field 0
EXPIRE {x} 60
XREAD COUNT 1 STREAMS {x} 0
XREVRANGE {x} + - COUNT 1
XTRIM {x} MAXLEN 1
WATCH {t}
UNWATCH
MULTI
EXEC
EVAL "return 1" 1 {t}
DEL {h} {l} {s} {z} {x} {t}
"""


def missing(connection: redis.Redis) -> list[str]:
    """Return what this Redis refuses: commands, `keys NAME*`, `channel NAME`. Raises RedisError."""
    found: dict[str, None] = {}  # in order, each once
    for prefix in ("warmd:", f"{PREFIX}:"):
        names = {one: f"{prefix}trial:{secrets.token_hex(8)}:{one}" for one in "hlszxt"}
        commands = [shlex.split(line.format(**names)) for line in COMMANDS.split("\n") if line]
        client = connect(connection)
        try:
            client.send_packed_command(client.pack_commands(commands))
            for command in commands:
                if (reason := _refusal(client, command, prefix)) is not None:
                    found[reason] = None
        finally:
            client.disconnect()
    found.update(dict.fromkeys(_channels(connection)))
    return list(found)


def _refusal(client: Any, command: list[str], prefix: str) -> str | None:
    try:
        client.read_response()
    except redis.ResponseError as error:
        if not (isinstance(error, redis.exceptions.NoPermissionError) or "unknown" in str(error)):
            return None  # its arguments are refused: the user may run the command
        if _is_of_place(error):
            return f"keys {prefix}*"
        return " ".join(command[:2]) if command[0] == "CLIENT" else command[0]
    return None


def _is_of_place(error: redis.ResponseError) -> bool:
    """Whether a key or channel is refused, not the command; its name may contain "key"."""
    return " to access " in str(error)


def _channels(connection: redis.Redis) -> list[str]:
    """Try to subscribe and to publish; nobody listens for the message of a job without a name."""
    found = []
    subscription = connection.pubsub(ignore_subscribe_messages=True)
    try:
        subscription.subscribe(keys.CONTROL_CHANNEL)
        subscription.get_message(timeout=1.0)
    except redis.ResponseError as error:
        found.append(_of_channel(error, "SUBSCRIBE"))
    finally:
        subscription.close()
    try:
        connection.publish(keys.CONTROL_CHANNEL, "")
    except redis.ResponseError as error:
        found.append(_of_channel(error, "PUBLISH"))
    return found


def _of_channel(error: redis.ResponseError, command: str) -> str:
    return f"channel {keys.CONTROL_CHANNEL}" if _is_of_place(error) else command

"""Runs the Lua scripts of a simulated Redis in this process, with lupa."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from typing import Any

from genie.testing.simulation.redis.resp import Failure, Status

Call = Callable[[list[bytes]], object]
"""A function that executes a Redis command for a script, and returns the reply."""


def require_lupa() -> None:
    """Raise ModuleNotFoundError if lupa is not installed. The message says what to install."""
    __tracebackhide__ = True  # pytest shows the line of the test instead
    try:
        import lupa.lua51  # noqa: F401, PLC0415 - an optional dependency
    except ImportError as error:
        message = "simulated worlds need the package lupa: pip install 'genie-lock[testing]'"
        raise ModuleNotFoundError(message, name=error.name) from None


class ScriptRunner:
    """A Lua interpreter that runs the scripts of every simulated Redis. Each script is compiled once."""

    def __init__(self) -> None:
        require_lupa()
        from lupa.lua51 import LuaRuntime  # noqa: PLC0415 - an optional dependency

        self._lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._to_table = self._lua.table_from
        self._execute_command: Call
        """Executes the commands of the script that is running."""
        redis: dict[bytes, Callable[..., object]] = {
            b"call": self._redis_call,
            b"pcall": self._redis_pcall,
            b"status_reply": lambda text: self._to_table({b"ok": text}),
            b"error_reply": lambda text: self._to_table({b"err": text}),
            b"sha1hex": _sha1hex,
        }
        self._lua.globals()[b"redis"] = self._to_table(redis)
        self._compiled: dict[bytes, Callable[[Any, Any], object]] = {}
        """The function of each script, called with the tables KEYS and ARGV."""

    def run(self, script: bytes, keys: Sequence[bytes], arguments: Sequence[bytes], call: Call) -> object:
        """Run a script, whose commands `call` executes, and return its reply.

        Raises Failure if the script or one of its commands fails.
        """
        function = self._compiled.get(script)
        if function is None:
            # A first line such as `#!lua name=...` becomes a comment.
            function = self._compiled[script] = self._lua.execute(
                b"return function(KEYS, ARGV) " + script.replace(b"#!", b"--", 1) + b"\nend"
            )
        self._execute_command = call
        try:
            return self._to_reply(function(self._to_table(keys), self._to_table(arguments)))
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"ERR the script failed: {error}") from error

    def _redis_call(self, *arguments: object) -> object:
        """Execute `redis.call` of a script. Raises Failure if the command fails."""
        command = [_to_command_argument(argument) for argument in arguments]
        return self._to_lua_value(self._execute_command(command))

    def _redis_pcall(self, *arguments: object) -> object:
        """Execute `redis.pcall` of a script. If the command fails, return a Lua table with the error."""
        try:
            return self._redis_call(*arguments)
        except Failure as error:
            return self._to_table({b"err": str(error).encode()})

    def _to_lua_value(self, reply: object) -> object:
        """Convert the reply to a Redis command into a Lua value, as Redis does."""
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._to_table({b"ok": bytes(reply)})
        if isinstance(reply, dict):
            return self._to_table([part for key_and_value in reply.items() for part in key_and_value])
        if isinstance(reply, (list, tuple, set)):
            return self._to_table([self._to_lua_value(part) for part in reply])
        return reply

    def _to_reply(self, value: Any) -> object:
        """Convert the value that a script returns into a reply, as Redis does.

        Raises Failure for a table with `err`.
        """
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, float):
            return int(value)  # Redis truncates numbers
        if isinstance(value, (bytes, int)):
            return value
        if value[b"ok"] is not None:
            return Status(value[b"ok"])
        if value[b"err"] is not None:
            raise Failure(value[b"err"].decode())
        return [self._to_reply(value[index]) for index in range(1, len(value) + 1)]


@cache
def script_runner() -> ScriptRunner:
    """Return the interpreter that all simulated Redis servers of this process share."""
    return ScriptRunner()


def _to_command_argument(value: object) -> bytes:
    """Convert a Lua value to an argument of a Redis command: a string unchanged, a number as text.

    Raises Failure for other types.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # a bool is no number in Lua
        return b"%d" % value if value == int(value) else repr(value).encode()
    raise Failure("ERR Lua redis lib command arguments must be strings or integers")


def _sha1hex(text: bytes) -> bytes:
    """Execute `redis.sha1hex` of a script."""
    return sha1(text).hexdigest().encode()  # noqa: S324 - Redis names scripts so

"""Runs the cases for clients: plays the scripted servers and drives the client under test through its adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from conformance.adapter_process import AdapterProcess
from conformance.automatic_server import AutomaticServer
from conformance.cases import Case, CaseError
from conformance.client_rules import SentCommands
from conformance.matching import Mismatch, Variables, match, matches, show, substitute
from conformance.report import Failure, Result
from conformance.scripted_servers import Connection, ScriptedServer, encode

REPEATED_AT_ONCE: Final = 500
"""Repetitions of messages that are written at once, so that other cases are not delayed."""
MAX_TRANSCRIPT: Final = 60
"""Lines of a transcript that are shown."""

T = TypeVar("T")
Step = dict[str, Any]


class ClientCase:
    """The execution of one case. The methods `_do_…` execute the steps."""

    def __init__(self, case: Case, adapter: AdapterProcess, limit_s: float) -> None:
        # More than 16 fields: what the steps of a case share. Each step is a method.
        self._case = case
        self._adapter = adapter
        self._limit_s = limit_s
        self._started_at = time.monotonic()
        self.transcript: list[str] = []
        self._variables: Variables = {}
        self._commands = SentCommands()
        self._servers = [ScriptedServer(number, self._on_connection) for number in range(1, case.servers + 1)]
        for server in self._servers:
            self._variables[f"$server{server.number}"] = server.address
        self._waiting: list[Connection] = []
        """Connections that no step has accepted."""
        self._connections: dict[str, Connection] = {}
        """The accepted connections by name."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, int] = {}
        """Numbers of calls by their label."""
        self._marks: dict[str, float] = {}
        self._automatic = AutomaticServer()
        self._serves_all = False
        """True if the automatic server answers new connections."""
        self._refusals: dict[int, dict[str, Any]] = {}
        """The errors with which servers refuse clients, by the number of the server."""
        self._accept_times: list[float] = []
        """When each connection was accepted."""

    # -- the run ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Execute the steps. Raises Failure if the client does not do what they expect."""
        self._adapter.record = self._record
        await self._adapter.start()
        try:
            for server in self._servers:
                if server.number not in self._case.down:
                    await server.listen()
            await self._execute(self._case.steps)
            self._check_violations()
            lost = [event for event in self._adapter.events if event.get("event") == "lost"]
            if lost:
                raise Failure(f"the client reported a loss that did not happen: {show(lost[0])}")
        finally:
            await self._tidy_up()
        if self._adapter.broken:
            raise Failure(f"after the case the adapter can't be used any more: {self._adapter.broken}")

    async def _execute(self, steps: Sequence[Step]) -> None:
        for index, step in enumerate(steps, 1):
            method = getattr(self, f"_do_{next(iter(step))}", None)  # the first key names the step
            if method is None:
                raise CaseError(f"{self._case.name}: unknown step {show(step)}")
            self._check_violations()
            try:
                await method(step)
            except Mismatch as error:
                raise Failure(f"step {index}, {show(step, 160)}: {error}") from None
            except Failure as error:
                raise Failure(f"step {index}, {show(step, 160)}: {error}") from None
            except (KeyError, TypeError) as error:
                raise CaseError(f"{self._case.name}: step {index}, {show(step)}: {error!r}") from error

    async def _tidy_up(self) -> None:
        """Close the client and the servers."""
        self._record("-- the end of the case")
        self._automatic.unavailable = 0
        self._serve_all()
        await self._adapter.close_client()
        for server in self._servers:
            server.stop()
        for connection in [*self._connections.values(), *self._waiting]:
            connection.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve_all(self) -> None:
        self._serves_all = True
        for connection in [*self._connections.values(), *self._waiting]:
            connection.serve(self._automatic)

    def _record(self, line: str) -> None:
        self.transcript.append(f"{time.monotonic() - self._started_at:7.3f} {line}")

    def _check_violations(self) -> None:
        if self._commands.violations:
            raise Failure(self._commands.violations[0])

    def _on_connection(self, server: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(server, reader, writer, self._record, self._commands)
        connection.on_input = self._adapter.input_event.set
        self._record(f"a connection to server {server}")
        if self._serves_all:
            connection.serve(self._automatic)
        connection.refusal = self._refusals.get(server)
        self._waiting.append(connection)
        self._accept_times.append(connection.accepted_at)
        task = asyncio.get_running_loop().create_task(connection.read())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._adapter.input_event.set()

    async def _until(self, attempt: Callable[[], T | None], what: str) -> T:
        """Wait until `attempt` returns something else than None. Raises Failure after the time limit."""
        try:
            async with asyncio.timeout(self._limit_s):
                while (result := attempt()) is None:
                    self._check_violations()
                    if self._adapter.broken:
                        errors = " | ".join(self._adapter.error_lines)
                        raise Failure(f"the adapter can't be used any more: {self._adapter.broken}: {errors}")
                    self._adapter.input_event.clear()
                    await self._adapter.input_event.wait()
                return result
        except TimeoutError:
            raise Failure(f"there was no {what} within {self._limit_s:g} s") from None

    def _at(self, step: Step) -> Connection:
        return self._connections[step.get("on", "A")]

    # -- steps: the adapter ---------------------------------------------------------------------------------

    async def _do_call(self, step: Step) -> None:
        """`{"call": LABEL, "do": …}`: send a call to the adapter."""
        fields = {key: value for key, value in step.items() if key != "call"}
        if fields["do"] == "connect":
            numbers = fields.pop("servers", range(1, len(self._servers) + 1))
            fields["addresses"] = [self._servers[number - 1].address for number in numbers]
            fields.setdefault("options", {})
        if fields["do"] == "cancel":
            fields["target"] = self._calls[fields["target"]]
        self._calls[step["call"]] = self._adapter.call(substitute(fields, self._variables))

    async def _do_answer(self, step: Step) -> None:
        """`{"answer": LABEL, "ok": …}` or `"error"` or `"oneOf"`: wait for the answer to a call."""
        answer = await self._answer(step["answer"])
        if "oneOf" in step:
            match({"$oneOf": step["oneOf"]}, answer, self._variables)
        else:
            kind = "error" if "error" in step else "ok"
            match({kind: step.get(kind, {})}, answer, self._variables)

    async def _answer(self, label: str) -> dict[str, Any]:
        number = self._calls[label]
        return await self._until(lambda: self._adapter.answers.get(number), f"answer to the call {label}")

    async def _do_open(self, step: Step) -> None:
        """`{"open": LABEL, "for": ms}`: the call is not answered before and within this time."""
        await asyncio.sleep(step.get("for", 0) / 1000)
        answer = self._adapter.answers.get(self._calls[step["open"]])
        if answer is not None:
            raise Failure(f"the call was answered too early: {show(answer)}")

    async def _do_event(self, step: Step) -> None:
        """`{"event": {…}}`: wait for an event of the adapter."""
        await self._until(lambda: self._take_event(step["event"]), "such event of the adapter")

    def _take_event(self, pattern: Any) -> dict[str, Any] | None:
        for event in self._adapter.events:
            if matches(pattern, event, self._variables):
                self._adapter.events.remove(event)
                return event
        return None

    async def _do_noEvent(self, step: Step) -> None:  # noqa: N802 - named after the step
        """`{"noEvent": {…}, "for": ms}`: there is no such event before and within this time."""
        await asyncio.sleep(step.get("for", 0) / 1000)
        event = self._take_event(step["noEvent"])
        if event is not None:
            raise Failure(f"there was the event {show(event)}")

    async def _do_reports(self, step: Step) -> None:
        """`{"reports": TYPE, "lock": …, "calls": […]}`: the loss is reported by an event, or by the error of one of the calls."""
        lock, numbers = (
            self._variables.get(step.get("lock", "")),
            [self._calls[label] for label in step.get("calls", ())],
        )
        patterns: list[Any] = [{"event": "lost", "type": step["reports"]} | ({} if lock is None else {"lock": lock})]

        def attempt() -> object:
            if self._take_event(patterns[0]) is not None:
                return True
            answers = [self._adapter.answers.get(number) for number in numbers]
            found = any(matches({"error": {"type": step["reports"]}}, answer, self._variables) for answer in answers)
            return True if found else None

        await self._until(attempt, f"report of {show(step['reports'])}")

    async def _do_events(self, step: Step) -> None:
        """`{"events": [{…}, {…}]}`: wait for events of the adapter, which must arrive in this order."""
        patterns = step["events"]
        await self._until(lambda: self._take_in_order(patterns), "such events of the adapter")

    def _take_in_order(self, patterns: Sequence[Any]) -> object:
        """Remove the events that match the patterns, as soon as all have arrived. Raises Failure if the order differs."""
        events = [e for e in self._adapter.events if any(matches(p, e, dict(self._variables)) for p in patterns)]
        if len(events) < len(patterns):
            return None
        for pattern, event in zip(patterns, events, strict=True):
            match(pattern, event, self._variables)
            self._adapter.events.remove(event)
        return True

    async def _do_watched(self, step: Step) -> None:
        """`{"watched": WATCH, "held": […]}`: wait until the locks that the watch has reported are these, in any order."""
        watch = self._variables[step["watched"]]
        patterns = {"$unordered": step["held"]}
        await self._until(
            lambda: True if matches(patterns, self._reported(watch), self._variables) else None,
            f"report of exactly these locks; reported: {show(self._reported(watch))}",
        )

    def _reported(self, watch: int) -> list[dict[str, Any]]:
        """Return the locks that a watch has reported as held."""
        return list(self._adapter.watched.get(watch, {}).values())

    async def _do_restart(self, _: Step) -> None:
        """`{"restart": true}`: end the adapter process and start a new one."""
        await self._adapter.exit()
        self._adapter.broken = "restart"
        await self._adapter.start()

    # -- steps: connections -----------------------------------------------------------------------------------

    async def _do_accept(self, step: Step) -> None:
        """`{"accept": SERVER, "on": NAME}`: wait for a connection to a server, or to `"any"`."""
        await self._accept(step["accept"], step.get("on", "A"), step.get("mark"))

    async def _accept(self, server: int | str, name: str, mark: str | None = None) -> Connection:
        def attempt() -> Connection | None:
            return next((c for c in self._waiting if server in (c.server, "any")), None)

        connection = await self._until(attempt, f"connection to server {server}")
        self._waiting.remove(connection)
        connection.name = name
        self._connections[name] = connection
        if mark is not None:
            self._marks[mark] = connection.accepted_at
        return connection

    async def _do_handshake(self, step: Step) -> None:
        """`{"handshake": SERVER, "on": NAME, …}`: accept a connection, check `hello`, send `welcome`, the state and `pong`."""
        connection = await self._accept(step["handshake"], step.get("on", "A"), step.get("mark"))
        hello = await self._expect(connection, {"command": "hello", "payload": {"protocol": 1}})
        if step.get("newSession"):
            self._variables.pop("$secret", None)
            self._commands.forget_session()
        match({"session": "$secret"} | step.get("hello", {}), hello["payload"], self._variables)
        connection.welcome({"resumed": step.get("resumed", False)} | step.get("welcome", {}), hello["payload"])
        connection.send(substitute(step.get("state", []), self._variables))
        connection.set_pings(step.get("pings", "answer"))

    async def _do_start(self, step: Step) -> None:
        """`{"start": NAME, "options": {…}}`: connect the client to server 1."""
        await self._do_call({"call": "start", "do": "connect", "options": step.get("options", {})})
        await self._do_handshake({"handshake": 1, "on": step["start"], "newSession": True} | step)
        await self._do_answer({"answer": "start"})

    async def _do_lock(self, step: Step) -> None:
        """`{"lock": "$l", "resources": […], "id": …, "fence": …, "ref": "$r"}`: acquire a lock, which is granted at once."""
        fields = {"resources": step["resources"], "options": step.get("options", {})}
        await self._do_call({"call": "lock", "do": "acquire"} | fields)
        message = {"command": "request", "payload": {"resources": step["resources"], "ref": step.get("ref", "$ref")}}
        await self._do_expect({"expect": message, "on": step.get("on", "A")})
        ids = {"id": step["id"], "ref": step.get("ref", "$ref")}
        answer = [
            {"command": "queued", "payload": ids},
            {"command": "locked", "payload": ids | {"fence": step.get("fence", 7)}},
        ]
        self._at(step).send(substitute(answer, self._variables))
        self._variables.pop(step["lock"], None)
        await self._do_answer({"answer": "lock", "ok": {"lock": step["lock"], "id": step["id"]}})

    async def _do_unlock(self, step: Step) -> None:
        """`{"unlock": "$l", "id": …, "ref": "$r"}`: release a lock, which the server confirms."""
        await self._do_call({"call": "unlock", "do": "release", "lock": step["unlock"]})
        await self._do_release(
            {"release": {"id": step["id"], "ref": step.get("ref", "$ref")}, "on": step.get("on", "A")}
        )
        self._variables["$unlock"] = self._variables.pop("$release")
        payload = {"id": step["id"], "reason": "success", "ref": "$unlock"}
        self._at(step).send(substitute([{"command": "released", "payload": payload}], self._variables))
        await self._do_answer({"answer": "unlock"})

    async def _do_expect(self, step: Step) -> None:
        """`{"expect": {…}, "on": NAME}`: the next command on the connection."""
        await self._expect(self._at(step), step["expect"])

    async def _expect(self, connection: Connection, pattern: Any) -> dict[str, Any]:
        command = await self._next(connection, pattern)
        connection.received.pop(0)
        match(pattern, command, self._variables)
        return command

    async def _next(self, connection: Connection, expected: Any) -> dict[str, Any]:
        def attempt() -> dict[str, Any] | None:
            if connection.received:
                return connection.received[0]
            if connection.ended:
                raise Failure(f"the client closed {connection.name}; expected {show(expected)}")
            return None

        return await self._until(attempt, f"command on {connection.name}; expected {show(expected)}")

    async def _do_expectAll(self, step: Step) -> None:  # noqa: N802 - named after the step
        """`{"expectAll": […], "on": NAME}`: the next commands on the connection, in any order."""
        connection, remaining = self._at(step), list(step["expectAll"])
        while remaining:
            command = await self._next(connection, remaining)
            connection.received.pop(0)
            found = next((part for part in remaining if matches(part, command, self._variables)), None)
            if found is None:
                raise Failure(f"{show(command)} matches none of {show(remaining)}")
            remaining.remove(found)

    async def _do_release(self, step: Step) -> None:
        """`{"release": {"id": …, "ref": …}}`: a release by this id, or by this ref of its request. `$release` is its ref."""
        connection, wanted = self._at(step), substitute(step["release"], self._variables)
        command = await self._next(connection, {"command": "release", "payload": wanted})
        connection.received.pop(0)
        payload = command["payload"]
        by_id = "id" in wanted and payload.get("id") == wanted["id"]
        by_ref = "ref" in wanted and payload.get("id") is None and payload.get("ref") == wanted["ref"]
        if command["command"] != "release" or not (by_id or by_ref):
            raise Failure(f"received {show(command)}, expected a release of {show(wanted)}")
        self._variables["$release"] = payload["ref"]

    async def _do_nothing(self, step: Step) -> None:
        """`{"nothing": ms, "on": NAME}`: no command arrives within this time, other than pings."""
        connection = self._at(step)
        await asyncio.sleep(step["nothing"] / 1000)
        if connection.received:
            raise Failure(f"received {show(connection.received[0])}, expected nothing")
        if connection.ended:
            raise Failure(f"the client closed {connection.name}")

    async def _do_send(self, step: Step) -> None:
        """`{"send": {…} or […], "on": NAME, "cut": n, "bytewise": true}`: send messages in one write. `queued` is sent only to
        a connection that is not quiet.
        """
        sent, connection = substitute(step["send"], self._variables), self._at(step)
        messages = sent if isinstance(sent, list) else [sent]
        if step.get("bytewise"):
            await connection.send_bytewise(messages)
        else:
            connection.send(messages, substitute(step.get("cut"), self._variables))
            await self._send_again(connection, messages, step.get("times", 1))

    async def _do_trickle(self, step: Step) -> None:
        """`{"trickle": NAME}`: send a space every 50 ms from now on, and never a whole message."""
        self._send_periodically(self._connections[step["trickle"]], " ")

    async def _do_chatter(self, step: Step) -> None:
        """`{"chatter": NAME}`: send a message that answers no command every 50 ms from now on."""
        self._send_periodically(self._connections[step["chatter"]], {"command": "news", "payload": {}})

    def _send_periodically(self, connection: Connection, message: Any) -> None:
        async def send() -> None:
            while not connection.ended:
                connection.send([message])
                await asyncio.sleep(0.05)

        self._tasks.add(asyncio.get_running_loop().create_task(send()))

    async def _send_again(self, connection: Connection, messages: Sequence[Any], times: int) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                for _ in range(1, times, REPEATED_AT_ONCE):
                    await connection.send_again(messages, REPEATED_AT_ONCE)
        except TimeoutError:
            raise Failure(f"the client does not read what it is sent, within {self._limit_s:g} s") from None

    async def _do_welcome(self, step: Step) -> None:
        """`{"welcome": {…}, "on": NAME}`: send `welcome` after a `hello` that was expected as `$hello`."""
        self._at(step).welcome(step["welcome"], self._variables["$hello"])

    async def _do_respond(self, step: Step) -> None:
        """`{"respond": {…}, "with": […], "on": NAME}`: answer each such command from now on."""
        self._at(step).responders.append((substitute_known(step["respond"], self._variables), step["with"]))

    async def _do_unrespond(self, step: Step) -> None:
        """`{"unrespond": NAME}`: end what `respond` has begun on the connection."""
        self._connections[step["unrespond"]].responders.clear()

    async def _do_pings(self, step: Step) -> None:
        """`{"pings": MODE, "on": NAME}`: `answer`, `ignore`, `expect` or `unavailable`."""
        self._at(step).set_pings(step["pings"])

    async def _do_close(self, step: Step) -> None:
        """`{"close": NAME}`: close the connection."""
        self._connections[step["close"]].close()

    async def _do_kill(self, step: Step) -> None:
        """`{"kill": NAME}`: abort the connection."""
        self._connections[step["kill"]].kill()

    async def _do_closed(self, step: Step) -> None:
        """`{"closed": NAME}`: wait until the client closes the connection."""
        connection = self._connections[step["closed"]]
        await self._until(lambda: True if connection.ended else None, f"end of {connection.name}")

    async def _do_serve(self, step: Step) -> None:
        """`{"serve": NAME, "resumed": …, "unavailable": n}`: let the automatic server answer a connection, or `"all"`."""
        self._automatic.resumed = step.get("resumed", True)
        self._automatic.unavailable = step.get("unavailable", 0)
        if step["serve"] == "all":
            self._refusals.clear()
            self._serve_all()
        else:
            self._connections[step["serve"]].serve(self._automatic)

    async def _do_refuse(self, step: Step) -> None:
        """`{"refuse": SERVER, "error": {…}}`: answer `hello` of all new connections to the server with an error."""
        self._refusals[step["refuse"]] = substitute(step["error"], self._variables)

    async def _do_attempts(self, step: Step) -> None:
        """`{"attempts": n, "mark": NAME}`: wait for the n-th connection of the case; mark when it was accepted."""
        number = step["attempts"]
        await self._until(lambda: True if len(self._accept_times) >= number else None, f"connection number {number}")
        self._marks[step["mark"]] = self._accept_times[number - 1]

    async def _do_noConnection(self, step: Step) -> None:  # noqa: N802 - named after the step
        """`{"noConnection": SERVER}`: no connection to the server waits."""
        if any(connection.server == step["noConnection"] for connection in self._waiting):
            raise Failure(f"the client connected to server {step['noConnection']}")

    async def _do_sent(self, step: Step) -> None:
        """`{"sent": {…}, "atLeast": n, "atMost": n}`: how many such commands the client has sent in this case."""
        if "atLeast" in step:
            await self._until(
                lambda: True if self._count_sent(step["sent"]) >= step["atLeast"] else None,
                f"command number {step['atLeast']} that matches {show(step['sent'])}",
            )
        number = self._count_sent(step["sent"])
        if number > step.get("atMost", number):
            raise Failure(f"the client sent {number} such commands, expected at most {step['atMost']}")

    def _count_sent(self, pattern: Any) -> int:
        return sum(matches(pattern, command, dict(self._variables)) for command in self._commands.log)

    async def _do_down(self, step: Step) -> None:
        """`{"down": SERVER}`: the server refuses connections from now on."""
        self._servers[step["down"] - 1].refuse()

    async def _do_listen(self, step: Step) -> None:
        """`{"listen": SERVER}`: the server accepts connections again."""
        await self._servers[step["listen"] - 1].listen()

    # -- steps: control ---------------------------------------------------------------------------------------

    async def _do_wait(self, step: Step) -> None:
        """`{"wait": ms}`: wait."""
        await asyncio.sleep(step["wait"] / 1000)

    async def _do_mark(self, step: Step) -> None:
        """`{"mark": NAME}`: remember the time."""
        self._marks[step["mark"]] = time.monotonic()

    async def _do_elapsed(self, step: Step) -> None:
        """`{"elapsed": [FROM, TO], "atLeast": ms}`: compare the time between two marks with a lower bound."""
        first, last = (self._marks[name] for name in step["elapsed"])
        elapsed_ms = (last - first) * 1000
        self._record(f"{elapsed_ms:.0f} ms from {step['elapsed'][0]} to {step['elapsed'][1]}")
        if elapsed_ms < step["atLeast"]:
            raise Failure(f"only {elapsed_ms:.0f} ms have passed, expected at least {step['atLeast']}")

    async def _do_repeat(self, step: Step) -> None:
        """`{"repeat": n, "steps": […]}`: execute steps several times. `$i` is the number, from 0."""
        await self._loop(step, range(step["repeat"]))

    async def _do_cuts(self, step: Step) -> None:
        """`{"cuts": {…}, "every": n, "steps": […]}`: execute steps for each length of a part of a line. `$i` is the length."""
        length = len(encode(substitute(step["cuts"], self._variables)))
        await self._loop(step, range(0, length + 1, step.get("every", 1)))

    async def _loop(self, step: Step, values: Sequence[int]) -> None:
        outer = dict(self._variables)
        for value in values:
            self._variables.clear()
            self._variables.update(outer)
            self._variables["$i"] = value
            await self._execute(step["steps"])


def substitute_known(pattern: Any, variables: Variables) -> Any:
    """Replace the variables of a pattern that have a value."""
    if isinstance(pattern, dict):
        return {key: substitute_known(part, variables) for key, part in pattern.items()}
    if isinstance(pattern, list):
        return [substitute_known(part, variables) for part in pattern]
    return variables.get(pattern, pattern) if isinstance(pattern, str) else pattern


async def run_cases(
    cases: Sequence[Case],
    command: Sequence[str],
    *,
    without: frozenset[str],
    jobs: int,
    limit_s: float,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Run cases with several adapter processes at the same time."""
    queue = [case for case in cases if not case.needs & without]
    results = [
        Result(case, "skipped", f"needs {', '.join(sorted(case.needs & without))}")
        for case in cases
        if case.needs & without
    ]
    for result in results:
        on_result(result)

    async def work() -> None:
        adapter = AdapterProcess(command)
        try:
            while queue:
                result = await _run_case(queue.pop(0), adapter, limit_s)
                results.append(result)
                on_result(result)
        finally:
            await adapter.stop()

    workers: list[Awaitable[None]] = [work() for _ in range(min(jobs, len(queue)))]
    await asyncio.gather(*workers)
    return results


async def _run_case(case: Case, adapter: AdapterProcess, limit_s: float) -> Result:
    execution, started_at = ClientCase(case, adapter, limit_s), time.monotonic()
    try:
        await execution.run()
    except Failure as error:
        adapter.broken = adapter.broken or "the last case has failed"
        transcript = [*execution.transcript[-MAX_TRANSCRIPT:], *(f"stderr: {line}" for line in adapter.error_lines)]
        return Result(case, "failed", str(error), time.monotonic() - started_at, transcript)
    return Result(case, "passed", seconds=time.monotonic() - started_at)

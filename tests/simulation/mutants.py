"""Would the judges see it? Each mutant has one defect; a seed must be found in which it shows.

    python tests/simulation/mutants.py [NAME...]

A mutant that lives on in all seeds means that the judges are blind for it. (Not among them, for no promise is broken by
it: a batch that is carried out twice, which writes the same again; and a follower that takes over from a living leader,
which loses nothing, and steps down; and one that takes a replica for a master, which refuses whatever it is to write. Nor
one that answers a look without a commit when its lease is over: nearly always another look at the lease comes first, so it
has a test of its own. So have, since who takes over asks last who is the master, one that believes the sentinel that knows
least, and one that still calls the old master.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from genie.testing.simulation.scenario import CHOOSING, FEATURED, REPLICATED

ROOT = Path(__file__).parent.parent.parent
SEEDS = 300
PROCESSES = 2


@dataclass(frozen=True)
class Mutant:
    """One defect: in a file, a text that is there exactly once becomes another. `first` is where to begin to look."""

    name: str
    file: str
    text: str
    other: str
    first: int = 1


MUTANTS = [
    # -- what is told, and when
    Mutant(
        "tells before it has stored",
        "server/pipeline.py",
        "self._commit(write_set, now)",
        "self._deliver(); self._commit(write_set, now)",
    ),
    Mutant(
        "a refusal takes along what is not stored yet",
        "server/notifier.py",
        "        if in_order:\n",
        "        if True:\n",
        first=17,
    ),
    Mutant(
        "does not tell who lost a lock",
        "server/notifier.py",
        "            self.send(session.connection, message)\n        if requester",
        "            pass\n        if requester",
    ),
    Mutant(
        "ids are told that may be given again",
        "server/pipeline.py",
        "self._store.commit(Batch(write_set, self._ids_reserved_below,",
        "self._store.commit(Batch(write_set, 1,",
    ),
    # -- the store
    Mutant(
        "the script lets in who leads no more",
        "storage/redis/lua/commit.lua",
        "if meta[1] ~= ARGV[1] or meta[2] ~= ARGV[2] then",
        "if false then",
        first=REPLICATED + 94,
    ),
    Mutant(
        "who has just come leads before those who have seen more",
        "storage/redis/election.py",
        "return meta.node is None or (candidacy.has_seen_leader and node.is_restart_of(meta.node))",
        "return meta.node is None or node.is_restart_of(meta.node)",
        first=REPLICATED + 3416,
    ),
    Mutant(
        "who resigns does not look whether Redis has what was told",
        "storage/redis/lua/resign.lua",
        "if tonumber(index) < tonumber(ARGV[3]) then",
        "if false then",
        first=5423,
    ),
    Mutant(
        "who took over without a commit is taken for one who went on",
        "storage/redis/log.py",
        "next((end for end in reversed(self.ends) if end[1]), self.ends[0])",
        "self.position",
        first=REPLICATED + 5639,
    ),
    Mutant(
        "what was told to nobody counts as a way of its own",
        "storage/redis/replica.py",
        "history.without(self._unacknowledged), self.history",
        "history, self.history",
        first=REPLICATED + 7943,
    ),
    Mutant(
        "takes over without a last look for the master",
        "storage/redis/follower.py",
        "await self._keyspace.verify()  # last",
        "pass  # last",
        first=REPLICATED + 31197,
    ),
    Mutant(
        "the script does not see a gap",
        "storage/redis/lua/commit.lua",
        "if index > applied + 1 then",
        "if false then",
        first=40,
    ),
    Mutant(
        "ended requests stay in the store",
        "storage/redis/lua/commit.lua",
        "redis.call('HDEL', KEYS[2], unpack(ARGV, i, math.min(i + 5999, last)))",
        "",
    ),
    Mutant(
        "what is lost twice is written anew once",
        "storage/redis/keyspace.py",
        "        await self.collect_garbage()\n        self._attempted = None",
        "        await self.collect_garbage()",
        first=40,
    ),
    Mutant(
        "ids and fences rest on the store alone",
        "server/namespace.py",
        "floor = time.time_ns() // 1000",
        "floor = 0",
    ),
    Mutant(
        "the next fence is not stored",
        "storage/redis/commit.py",
        "batch.next_id, batch.next_fence)",
        "batch.next_id, 1)",
    ),
    # -- leading
    Mutant(
        "tells what was stored before its lease ended",
        "server/pipeline.py",
        "if error is None and took_s > self._lease_s:",
        "if False:",
    ),
    Mutant(
        "a follower does not take in what others commit",
        "storage/redis/follower.py",
        "                self._replica.append(entry)",
        "                pass",
    ),
    # -- several Redises
    Mutant(
        "writes anew over another branch",
        "storage/redis/keyspace.py",
        "if meta is not None and not history.contains(meta.position):",
        "if False:",
        first=REPLICATED,
    ),
    Mutant(
        "a follower forgets what Redis has lost",
        "storage/redis/election.py",
        "if diverged and not lacks_commits:",
        "if diverged:",
        first=REPLICATED + 17,
    ),
    Mutant(
        "who led before does not know what it told",
        "storage/redis/replica.py",
        "None if led is None else led.snapshot",
        "None",
        first=REPLICATED + 90143,
    ),
    Mutant(
        "the count of WAIT is not looked at",
        "storage/redis/commit.py",
        "(unmet := self._ack_policy.unmet(acknowledged))",
        '(unmet := "")',
        first=REPLICATED,
    ),
    Mutant(
        "what is written anew need not be confirmed",
        "storage/redis/store.py",
        "        await self._writer.resubmit(self._encoder.encode(replace(snapshot, changes={})))",
        "        self._finish(None)",
        first=REPLICATED,
    ),
    Mutant(
        "a master that the sentinels have left is not left",
        "storage/redis/store.py",
        "if connection is None or not await self._primary.has_moved(connection):",
        "if True:",
        first=REPLICATED,
    ),
    Mutant(
        "a follower takes over without asking the sentinels",
        "storage/redis/primary.py",
        "if self._connection is not None and await self.has_moved(self._connection):",
        "if False:",
        first=REPLICATED + 90143,
    ),
    # -- sessions
    Mutant(
        "a session loses its place with its connection",
        "server/dispatcher.py",
        "        if session.key is not None:\n            if session.connection is connection:",
        "        if session.key is not None and not session.bound:\n            if session.connection is connection:",
    ),
    Mutant(
        "a resume forgets what has ended",
        "server/dispatcher.py",
        "for reply in session.unreceived_replies():",
        "for reply in ():",
    ),
    Mutant(
        "a resume forgets what lives",
        "server/dispatcher.py",
        "for request in session.bound.values():",
        "for request in ():",
    ),
    Mutant(
        "what waits for a session is not stored",
        "server/notifier.py",
        "if session.key is not None and request.state is not State.ENDED:",
        "if False:",
    ),
    Mutant(
        "sessions end with the server",
        "server/dispatcher.py",
        "self.sessions.restore(requests, replies, self.notifier.now)",
        "self.sessions.restore([], [], self.notifier.now)",
    ),
    Mutant(
        "every held lock goes with its session",
        "core/manager.py",
        "elif request.state is HELD and request.release_on_disconnect:",
        "elif request.state is HELD:",
    ),
    # -- version 1 of the wire
    Mutant(
        "the ref of an own release is forgotten",
        "server/dispatcher.py",
        'change = request if request.ref is None else notifier.retain_reply(session, request, SUCCESS, b"")',
        "change = request",
        first=FEATURED,
    ),
    Mutant(
        "the refs of ended requests are not stored",
        "storage/redis/records.py",
        "            ref=reply.ref,",
        "            ref=None,",
        first=FEATURED,
    ),
    Mutant(
        "the refs of living requests are not stored",
        "storage/redis/records.py",
        "            change.ref,",
        "            None,",
        first=FEATURED,
    ),
    Mutant(
        "how a request ended is not read from the store",
        "storage/redis/records.py",
        "_decode_ended(line).payload.reason if line else SUCCESS",
        "SUCCESS",
        first=FEATURED,
    ),
    Mutant(
        "notes are not stored",
        "storage/redis/records.py",
        "            change.note,",
        "            None,",
        first=FEATURED,
    ),
    Mutant(
        "the answer to a release carries the ref of the request",
        "server/dispatcher.py",
        "outbox.append(released(event, now, command.ref))",
        "outbox.append(released(event, now, request.ref))",
    ),
    Mutant(
        "the answer to a release of another connection's request carries the ref of the request",
        "server/notifier.py",
        "self.send(requester, replies.released(event, self.now, ref))",
        "self.send(requester, replies.released(event, self.now, request.ref))",
    ),
    Mutant(
        "a refused release does not echo its ref",
        "server/notifier.py",
        "self.reject(requester, RequestRejected(Code.UNKNOWN_ID, why, ref=ref, id=event.id))",
        "self.reject(requester, RequestRejected(Code.UNKNOWN_ID, why, id=event.id))",
        first=21,
    ),
    Mutant(
        "errors of a release lack its id",
        "server/rejections.py",
        "id_ = command.id if isinstance(command, (Release, Extend)) else None",
        "id_ = None",
    ),
    Mutant(
        "queued is sent to a quiet connection",
        "server/notifier.py",
        "        if request.ref is None or not session.quiet:\n            self.send(session.connection, replies.queued",
        "        if True:\n            self.send(session.connection, replies.queued",
        first=FEATURED,
    ),
    Mutant(
        "queued is sent to a quiet connection that resumes",
        "server/dispatcher.py",
        "elif request.ref is None or not session.quiet:",
        "else:",
        first=FEATURED,
    ),
    Mutant(
        "a repeated ref of an ended request is not answered",
        "server/dispatcher.py",
        "            send(connection, known.message or replies.ended(known.id, known.reason, known.ref))",
        "            pass",
        first=FEATURED,
    ),
    Mutant(
        "bye leaves the waiting requests",
        "server/dispatcher.py",
        "        self._disconnect(list(session.bound.values()))\n"
        "        if session.key is not None:\n            self._end_session(session)",
        "        if False:\n            pass",
        first=FEATURED,
    ),
    Mutant(
        "bye does not end the session",
        "server/dispatcher.py",
        "        if session.key is not None:\n            self._end_session(session)\n        else:",
        "        if session.key is None:",
        first=FEATURED,
    ),
    Mutant(
        "a connection goes on after bye",
        "server/dispatcher.py",
        "        connection.detach()\n        self.notifier.closing.append(connection)",
        "        connection.detach()",
        first=FEATURED,
    ),
    # -- the lock manager
    Mutant(
        "a lock times out a little early",
        "core/manager.py",
        "        request.deadline = ceil(now + request.transaction_timeout_ms)\n        self.table.add_held(request)",
        "        request.deadline = ceil(now + request.transaction_timeout_ms - 5)\n        self.table.add_held(request)",
    ),
    Mutant(
        "a queue times out a little early",
        "core/manager.py",
        "else ceil(now + timeout_ms)",
        "else ceil(now + timeout_ms - 5)",
    ),
    Mutant(
        "a restart makes time pass",
        "server/namespace.py",
        "loop.time() * 1000 - state.clock_ms",
        "loop.time() * 1000 - state.clock_ms - 1000",
    ),
    Mutant(
        "shared locks don't mind an exclusive one",
        "core/grant.py",
        "    return not resource.exclusives or table.grant_count(owner, name) > 0",
        "    return True",
    ),
    Mutant(
        "requests overtake those who wait",
        "core/grant.py",
        "    if resource.wait_queue is not None:\n        return False",
        "",
    ),
    Mutant(
        "shared requests overtake exclusive ones",
        "core/grant.py",
        "if ahead is not None and ahead < request.entry(name):",
        "if False:",
    ),
    Mutant(
        "the order of a reordered queue is not stored",
        "storage/redis/records.py",
        "(stored.moved or {}).items()",
        "{}.items()",
    ),
    Mutant(
        "deadlocks are not looked for",
        "core/manager.py",
        "if deadlock.creates_cycle(table, request):",
        "if False:",
    ),
    # -- those who choose
    Mutant(
        "takes what others hold",
        "core/grant.py",
        "    if holder is not None:\n        return holder.owner == owner\n    resource = table.resources.get(name)",
        "    if holder is not None:\n        return True\n    resource = table.resources.get(name)",
        first=CHOOSING,
    ),
    Mutant(
        "takes what others wait for",
        "core/grant.py",
        "    return queue is None or (\n        queue.exclusive.first_not_owned_by(owner) is None",
        "    return queue is None or True or (\n        queue.exclusive.first_not_owned_by(owner) is None",
        first=CHOOSING,
    ),
    Mutant(
        "takes less than it needs", "core/manager.py", "if reached >= take.target:", "if reached > 0:", first=CHOOSING
    ),
    Mutant(
        "what was taken is forgotten by a restart",
        "storage/redis/records.py",
        "            choice_digest=stored.chosen,",
        "            choice_digest=None,",
        first=CHOOSING,
    ),
    Mutant(
        "nobody is granted when somebody leaves",
        "core/manager.py",
        "            self._end(Released(request, SUCCESS), events)\n            if affected:",
        "            self._end(Released(request, SUCCESS), events)\n            if False:",
    ),
]


def try_out(mutant: Mutant) -> tuple[Mutant, str]:
    """Look for a seed that shows it. Returns what was found, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "genie", Path(folder, "genie"), ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder, "genie", mutant.file)
        source = file.read_text()
        if source.count(mutant.text) != 1:
            return mutant, f"DOES NOT APPLY: its text is {source.count(mutant.text)} times in {mutant.file}"
        file.write_text(source.replace(mutant.text, mutant.other))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "genie.testing.simulation.soak", "--stop", "--tail=0"),
                *(f"--first={mutant.first}", f"--seeds={SEEDS}"),
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        return mutant, ""
    seed = re.search(r"--seed (\d+)", done.stdout)
    why = re.search(r"^\*\*\* (.*)", done.stdout, re.MULTILINE)
    if seed is None:
        return mutant, f"CRASHES: {done.stderr.strip().splitlines()[-1]}"
    return mutant, f"seed {seed[1]}: {why[1][:110] if why else ''}"


def main() -> int:
    """Try the mutants that are named, or all. The exit status is 1 where one lives on."""
    wanted = [mutant for mutant in MUTANTS if not sys.argv[1:] or any(name in mutant.name for name in sys.argv[1:])]
    if not wanted:
        print("no mutant is named so; there are", *(f"    {mutant.name}" for mutant in MUTANTS), sep="\n")
        return 2
    alive = 0
    with ThreadPoolExecutor(PROCESSES) as pool:
        for mutant, found in pool.map(try_out, wanted):
            alive += not found.startswith("seed")
            print(f"{mutant.name}\n    {found or f'LIVES ON in {SEEDS} seeds'}", flush=True)
    print(f"{len(wanted)} mutants, {alive} of them not caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fault injection: what breaks in a simulated cluster, and when (Jepsen's nemesis)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextvars import Context
from random import Random

from genie.testing.simulation.history import FAULT
from genie.testing.simulation.host import Host
from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.network import Connection, Network
from genie.testing.simulation.redis.server import CUT_AFTER, CUT_BEFORE, PORT, REJECT
from simulator.history import ClusterHistory
from simulator.replication import ReplicatedRedis
from simulator.scenario import Scenario
from simulator.stores import CrashingRedis, OneRedis, RedisWithLineage, RedisWithSentinels

PAUSES_S = (0.05, 0.5, 1.5, 4.0, 12.0)
"""How long a fault lasts, e.g. a stopped process: some values are shorter, some longer than every timeout of its peers."""
SERVER_DETECTION_S = (0.0, 0.0, 0.5, 3.0, 20.0, None)
CLIENT_DETECTION_S = (0.5, 20.0, None, None)
"""After how long the kernel of each side detects that a connection is half-open; None: never."""
LAGS_S = (0.05, 0.3, 1.0, 4.0, 12.0)
"""How long the replication to a replica is paused."""
STALLS_S = (1.5, 3.0, 6.0, 12.0)
"""How long a primary is stopped or partitioned: some values are shorter, some longer than an election takes."""
RESTART_DELAYS_S = (0.1, 2.0, 6.0)
"""How long a Redis that was killed stays down."""
LOST_S = (0.0, 0.3, 1.0, 1.0)
"""How many of its last seconds a Redis loses that crashes: with `appendfsync everysec` up to about one."""
DOWN_S = (0.0, 0.5, 4.0, 8.0)
"""How long a Redis that crashed is down: some values are longer than the lease."""
LOADING_S = (0.0, 1.5, 6.0)
"""How long a Redis loads its data after a crash: some values are longer than the lease and all delays of candidates."""
SCAN_S = (0.0, 0.1, 1.0, 2.0)
"""How long a server takes to read a few records."""
LEADER_RESTART_DELAYS_S = (0.1, 6.0, 12.0)
"""How long the leading server stays down if it is killed with the primary: one value ends before a follower takes over."""


class Nemesis:
    """Injects the faults of a scenario, one at a time. The seed chooses the faults and their times.

    Each fault has a method of its name (`scenario.FAULTS`), which injects it and returns a description, or "" if the fault
    was impossible.
    """

    def __init__(
        self,
        scenario: Scenario,
        network: Network,
        history: ClusterHistory,
        store: OneRedis | RedisWithLineage,
        hosts: Sequence[Host],
        clients: Sequence[Node],
    ) -> None:
        self._scenario = scenario
        self._network = network
        self._loop: SimLoop = network.loop
        self._history = history
        self._store = store
        self._hosts = hosts
        self._clients = clients
        self._random = Random(f"{scenario.seed} faults")
        self._failover_random = Random(f"{scenario.seed} failovers")
        self._commands_fail_until = 0.0
        self._pause_next_committer_s: float | None = None
        """How long the next server that sends a commit is stopped before it gets the reply; None if none will be stopped."""
        self._silenced: list[Connection] = []
        """The connections that lose bytes, and that perhaps neither side ever detects."""
        for redis in store.redises:
            redis.fault = self._command_fault

    @property
    def fails_commands(self) -> bool:
        """True if a share of the Redis commands fails at this time."""
        return self._loop.time() < self._commands_fail_until

    async def run_for(self, duration_s: float) -> None:
        """Inject random faults at random times for `duration_s` seconds."""
        loop, faults = self._loop, self._scenario.faults
        ends_at = loop.time() + duration_s
        while faults:
            interval_s = self._random.expovariate(1 / self._scenario.fault_interval_s)
            if loop.time() + interval_s >= ends_at:
                break
            await asyncio.sleep(interval_s)
            kind = self._random.choice(faults)
            inject: Callable[[], str] = getattr(self, "_" + re.sub("[ -]", "_", kind))
            description = inject()
            if description:  # otherwise the fault was impossible
                self._history.append(FAULT, "nemesis", f"{kind}: {description}")
        await asyncio.sleep(max(0.0, ends_at - loop.time()))

    def heal(self) -> None:
        """End all faults: restart Redis, heal the network, continue stopped processes, and reset half-open connections."""
        self._commands_fail_until = 0.0
        for redis in self._store.redises:
            redis.fault = lambda _command, _sender: None
            redis.scan_s = 0.0
        self._network.heal()
        self._store.heal()
        for node in [*self._store.processes, *[host.node for host in self._hosts], *self._clients]:
            if node.stopped:
                self._loop.continue_node(node)
        for connection in list(self._network.connections):
            if (
                connection.client.has_ended != connection.server.has_ended
            ):  # half-open: one side has not detected the end yet
                connection.client.reset()
                connection.server.reset()
        for connection in self._silenced:
            connection.client.reset()
            connection.server.reset()

    # -- network faults: each method injects one fault, and returns its description, or "" if it was impossible ----

    def _reset_a_client_connection(self) -> str:
        """Break a random connection that does not lead to a Redis; return a description, or "" if there is none."""
        return self._cut([each for each in self._network.connections if each.address[1] != PORT])

    def _reset_a_store_connection(self) -> str:
        """Break a random connection to a Redis; return a description, or "" if there is none."""
        return self._cut([each for each in self._network.connections if each.address[1] == PORT])

    def _cut(self, candidates: list[Connection]) -> str:
        """Break one of the connections at random; return a description, or "" if there are none.

        One side detects the break soon, the other perhaps much later.
        """
        if not candidates:
            return ""
        connection = self._random.choice(candidates)
        delays_s = [self._random.choice([0.0, 0.001, 0.5, 3.0, 20.0]) for _ in range(2)]
        delays_s[self._random.randrange(2)] = self._random.uniform(0, 0.01)
        self._network.cut(connection, *delays_s)
        return f"{connection}, detected after {delays_s[0]:.3f} s and {delays_s[1]:.3f} s"

    def _half_open_a_connection(self) -> str:
        """Lose all bytes of a client's connection in both directions; return a description, or "" if there is no connection."""
        return self._silence(to_server=True, to_client=True)

    def _cut_one_direction(self) -> str:
        """Lose all bytes of a client's connection in one direction; return a description, or "" if there is no connection."""
        to_server = self._random.random() < 0.5
        return self._silence(to_server=to_server, to_client=not to_server)

    def _silence(self, *, to_server: bool, to_client: bool) -> str:
        """Lose bytes of a random connection of a client; return a description, or "" if there is no connection.

        Often the server detects the loss soon and the client only by itself, by a ping without an answer. This is the worst
        case for a client: the server ends the session, and the client is not notified.
        """
        candidates = [
            each
            for each in self._network.connections
            if each.client.node in self._clients and not each.client.has_ended and not each.server.has_ended
        ]
        if not candidates:
            return ""
        connection = self._random.choice(candidates)
        self._network.silence(connection, to_server=to_server, to_client=to_client)
        self._silenced.append(connection)
        description = f"{connection}, {'to the server' * to_server}{' and ' * (to_server and to_client)}{'to the client' * to_client}"
        for side, delays_s in ((connection.server, SERVER_DETECTION_S), (connection.client, CLIENT_DETECTION_S)):
            after_s = self._random.choice(delays_s)
            if after_s is not None:
                self._network.reset_later(side, after_s)
                description += f", detected by {side.node} after {after_s} s"
        return description

    def _partition_hosts(self) -> str:
        """Partition two random hosts for a random time; return a description.

        Clients do not connect to a Redis, so a Redis is only partitioned from a server.
        """
        redises, servers = self._store.hosts, [host.name for host in self._hosts]
        one, other = self._random.sample([*redises, *servers, *[node.host for node in self._clients]], 2)
        if {one, other} & set(redises) and not {one, other} & set(servers):
            one = one if one in redises else other
            other = self._random.choice(servers)
        duration_s = self._random.choice(PAUSES_S)
        self._network.partition(one, other)
        self._loop.call_later(duration_s, self._network.heal)
        return f"{one} and {other} for {duration_s} s"

    # -- store faults ------------------------------------------------------------------------------------

    def _command_fault(self, command: list[bytes], sender: str) -> str | None:
        """Return the fault to inject into a Redis command, or None. Each Redis calls this before it executes a command.

        `sender` is the name of the node that sent the command. If the nemesis has planned to stop the next server that
        commits, and the command is a commit, this method stops that server.
        """
        if self._pause_next_committer_s is not None and command[0] == b"EXEC":  # a commit is a transaction
            for host in self._hosts:
                if host.node.name == sender:
                    self._pause(host.node, self._pause_next_committer_s)
                    self._pause_next_committer_s = None
        if self._loop.time() >= self._commands_fail_until or self._random.random() > 0.2:
            return None
        fault = self._random.choice([CUT_BEFORE, CUT_AFTER, CUT_AFTER, REJECT])
        self._history.append(FAULT, "redis", f"{fault} {command[0].decode()}")
        return fault

    def _fail_commands(self) -> str:
        """Let a share of the Redis commands fail for a random time; return a description."""
        duration_s = self._random.choice(PAUSES_S)
        self._commands_fail_until = self._loop.time() + duration_s
        return f"for {duration_s} s"

    def _pause_the_store(self) -> str:
        return self._pause(self._store.process)

    def _restart_the_store(self) -> str:
        self._store.master.restart()
        return "without loss"

    def _flush_scripts(self) -> str:
        """Delete all cached scripts in Redis, so that servers must load them again; return a description."""
        self._store.master.flush_scripts()
        return "SCRIPT FLUSH"

    def _lose_writes(self) -> str:
        """Restart Redis without its last writes; return a description."""
        lost_count = self._store.master.restart(lost_writes=self._random.choice([1, 2, 5, 20]))
        self._store.detect_lost_writes()
        return f"{lost_count} writes, in a restart"

    def _flush_the_store(self) -> str:
        """Delete all keys in Redis; return a description."""
        self._store.master.flush()
        self._store.detect_lost_writes()
        return "FLUSHALL"

    def _crash_the_store(self) -> str:
        """Kill the single Redis, which loses its last writes, and start it again later; return a description.

        Also choose how long it then loads its data, and how long a server takes to read the records.
        """
        redis = self._crashing_redis
        if redis.process.dead:
            return ""
        lost_s, down_s, loading_s = (self._random.choice(each) for each in (LOST_S, DOWN_S, LOADING_S))
        redis.scan_s = self._random.choice(SCAN_S)
        self._loop.kill(redis.process)
        lost_count = redis.lose_writes_since(self._loop.time() - lost_s)
        self._loop.call_later(down_s, redis.revive, loading_s)
        return (
            f"without {lost_count} writes of the last {lost_s} s, down for {down_s} s, "
            f"loading for {loading_s} s, {redis.scan_s} s for each part of a load"
        )

    def _lose_the_leader(self) -> str:
        """Let the leading server restart, and crash Redis up to a second later; return a description, or "" without a leader.

        So Redis often loses the takeover by the next leader.
        """
        leader, delay_s = self._leading_host, self._random.uniform(0.1, 1)
        if leader is None:
            return ""
        leader.terminate()
        self._loop.call_later(delay_s, self._crash_later)
        return f"SIGTERM to {leader.node}, crash after {delay_s:.3f} s"

    def _lose_unreplicated_writes(self) -> str:
        """Cut the followers off from Redis, and crash it up to a second later; return a description, or "" without followers.

        So only the leader knows the last writes.
        """
        leader, delay_s = self._leading_host, self._random.uniform(0.1, 1)
        followers = [host.name for host in self._hosts if host is not leader]
        if leader is None or not followers:
            return ""
        for follower in followers:
            self._network.partition(follower, self._crashing_redis.host)
        self._loop.call_later(delay_s, self._crash_later, followers)
        return f"{', '.join(followers)} cut off from Redis, crash after {delay_s:.3f} s"

    def _crash_later(self, cut_off: Sequence[str] = ()) -> None:
        """Connect the servers that are cut off from Redis again, and crash Redis."""
        for name in cut_off:
            self._network.end_partition(name, self._crashing_redis.host)
        description = self._crash_the_store()
        if description:
            self._history.append(FAULT, "nemesis", f"crash the store: {description}")

    @property
    def _leading_host(self) -> Host | None:
        """The host of the server that wrote to the single Redis last, or None if Redis or this server is down."""
        assert isinstance(self._store, CrashingRedis)
        head = self._store.head
        if head is None or self._store.process.dead:
            return None
        return next((host for host in self._hosts if host.node.name == head.writer and not host.node.dead), None)

    @property
    def _crashing_redis(self) -> ReplicatedRedis:
        assert isinstance(self._store, CrashingRedis)
        return self._store.master

    # -- process faults -----------------------------------------------------------------------------------

    def _pause(self, node: Node, pause_s: float | None = None) -> str:
        """Stop a process for `pause_s` seconds, by default for a random time.

        Returns a description, or "" if the process was not running.
        """
        pause_s = self._random.choice(PAUSES_S) if pause_s is None else pause_s
        loop = self._loop
        if node.dead or node.stopped:
            return ""
        loop.stop_node(node)
        loop.call_later(pause_s, loop.continue_node, node, context=Context())
        return f"{node} for {pause_s} s"

    def _pause_a_server(self) -> str:
        """Stop a random server now, or plan to stop the next server that sends a commit, before the reply arrives."""
        if self._random.random() < 0.5:
            self._pause_next_committer_s = self._random.choice(PAUSES_S)
            return f"the next one that commits, before it has the reply, for {self._pause_next_committer_s} s"
        return self._pause(self._random.choice(self._hosts).node)

    def _pause_a_client(self) -> str:
        return self._pause(self._random.choice(list(self._clients)))

    def _kill_a_server(self) -> str:
        """Crash a random server, sometimes with its machine (`silently`), and schedule its restart.

        Returns a description, or "" if the chosen server was already down.
        """
        host = self._random.choice(self._hosts)
        if host.node.dead:
            return ""
        silently, restart_after_s = self._random.random() < 0.3, self._random.choice([0.0, 0.05, 1.0, 5.0])
        description = f"{host.node}{', silently' if silently else ''}, back after {restart_after_s} s"
        host.kill(restart_after_s, silently=silently)
        return description

    def _restart_a_server(self) -> str:
        host = self._random.choice(self._hosts)
        host.terminate()
        return f"SIGTERM to {host.node}"

    def _kill_a_client(self) -> str:
        """Crash a random client; return its name, or "" if it is the last one, which must survive."""
        live = [node for node in self._clients if not node.dead]
        if len(live) < 2:
            return ""
        node = self._random.choice(live)
        self._loop.kill(node, silently=self._random.random() < 0.3)
        return str(node)

    # -- faults of a replicated Redis: the primary fails, or two Redis servers consider themselves the primary ----

    @property
    def _replicated_store(self) -> RedisWithSentinels:
        assert isinstance(self._store, RedisWithSentinels)
        return self._store

    def _delay_replication(self) -> str:
        """Pause the replication to a random replica for a random time; return a description."""
        replica = self._failover_random.choice(
            [redis for redis in self._replicated_store.redises if redis is not self._replicated_store.master]
        )
        return self._pause_replication_to(replica, self._failover_random.choice(LAGS_S))

    def _kill_a_master(self) -> str:
        """Kill the primary, sometimes while its replicas lag, and sometimes together with the leading server.

        Both are restarted later; the primary keeps its data.
        """
        master, leader = self._replicated_store.master, self._leader()
        lag_description = self._maybe_pause_replication(always=leader is not None)
        silently, restart_after_s = self._failover_random.random() < 0.3, self._failover_random.choice(RESTART_DELAYS_S)
        leader_restart_after_s = self._failover_random.choice(LEADER_RESTART_DELAYS_S)

        def kill() -> None:
            """Kill the primary, and the leading server if one was chosen; schedule the restarts."""
            if not master.process.dead:
                self._loop.kill(master.process, silently=silently)
                if leader is not None:
                    leader.kill(leader_restart_after_s, silently=False)
                self._loop.call_later(restart_after_s, master.revive)

        self._loop.call_later(self._failover_random.uniform(0.2, 1) if lag_description else 0, kill)
        with_leader = "" if leader is None else f", with {leader.node}"
        return f"{master.host}{', silently' if silently else ''}, back after {restart_after_s} s{lag_description}{with_leader}"

    def _fail_over(self) -> str:
        """Let the sentinels elect another primary. They demote the old primary only after a delay."""
        lag_description = self._maybe_pause_replication()
        elected = self._replicated_store.sentinels.fail_over()
        return elected and f"to {elected}{lag_description}"

    def _pause_a_master(self) -> str:
        """Stop the primary for a random time. When it continues, it still considers itself the primary."""
        process, stall_s = self._replicated_store.process, self._failover_random.choice(STALLS_S)
        lag_description = self._maybe_pause_replication()
        if process.dead or process.stopped:
            return ""
        self._loop.stop_node(process)
        self._loop.call_later(stall_s, self._loop.continue_node, process)
        return f"{process} for {stall_s} s{lag_description}"

    def _partition_the_master(self) -> str:
        """Partition the primary from the replicas for a random time.

        Some servers and clients are on the side of the primary, others on the side of the replicas, and a few can reach both.
        Returns a description.
        """
        random = self._failover_random
        others = [host.name for host in self._hosts] + [node.host for node in self._clients]
        master = self._replicated_store.master.host
        with_primary: list[str] = []
        with_replicas = [host for host in self._replicated_store.hosts if host != master]
        for name in others:
            side = random.random()
            if side < 0.45:
                with_primary.append(name)
            elif side < 0.85:
                with_replicas.append(name)
        for one in [master, *with_primary]:
            for other in with_replicas:
                self._network.partition(one, other)
        pause_s = random.choice(STALLS_S)
        self._loop.call_later(pause_s, self._network.heal)
        return f"{', '.join([master, *with_primary])} from {', '.join(with_replicas)} for {pause_s} s"

    def _leader(self) -> Host | None:
        """Return the host of the leading server, which is the last writer of the primary.

        Returns None with probability one half, so that the caller spares the leader, or if there is no leader.
        """
        head = self._replicated_store.head
        leaders = [host for host in self._hosts if head is not None and host.node.name == head.writer]
        return leaders[0] if leaders and self._failover_random.random() < 0.5 else None

    def _maybe_pause_replication(self, *, always: bool = False) -> str:
        """Pause the replication to all replicas for a random time, with probability 0.6 or, if `always`, in any case.

        Returns a description, or "" if the replication continues.
        """
        if self._failover_random.random() < 0.4 and not always:
            return ""
        lag_s = self._failover_random.choice(LAGS_S[2:])
        for redis in self._replicated_store.redises:
            if redis is not self._replicated_store.master:
                self._pause_replication_to(redis, lag_s)
        return f", where all replicas lag for {lag_s} s"

    def _pause_replication_to(self, replica: ReplicatedRedis, lag_s: float) -> str:
        """Pause the replication to one replica for `lag_s` seconds; return a description."""
        replica.pause_replication()
        self._loop.call_later(lag_s, replica.resume_replication)
        return f"{replica.host} for {lag_s} s"

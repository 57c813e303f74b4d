"""Tests with real faults on real processes, and a checker of the guarantees.

Clients increment counters, each time under an exclusive lock, while servers, Redis and connections are killed, stopped and
cut. `checker` verifies the guarantees, `fenced_counters` rejects stale fencing tokens, `wire_client` and `library_client`
are the clients, `worker` is their workload, `cluster` has the processes, and `environment` combines all of that. The faults
are in `server_failures`, `stopped_leader`, `redis_failures`, `primary_failures`, `primary_changes`, `slot_migration` and
`connection_cuts`; `scenarios` lists them, and `results` has the measurements. `make soak-faults` runs them.
"""

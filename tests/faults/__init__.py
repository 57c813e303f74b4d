"""Real faults on real processes, and a proof of what they did not do.

Clients add one to counters, each time under an exclusive lock, while servers, Redis and connections are killed, stopped
and cut. `watch` judges, `store` guards the counters by fences, `wire_client` and `library_client` are the clients,
`worker` is what they do, `cluster` has the processes, `world` is all of that together, `servers_end`,
`server_stops`, `redis_fails`, `masters_die`, `masters_change`, `slots_move` and `cuts` are the faults, `scenarios` names
them, `figures` has what came of them. Run it by `make soak-faults`.
"""

"""Writes the baseline anew, and prints what has changed: `make baseline`."""

from __future__ import annotations

from support.processes.servers import running_redis
from work import baseline


def main() -> None:
    recorded = baseline.read() if baseline.FILE.exists() else {}
    version = recorded.get("python", "")
    core = baseline.count_core()
    changes = [f"core: {line}" for line in baseline.differences(core, recorded.get("core", {}), version)]
    shapes: dict[str, dict[str, dict[str, float]]] = {store: {} for store in baseline.STORES}
    with running_redis() as redis:
        for store, by_shape in shapes.items():
            for shape in baseline.SHAPES:
                counts = by_shape[shape] = baseline.count_shape(shape, redis if store == "redis" else None)
                before = recorded.get(store, {}).get(shape, {})
                changes += [f"{store}, {shape}: {line}" for line in baseline.differences(counts, before, version)]
    shapes["client"] = {}
    for subject, tasks in baseline.CLIENTS.items():
        counts = shapes["client"][subject] = baseline.count_client(tasks)
        before = recorded.get("client", {}).get(subject, {})
        changes += [f"client, {subject}: {line}" for line in baseline.differences(counts, before, version)]
    baseline.write(core, shapes)
    print("\n".join(changes) or "Nothing has changed by more than its tolerance.")
    print(f"Written to {baseline.FILE}")


if __name__ == "__main__":
    main()

"""The history of a namespace: which client requested, awaited and held which lock, and how each request ended.

- `records` is the format: one JSON line for each event.
- `recorder` writes the lines on the leader, after the commit. No commit waits for it.
- `redaction` replaces secret names by digests.
- `archiver` compresses, indexes and deletes the files, in a process of its own; `segments` reads them.
- `search` finds requests by resource, transaction, client and time; `gantt` draws them.
- `replay` runs recorded commands through the lock manager again, also with changes.
"""

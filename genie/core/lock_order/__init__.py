"""Lock order analysis: finds pairs of locks that transactions take in both orders, before that causes a deadlock.

Names are grouped into classes: `accounts/42` and `accounts/7` are of the class `accounts/*`. If a transaction that holds
locks requests more locks, each held class gets an edge to each requested class. A cycle of edges is an inversion: the
observed transactions can deadlock in some interleaving, even if they never have. Within one class, names must be taken in
ascending order.

The method is that of lockdep in the Linux kernel; guards are the locksets of Eraser (Savage et al., 1997).

- `names.py`: the class of a name, and the order of two names
- `classes.py`: the classes and their rules
- `members.py`: the classes that a transaction holds and asks for
- `edges.py`: the edges between classes, with their guards
- `inversions.py`: the inversions that were found, and the transactions that complete them
- `search.py`: the search for the inversions that a new edge completes
- `analysis.py`: `LockOrder`, which the lock manager calls
"""

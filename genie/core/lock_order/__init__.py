"""Lock order analysis: finds pairs of locks that transactions take in both orders, before that causes a deadlock.

Names are grouped into classes: `accounts/42` and `accounts/7` are of the class `accounts/*`. Whenever a transaction holds
locks and asks for more, each held class gets an edge to each class that is asked for. A cycle of edges is an inversion:
some interleaving of the transactions that were seen can deadlock, whether it ever did or not. Within one class, names
must be taken in ascending order.

The method is that of lockdep in the Linux kernel; guards are the locksets of Eraser (Savage et al., 1997).

- `names.py`: the class of a name, and the order of two names
- `classes.py`: the classes and their rules
- `members.py`: the classes that a transaction holds and asks for
- `edges.py`: the edges between classes, with their guards
- `inversions.py`: the inversions that were found, and the transactions that complete them
- `search.py`: the search for the inversions that a new edge completes
- `analysis.py`: `LockOrder`, which the lock manager calls
"""

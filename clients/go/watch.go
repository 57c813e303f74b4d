package genie

import (
	"context"
	"strings"
	"time"
)

// maxBufferedChanges: beyond it a watch ignores events, and resynchronizes when its changes are consumed.
const maxBufferedChanges = 10_000

// Change is a change of the locks that a watch follows.
type Change struct {
	// State is "locked" or "unlocked". "resync" has no other fields: the watch was interrupted, and the
	// next changes lead from the last known locks to the present ones. Locks that were held only
	// in between are not reported.
	State       string
	Resource    string // the name, without a mode
	Mode        string // "shared" or "exclusive"
	ID          int64
	Transaction string
}

func (c Change) conflictsWith(other Change) bool {
	sameOwner := c.ID == other.ID || c.Transaction != "" && c.Transaction == other.Transaction
	return !sameOwner && (c.Mode == "exclusive" || other.Mode == "exclusive")
}

// Watch follows the locks on all resources with a prefix. It is made by Client.Watch and ended by Close.
//
// A program that applies all changes has the present locks: every "unlocked" follows a "locked" of the
// same resource and ID, and the end of a lock is reported before the grant of a lock that conflicts.
type Watch struct {
	client *Client
	prefix string

	// Client.mu protects the rest.
	state     watchState
	sent      bool // a `watch` without an answer is on the connection
	synced    bool // the first snapshot has arrived
	truncated bool
	changes   []Change
	next      chan struct{} // closed when the consumer can continue; nil: no consumer waits
	held      map[string]map[int64]Change
	err       error
}

type watchState uint8

const (
	lagging watchState = iota // needs a snapshot, and ignores events until then
	live
	over
)

// Watch begins to follow the locks on all resources whose names begin with prefix. The first changes are a
// "locked" for each lock that is held. If the server rejects the watch, Next returns the error.
func (c *Client) Watch(prefix string) (*Watch, error) {
	if err := checkTexts(prefix); err != nil {
		return nil, err
	}
	w := &Watch{client: c, prefix: prefix, held: map[string]map[int64]Change{}}
	c.mu.Lock()
	defer c.unlock()
	if c.session.closed != nil {
		return nil, c.session.closed
	}
	c.session.watches[w] = true
	c.session.sendWatches(c.now())
	return w, nil
}

// Next waits for the next change. It returns ErrClosed after Close, and another error if the server
// rejected the watch. A connection that is lost is no error: the watch resynchronizes.
func (w *Watch) Next(ctx context.Context) (Change, error) {
	c := w.client
	for {
		c.mu.Lock()
		if w.state == over {
			defer c.unlock()
			return Change{}, w.err
		}
		if len(w.changes) > 0 {
			defer c.unlock()
			change := w.changes[0]
			w.changes = w.changes[1:]
			return change, nil
		}
		if w.next == nil {
			w.next = make(chan struct{})
		}
		next := w.next
		c.session.sendWatches(c.now())
		c.unlock()
		select {
		case <-next:
		case <-ctx.Done():
			return Change{}, ctx.Err()
		}
	}
}

// Truncated reports whether the last snapshot was truncated, because more locks are held than the server
// lists. The end of such a lock is not always reported.
func (w *Watch) Truncated() bool {
	w.client.mu.Lock()
	defer w.client.unlock()
	return w.truncated
}

// Close ends the watch. A call of Next that waits returns ErrClosed.
func (w *Watch) Close() error {
	c := w.client
	c.mu.Lock()
	defer c.unlock()
	if w.state == over {
		return nil
	}
	c.session.endWatch(w, ErrClosed)
	for other := range c.session.watches {
		if other.prefix == w.prefix {
			return nil
		}
	}
	if c.session.phase == up {
		c.session.send(&call{kind: unwatchCall, prefix: w.prefix, abandoned: true}, c.now())
	}
	return nil
}

// -- the part of the session -------------------------------------------------------------------------

// sendWatches sends `watch` for the watches that need a snapshot. The consumer takes the earlier changes first.
func (s *session) sendWatches(now time.Duration) {
	if s.phase != up {
		return
	}
	for w := range s.watches {
		if w.state == lagging && !w.sent && len(w.changes) == 0 {
			w.sent = true
			s.send(&call{kind: watchCall, watch: w, prefix: w.prefix, abandoned: true}, now)
		}
	}
}

func (s *session) onWatching(m *watching) {
	r := s.take(parseRef(m.Ref), watchCall)
	if r == nil || r.watch.state != lagging {
		return
	}
	w := r.watch
	w.sent, w.state, w.truncated = false, live, m.Truncated
	if w.synced {
		w.changes = append(w.changes, Change{State: "resync"})
	}
	w.synced = true
	if !m.Truncated {
		present := map[string]map[int64]bool{}
		for _, row := range m.Held {
			if present[row.Resource] == nil {
				present[row.Resource] = map[int64]bool{}
			}
			present[row.Resource][row.ID] = true
		}
		for resource, locks := range w.held {
			for id := range locks {
				if !present[resource][id] {
					w.unlocked(resource, id)
				}
			}
		}
	}
	for i := range m.Held {
		w.locked(&m.Held[i])
	}
	w.wake()
}

func (s *session) onEvent(m *heldRow, now time.Duration) {
	for w := range s.watches {
		switch {
		case m.State == "lagged": // the server has ended all watches of the connection
			w.state = lagging
		case w.state != live || !strings.HasPrefix(m.Resource, w.prefix):
		case len(w.changes) >= maxBufferedChanges:
			w.state = lagging
		case m.State == "locked":
			w.locked(m)
			w.wake()
		case m.State == "unlocked":
			w.unlocked(m.Resource, m.ID)
			w.wake()
		}
	}
	if m.State == "lagged" {
		s.sendWatches(now)
	}
}

// locked adds the grant of a lock. A reported lock that conflicts with it must have ended.
func (w *Watch) locked(row *heldRow) {
	change := Change{"locked", row.Resource, row.Mode, row.ID, row.TransactionName}
	if _, reported := w.held[row.Resource][row.ID]; reported {
		return
	}
	for id, other := range w.held[row.Resource] {
		if change.conflictsWith(other) {
			w.unlocked(row.Resource, id)
		}
	}
	if w.held[row.Resource] == nil {
		w.held[row.Resource] = map[int64]Change{}
	}
	w.held[row.Resource][row.ID] = change
	w.changes = append(w.changes, change)
}

// unlocked adds the end of a lock, if the lock was reported.
func (w *Watch) unlocked(resource string, id int64) {
	change, reported := w.held[resource][id]
	if !reported {
		return
	}
	delete(w.held[resource], id)
	if len(w.held[resource]) == 0 {
		delete(w.held, resource)
	}
	change.State = "unlocked"
	w.changes = append(w.changes, change)
}

func (w *Watch) wake() {
	if w.next != nil && (len(w.changes) > 0 || w.state == over) {
		close(w.next)
		w.next = nil
	}
}

func (s *session) endWatch(w *Watch, err error) {
	if w.state == over {
		return
	}
	delete(s.watches, w)
	w.state, w.err, w.changes, w.held = over, err, nil, nil
	w.wake()
}

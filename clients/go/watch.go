package genie

import (
	"context"
	"encoding/json"
	"strings"
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
	Transaction string `json:"transactionName"`
}

func (c Change) conflictsWith(other Change) bool {
	sameOwner := c.ID == other.ID || c.Transaction != "" && c.Transaction == other.Transaction
	return !sameOwner && (c.Mode == "exclusive" || other.Mode == "exclusive")
}

// Watch follows the locks on all resources with a prefix. It is made by Client.Watch and ended by Close. Its methods may
// be called from several goroutines.
//
// A program that applies all changes has the present locks: every "unlocked" follows a "locked" of the
// same resource and ID, and the end of a lock is reported before the grant of a lock that conflicts.
type Watch struct {
	client *Client
	prefix string

	// Client.mu protects the rest.
	state     watchState
	synced    bool // the first snapshot has arrived
	truncated bool
	changes   []Change
	changed   chan struct{}               // closed when the consumer can continue; nil: no consumer waits
	held      map[string]map[int64]Change // the locks after all changes, by resource and id
	err       error                       // why the watch has ended; nil: it is open
}

type watchState uint8

const (
	lagging   watchState = iota // needs a snapshot, and ignores events until then
	requested                   // `watch` was sent
	live
)

// Watch begins to follow the locks on all resources whose names begin with prefix. The first changes are a
// "locked" for each lock that is held. If the server rejects the watch, Next returns the error.
func (c *Client) Watch(prefix string) (*Watch, error) {
	if err := (&fields{Prefix: &prefix}).check(nil); err != nil {
		return nil, err
	}
	w := &Watch{client: c, prefix: prefix, held: map[string]map[int64]Change{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != nil {
		return nil, c.closed
	}
	c.watches[w] = true
	w.request()
	return w, nil
}

// Next waits for the next change. It returns ErrClosed after Close, and another error if the server
// rejected the watch. A connection that is lost is no error: the watch resynchronizes.
func (w *Watch) Next(ctx context.Context) (Change, error) {
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	for len(w.changes) == 0 {
		if w.err != nil {
			return Change{}, w.err
		}
		if w.changed == nil {
			w.changed = make(chan struct{})
		}
		changed := w.changed
		w.request()
		w.client.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		w.client.mu.Lock()
		if err := ctx.Err(); err != nil {
			return Change{}, err
		}
	}
	change := w.changes[0]
	w.changes = w.changes[1:]
	return change, nil
}

// Truncated reports whether the last snapshot was truncated, because more locks are held than the server
// lists. The end of such a lock is not always reported.
func (w *Watch) Truncated() bool {
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	return w.truncated
}

// Close ends the watch. A call of Next that waits returns ErrClosed.
func (w *Watch) Close() error {
	c := w.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.err != nil {
		return nil
	}
	w.end(ErrClosed)
	for other := range c.watches {
		if other.prefix == w.prefix {
			return nil
		}
	}
	if c.conn != nil {
		c.sendBackground("unwatch", &fields{Prefix: &w.prefix}, nil)
	}
	return nil
}

// The rest is called with Client.mu held.

// request sends `watch` if the watch needs a snapshot. The consumer takes the earlier changes first.
func (w *Watch) request() {
	if w.client.conn != nil && w.state == lagging && len(w.changes) == 0 {
		w.state = requested
		w.client.sendBackground("watch", &fields{Prefix: &w.prefix}, nil).watch = w
	}
}

// onSnapshot adds the changes that lead from the reported locks to those of a snapshot.
func (w *Watch) onSnapshot(m *message) {
	var rows []Change
	if w.err != nil || w.state != requested || json.Unmarshal(m.Payload.Held, &rows) != nil {
		return
	}
	w.state, w.truncated = live, m.Payload.Truncated
	if w.synced {
		w.changes = append(w.changes, Change{State: "resync"})
	}
	w.synced = true
	type key struct {
		resource string
		id       int64
	}
	present := map[key]bool{}
	for _, row := range rows {
		present[key{row.Resource, row.ID}] = true
	}
	for resource, locks := range w.held {
		for id := range locks {
			if !w.truncated && !present[key{resource, id}] {
				w.unlocked(resource, id)
			}
		}
	}
	for _, row := range rows {
		w.locked(row)
	}
	w.wake()
}

func (c *Client) onEvent(event *Change) {
	for w := range c.watches {
		switch {
		case event.State == "lagged": // the server has ended all watches of the connection
			w.state = lagging
			w.request()
		case w.state != live || !strings.HasPrefix(event.Resource, w.prefix):
		case len(w.changes) >= maxBufferedChanges:
			w.state = lagging
		case event.State == "locked":
			w.locked(*event)
		case event.State == "unlocked":
			w.unlocked(event.Resource, event.ID)
		}
		w.wake()
	}
}

// locked adds the grant of a lock. A reported lock that conflicts with it must have ended.
func (w *Watch) locked(change Change) {
	locks := w.held[change.Resource]
	if _, reported := locks[change.ID]; reported {
		return
	}
	for id, other := range locks {
		if change.conflictsWith(other) {
			w.unlocked(change.Resource, id)
		}
	}
	if w.held[change.Resource] == nil {
		w.held[change.Resource] = map[int64]Change{}
	}
	change.State = "locked"
	w.held[change.Resource][change.ID] = change
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
	if w.changed != nil && (len(w.changes) > 0 || w.err != nil) {
		close(w.changed)
		w.changed = nil
	}
}

// end ends the watch, unless it has ended before.
func (w *Watch) end(err error) {
	if w.err == nil {
		delete(w.client.watches, w)
		w.err, w.changes, w.held = err, nil, nil
		w.wake()
	}
}

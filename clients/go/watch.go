package genie

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// maxBufferedChanges: beyond it a watch ignores events, and resynchronizes when its changes are consumed.
const maxBufferedChanges = 10_000

// maxUnlistedLocks is how many reported locks that are missing from a truncated snapshot still count as held. Their ends may have
// been missed.
const maxUnlistedLocks = 100_000

// Change is a change of the locks that a watch follows.
type Change struct {
	// State is "locked" or "unlocked". "resync" has no other fields but Truncated: the watch begins or was interrupted, and
	// the next changes lead from the last reported locks to the present ones. Locks that were held only in between are
	// not reported.
	State       string
	Resource    string // the name, without a mode
	Mode        string // "shared", "exclusive" or "units"
	Units, Of   int    // the units of the lock and their limit, if the mode is "units"
	ID          int64
	Transaction string `json:"transactionName"`
	// Truncated: more locks are held than the server searches or lists. The end of such a lock is not always reported, or too
	// early: if more than 100,000 reported locks are not listed, the oldest of them are reported as unlocked.
	Truncated bool
}

func (c Change) conflictsWith(other Change) bool {
	sameOwner := c.ID == other.ID || c.Transaction != "" && c.Transaction == other.Transaction
	return !sameOwner && (c.Mode != other.Mode || c.Mode == "exclusive") // units exclude each other only by their number
}

// heldLocks are the reported locks on one resource, which do not conflict with each other. A resource may have thousands of shared
// locks. So a new lock is compared with each of them only if not all have its mode, which is not exclusive, or its transaction.
type heldLocks struct {
	byID              map[int64]Change
	mode, transaction string // of all locks; empty: they may have several
}

func (l *heldLocks) add(c Change) {
	if len(l.byID) == 0 {
		l.mode, l.transaction = c.Mode, c.Transaction
	}
	l.note(c)
	l.byID[c.ID] = c
}

// note clears the mode and the transaction if a lock has another one.
func (l *heldLocks) note(c Change) {
	if c.Mode != l.mode {
		l.mode = ""
	}
	if c.Transaction != l.transaction {
		l.transaction = ""
	}
}

// conflictingWith returns the ids of the locks that conflict with a new one.
func (l *heldLocks) conflictingWith(c Change) []int64 {
	if c.Mode == l.mode && c.Mode != "exclusive" || c.Transaction != "" && c.Transaction == l.transaction {
		return nil
	}
	for _, first := range l.byID { // locks may have ended since: the next call may be shorter
		l.mode, l.transaction = first.Mode, first.Transaction
		break
	}
	var found []int64
	for id, other := range l.byID {
		l.note(other)
		if c.conflictsWith(other) {
			found = append(found, id)
		}
	}
	return found
}

// matches returns whether a resource has the prefix, or is a subtree that contains all names with the prefix.
func matches(prefix, resource string) bool {
	isSubtree := resource == "**" || strings.HasSuffix(resource, "/**")
	return strings.HasPrefix(resource, prefix) || isSubtree && strings.HasPrefix(prefix, strings.TrimSuffix(resource, "**"))
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
	isLive  bool  // events follow the last snapshot
	call    *call // the `watch` without an answer
	changes []Change
	changed chan struct{}         // closed when the consumer can continue; nil: no consumer waits
	held    map[string]*heldLocks // the locks after all changes, by resource
	err     error                 // why the watch has ended; nil: it is open
}

// Watch begins to follow the locks on all resources whose names begin with prefix. The first changes are a "resync", and a
// "locked" for each lock that is held. If the server rejects the watch, Next returns the error.
func (c *Client) Watch(prefix string) (*Watch, error) {
	if err := (&fields{Prefix: &prefix}).check(nil); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != nil {
		return nil, c.closed
	}
	w := &Watch{client: c, prefix: prefix, held: map[string]*heldLocks{}}
	c.watches[w] = true
	w.request()
	return w, nil
}

// Next waits for the next change. It returns ErrClosed after Close, and another error if the server
// rejected the watch. A connection that is lost is no error: the watch resynchronizes.
func (w *Watch) Next(ctx context.Context) (Change, error) {
	w.client.mu.Lock()
	defer w.client.mu.Unlock()
	for len(w.changes) == 0 && w.err == nil && ctx.Err() == nil {
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
	}
	if w.err != nil {
		return Change{}, w.err
	}
	if len(w.changes) == 0 {
		return Change{}, ctx.Err()
	}
	change := w.changes[0]
	w.changes = w.changes[1:]
	return change, nil
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
	if c.conn == nil { // the subscription has ended with its connection
		return nil
	}
	for other := range c.watches {
		if other.prefix == w.prefix {
			return nil
		}
	}
	c.sendBackground("unwatch", &fields{Prefix: &w.prefix}, nil)
	return nil
}

// The rest is called with Client.mu held.

// request sends `watch` if the watch needs a snapshot. The consumer takes the earlier changes first.
func (w *Watch) request() {
	if w.client.conn != nil && !w.isLive && w.call == nil && len(w.changes) == 0 {
		w.call = w.client.sendBackground("watch", &fields{Prefix: &w.prefix}, nil)
		w.call.watch = w
	}
}

// onSnapshot handles the answer to a `watch`. It adds the changes that lead from the reported locks to the present ones.
func (w *Watch) onSnapshot(r *call) {
	if w.call != r {
		return
	}
	var rows []Change
	if err := json.Unmarshal(r.answer.Held, &rows); err != nil { // otherwise the watch would wait for an answer
		w.client.conn.close(fmt.Errorf("the server sent an invalid snapshot: %w", err))
		return
	}
	w.isLive, w.call = true, nil
	w.changes = append(w.changes, Change{State: "resync", Truncated: r.answer.Truncated})
	for _, key := range w.missing(rows, r.answer.Truncated) {
		w.unlocked(key.Resource, key.ID)
	}
	for _, row := range rows {
		w.locked(row)
	}
	w.wake()
}

// missing returns the resources and ids of the reported locks that a snapshot shows to have ended.
func (w *Watch) missing(rows []Change, isTruncated bool) (missing []Change) {
	reported := 0
	for _, locks := range w.held {
		reported += len(locks.byID)
	}
	if isTruncated && reported <= maxUnlistedLocks { // all of them count as held
		return nil
	}
	present := map[Change]bool{}
	for _, row := range rows {
		present[Change{Resource: row.Resource, ID: row.ID}] = true
	}
	for resource, locks := range w.held {
		for id := range locks.byID {
			if key := (Change{Resource: resource, ID: id}); !present[key] {
				missing = append(missing, key)
			}
		}
	}
	if isTruncated { // what is left are the oldest
		slices.SortFunc(missing, func(a, b Change) int { return cmp.Compare(a.ID, b.ID) })
		missing = missing[:max(0, len(missing)-maxUnlistedLocks)]
	}
	return missing
}

func (w *Watch) onEvent(event Change) {
	switch {
	case event.State == "lagged": // the server has ended all watches of the connection
		w.isLive, w.call = false, nil
		w.request()
	case !w.isLive || !matches(w.prefix, event.Resource):
	case len(w.changes) >= maxBufferedChanges:
		w.isLive = false
	case event.State == "locked":
		w.locked(event)
	case event.State == "unlocked":
		w.unlocked(event.Resource, event.ID)
	}
	w.wake()
}

// locked adds the grant of a lock. A reported lock that conflicts with it must have ended.
func (w *Watch) locked(change Change) {
	locks := w.held[change.Resource]
	if locks == nil {
		locks = &heldLocks{byID: map[int64]Change{}}
	}
	if _, reported := locks.byID[change.ID]; reported {
		return
	}
	for _, id := range locks.conflictingWith(change) {
		w.unlocked(change.Resource, id)
	}
	change.State = "locked"
	locks.add(change)
	w.held[change.Resource] = locks // `unlocked` may have removed it
	w.changes = append(w.changes, change)
}

// unlocked adds the end of a lock, if the lock was reported.
func (w *Watch) unlocked(resource string, id int64) {
	locks := w.held[resource]
	if locks == nil {
		return
	}
	change, reported := locks.byID[id]
	if !reported {
		return
	}
	delete(locks.byID, id)
	if len(locks.byID) == 0 {
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
		w.err, w.changes, w.held, w.call = err, nil, nil, nil
		w.wake()
	}
}

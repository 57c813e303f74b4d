package genie

import (
	"context"
	"errors"
	"strings"
	"time"
)

// Lock is a granted lock. It survives a reconnect of its client. It ends with Release, or is lost: after
// its transaction timeout, if another client releases it by its id, or if the server loses its state.
type Lock struct {
	client    *Client
	request   *request
	resources []string // of AcquireAny: the choices, and after the grant those that are locked
	id, fence int64
	late      bool // when the grant arrived, too little of the timeout remained for certain

	// Client.mu protects the rest.
	confirmedOn  *conn // the last connection on which the server reported the lock
	expiresAt    time.Time
	expiryReason string
	renewAt      time.Time   // when the watchdog extends the lock
	timer        *time.Timer // for expiresAt and renewAt; nil: there is neither a watchdog nor a context
	release      *call       // the release of the lock; nil: none was sent
	err          error       // why the lock has ended; nil: it is held
	contexts     []context.CancelFunc
}

// ID returns the id of the lock at the server. Any client can release a lock by its id.
func (l *Lock) ID() int64 { return l.id }

// Fence returns the fencing token: a number that grows with every grant. Pass it to the data store with
// each read and write, so that the store can reject a client whose lock has ended.
func (l *Lock) Fence() int64 { return l.fence }

// Resources returns the locked resources, such as "exclusive:accounts/2".
func (l *Lock) Resources() []string { return append([]string(nil), l.resources...) }

// Err returns nil while the lock is held, ErrReleased after Release, and otherwise a *LostError. It reads
// the clock: it is correct even if the program was suspended.
func (l *Lock) Err() error {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	l.checkExpiry()
	return l.err
}

// Context returns a copy of ctx that is also cancelled when the lock is lost or released. Err tells which. The lock
// counts as lost, too, when its transaction timeout has passed on this client's clock. That time is
// counted from when the request, or the last extension, was sent.
func (l *Lock) Context(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.checkExpiry(); l.err != nil {
		cancel()
	}
	l.contexts = append(l.contexts, cancel)
	l.setTimer()
	return ctx
}

// Extend sets the remaining time of the lock to timeout from now, which may be shorter than before.
// An ended lock returns its *LostError, or ErrReleased.
func (l *Lock) Extend(ctx context.Context, timeout time.Duration) error {
	if err := l.Err(); err != nil {
		return err
	}
	_, err := l.client.do(ctx, "extend", l.extension(timeout), l, l.client.config.ConnectTimeout)
	return err
}

// Release releases the lock and waits for the server's confirmation. If the lock was lost before, Release
// returns the *LostError: other clients may have held the lock meanwhile. If ctx ends first, or if
// no server confirms within ConnectTimeout, the client keeps trying in the background. A second
// Release of a released lock does nothing.
func (l *Lock) Release(ctx context.Context) error {
	c := l.client
	c.mu.Lock()
	l.drop()
	if l.release != nil {
		return c.wait(ctx, l.release, c.config.ConnectTimeout)
	}
	defer c.mu.Unlock()
	return l.err
}

// extendLate extends a lock that its caller does not have yet. If that fails, it is unknown how long the lock is held.
func (l *Lock) extendLate(ctx context.Context) error {
	c := l.client
	_, err := c.do(ctx, "extend", l.extension(l.request.transactionTimeout), l, c.config.ConnectTimeout)
	if err == nil {
		err = l.Err() // the answer may be late, too
	}
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		l.drop()
	}
	return err
}

// result returns the error of Do, from that of its function and that of the release.
func (l *Lock) result(ctx context.Context, err, released error) error {
	var lost *LostError
	switch {
	case errors.As(l.Err(), &lost) && !errors.Is(err, lost):
		if errors.Is(err, context.Canceled) && ctx.Err() == nil {
			return lost // fn has returned because of the loss
		}
		return &LostError{ID: lost.ID, Reason: lost.Reason, Err: err}
	case err == nil && ctx.Err() == nil:
		return released
	}
	return err
}

// The rest is called with Client.mu held.

// hold notes that the server holds the lock for at least timeout after since.
func (l *Lock) hold(since time.Time, timeout time.Duration) {
	l.expiresAt, l.expiryReason, l.renewAt = since.Add(timeout), reasonTransactionTimeout, since.Add(timeout/3)
	l.setTimer()
}

// setTimer sets the timer of a lock that is held, if its watchdog or a context needs one: Err reads the clock itself.
func (l *Lock) setTimer() {
	if l.err != nil || !l.request.watchdog && l.contexts == nil {
		return
	}
	if l.timer == nil {
		l.timer = time.AfterFunc(NoTimeout, l.onTimer)
	}
	next := l.expiresAt
	if l.request.watchdog && l.renewAt.Before(next) {
		next = l.renewAt
	}
	l.timer.Reset(time.Until(next))
}

func (l *Lock) onTimer() {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.checkExpiry(); l.err != nil {
		return
	}
	if l.request.watchdog && !time.Now().Before(l.renewAt) {
		l.renew()
	}
	l.setTimer()
}

// renew extends the lock for its watchdog.
func (l *Lock) renew() {
	l.renewAt = time.Now().Add(l.request.transactionTimeout / 3)
	if l.client.conn != nil {
		l.client.sendBackground("extend", l.extension(l.request.transactionTimeout), l)
	}
}

func (l *Lock) extension(timeout time.Duration) *fields {
	return &fields{ID: l.id, TransactionTimeout: toMS(timeout)}
}

// drop ends the lock for its holder, and releases it if the server may hold it.
func (l *Lock) drop() {
	l.checkExpiry()
	if l.release == nil && l.client.locks[l.request.fields.Ref] == l {
		l.sendRelease()
	}
	l.end(ErrReleased)
}

// sendRelease releases the lock at the server.
func (l *Lock) sendRelease() { l.release = l.client.sendBackground("release", &fields{ID: l.id}, l) }

// checkExpiry ends the lock if its time has passed. The server may hold it for longer: until it reports the end, the lock
// remains in Client.locks, so that it is released by Release, or after a reconnect.
func (l *Lock) checkExpiry() {
	if l.err == nil && !time.Now().Before(l.expiresAt) {
		l.end(&LostError{ID: l.id, Reason: l.expiryReason})
	}
}

// lose ends the lock for a reason of the server. The lock may have ended before the server received its release.
func (l *Lock) lose(reason string) {
	if l.err == ErrReleased && reason != reasonSuccess {
		l.err = &LostError{ID: l.id, Reason: reason}
	}
	l.end(&LostError{ID: l.id, Reason: reason})
}

// end ends the lock for its holder, unless it has ended before.
func (l *Lock) end(err error) {
	if l.err != nil {
		return
	}
	l.err = err
	if l.timer != nil {
		l.timer.Stop()
	}
	for _, cancel := range l.contexts {
		cancel()
	}
}

// choose notes which resources of an AcquireAny were locked. The names have no modes.
func (l *Lock) choose(names []string) {
	chosen := map[string]bool{}
	for _, name := range names {
		chosen[name] = true
	}
	choices := l.resources
	l.resources = nil
	for _, resource := range choices {
		if _, name, _ := strings.Cut(resource, ":"); chosen[name] {
			l.resources = append(l.resources, resource)
		}
	}
}

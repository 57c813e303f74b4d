package genie

import (
	"context"
	"errors"
	"strings"
	"time"
)

// If more than this part of its transaction timeout may have passed when a grant arrives, the lock is extended first.
const maxPassedShare = 4

// Lock is a granted lock. It survives a reconnect of its client. It ends with Release, or is lost: after
// its transaction timeout, if another client releases it by its id, or if the server loses its state.
type Lock struct {
	client    *Client
	request   fields // TransactionTimeout: that of the last extension
	watchdog  bool
	attempts  int // of a transaction
	trace     func(context.Context) string
	resources []string // of AcquireAny: the choices, and after the grant the locked ones
	id, fence int64
	late      bool // when the grant arrived, too little of the timeout remained for certain, or the lock was lost

	// Client.mu protects the rest.
	confirmedOn *conn // the last connection on which the server reported the lock
	expiresAt   time.Time
	lastExtend  *call           // the extend that was sent last
	shortenedBy *call           // the last extend that shortens the lock; nil: none was sent, or it was answered
	renewAt     time.Time       // when the watchdog extends the lock
	timer       *time.Timer     // for the end and renewAt; nil: there is neither a watchdog nor a context
	release     *call           // the release of the lock; nil: none was sent
	err         error           // why the lock has ended; nil: it is held
	life        context.Context // ends with the lock; nil: not requested yet
	endLife     context.CancelCauseFunc
}

// ID returns the id of the lock at the server. Any client can release a lock by its id.
func (l *Lock) ID() int64 { return l.id }

// Fence returns the fencing token: a number that grows with every grant. Pass it to the data store with
// each read and write, so that the store can reject a client whose lock has ended.
func (l *Lock) Fence() int64 { return l.fence }

// Resources returns the locked resources, such as "exclusive:accounts/2".
func (l *Lock) Resources() []string { return append([]string(nil), l.resources...) }

// ExpiresAt returns when the lock counts as lost unless it is extended. If it has the option ReleaseOnDisconnect, that may be
// the end of the session, which each answer of the server moves.
func (l *Lock) ExpiresAt() time.Time {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	end, _ := l.expiry()
	return end
}

// Err returns nil while the lock is held, ErrReleased after Release, ErrDetached after Detach, and otherwise a *LostError. It
// reads the clock: it is correct even if the program was suspended. On Linux that clock stands still while the whole machine is
// suspended: only Fence protects the data then.
func (l *Lock) Err() error {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	return l.checkExpiry()
}

// Context returns a copy of ctx that is also cancelled when the lock is lost or released; context.Cause returns the error
// of Err then. The lock counts as lost, too, when its transaction timeout has passed on this client's clock. That time
// is counted from when the request, or the last extension, was sent. Call cancel when the context is not needed any more.
func (l *Lock) Context(ctx context.Context) (_ context.Context, cancel context.CancelFunc) {
	life := l.lifetime()
	ctx, end := context.WithCancelCause(ctx)
	if life.Err() != nil {
		end(context.Cause(life))
	}
	stop := context.AfterFunc(life, func() { end(context.Cause(life)) })
	return ctx, func() {
		stop()
		end(context.Canceled)
	}
}

// Done returns a channel that is closed when the lock is lost or released.
func (l *Lock) Done() <-chan struct{} { return l.lifetime().Done() }

// lifetime returns a context that is cancelled when the lock ends.
func (l *Lock) lifetime() context.Context {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.life == nil {
		l.life, l.endLife = context.WithCancelCause(context.Background())
		if l.checkExpiry() != nil {
			l.endLife(l.err)
		}
		l.setTimer()
	}
	return l.life
}

// Detach hands the lock over to other clients, and returns its id: from then on this client neither extends nor releases it, and
// does not report its end. Contexts of the lock are not cancelled. The other client should call Client.ExtendID at once.
// A lock with ReleaseOnDisconnect cannot be detached.
func (l *Lock) Detach() (id int64, err error) {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.request.OnDisconnect != "" {
		return l.id, errors.New("genie: a lock with ReleaseOnDisconnect ends with its session, and cannot be detached")
	}
	if err := l.checkExpiry(); err != nil && err != ErrDetached {
		return l.id, err
	}
	l.life = nil
	l.end(ErrDetached)
	return l.id, nil
}

// Extend sets the remaining time of the lock to timeout from now, which may be shorter than before.
// An ended lock returns its *LostError, or ErrReleased.
func (l *Lock) Extend(ctx context.Context, timeout time.Duration) error {
	if err := l.Err(); err != nil {
		return err
	}
	f := &fields{ID: l.id, TransactionTimeout: toMS(timeout)}
	if _, err := l.client.do(ctx, "extend", f, l, l.client.config.ResponseTimeout); err != nil {
		return err
	}
	return l.Err() // the answer may be late
}

// Release releases the lock and waits for the server's confirmation. If the lock was lost before, Release
// returns the *LostError: other clients may have held the lock meanwhile. If ctx ends first, or if
// no server confirms within ResponseTimeout, the client keeps trying in the background. A second
// Release of a released lock does nothing.
func (l *Lock) Release(ctx context.Context) error {
	release, err := l.drop()
	if release != nil {
		_, err = l.client.wait(ctx, release, l.client.config.ResponseTimeout)
	}
	return err
}

// drop ends the lock for its holder, and releases it if the server may hold it. It returns the release, or why the lock had
// ended before.
func (l *Lock) drop() (*call, error) {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	_ = l.checkExpiry()
	l.sendRelease()
	l.end(ErrReleased)
	return l.release, l.err
}

// The rest is called with Client.mu held.

// hold notes that the server holds the lock for at least timeout after since.
func (l *Lock) hold(since time.Time, timeout time.Duration) {
	l.expiresAt, l.renewAt = since.Add(timeout), since.Add(timeout/3)
	l.setTimer()
}

// shorten lets the lock end earlier if an extend that is being sent shortens it. The server may execute the extend although no
// answer arrives.
func (l *Lock) shorten(r *call) {
	timeout := fromMS(*r.fields.TransactionTimeout)
	end := r.sentAt.Add(timeout)
	if timeout > 0 && l.err == nil && end.Before(l.expiresAt) { // the server rejects another timeout
		l.expiresAt, l.shortenedBy = end, r
		l.setTimer()
	}
}

// expiry returns when the lock counts as lost unless the server confirms it again, and for which reason.
func (l *Lock) expiry() (time.Time, string) {
	if l.request.OnDisconnect != "" {
		if end := l.client.leaseFrom.Add(l.client.config.SessionTimeout); end.Before(l.expiresAt) {
			return end, reasonDisconnected
		}
	}
	return l.expiresAt, reasonTransactionTimeout
}

// setTimer sets the timer of a lock that is held, if its watchdog or a context needs one: Err reads the clock itself.
func (l *Lock) setTimer() {
	if l.err != nil || !l.watchdog && l.life == nil {
		return
	}
	if l.timer == nil {
		l.timer = time.AfterFunc(NoTimeout, l.onTimer)
	}
	end, _ := l.expiry()
	next := time.Until(end)
	if l.watchdog {
		next = min(next, time.Until(l.renewAt))
	}
	l.timer.Reset(next)
}

func (l *Lock) onTimer() {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.checkExpiry() != nil {
		return
	}
	if l.watchdog && !time.Now().Before(l.renewAt) {
		l.renewAt = time.Now().Add(l.timeout() / 3)
		l.client.sendBackground("extend", &fields{ID: l.id, TransactionTimeout: l.request.TransactionTimeout}, l)
	}
	l.setTimer()
}

// checkExpiry ends the lock if its time has passed, and returns why it has ended. The server may hold the lock for longer:
// until it reports the end, the lock remains in Client.locks, so that it is released by Release, or after a reconnect.
func (l *Lock) checkExpiry() error {
	if l.err == nil {
		if end, reason := l.expiry(); !time.Now().Before(end) {
			l.end(l.lost(reason))
			if reason == reasonDisconnected || l.shortenedBy != nil { // the server may hold the lock for longer
				l.sendRelease()
			}
		}
	}
	return l.err
}

func (l *Lock) timeout() time.Duration { return fromMS(*l.request.TransactionTimeout) }

func (l *Lock) lost(reason string) *LostError { return &LostError{ID: l.id, Reason: reason} }

func (l *Lock) lostByClose(err error) *LostError {
	return &LostError{ID: l.id, Reason: "the client does not manage it any more", Err: err}
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
	if l.life != nil {
		l.endLife(err)
	}
}

// sendRelease releases the lock at the server, if the server may hold it and no release was sent.
func (l *Lock) sendRelease() {
	if l.release == nil && l.err != ErrDetached && l.client.locks[l.id] == l {
		l.release = l.client.sendBackground("release", &fields{ID: l.id}, l)
	}
}

// onGranted handles the grant of a request.
func (l *Lock) onGranted(conn *conn, r *call, p *payload) {
	l.client.locks[p.ID] = l
	l.id, l.fence, l.confirmedOn = p.ID, p.Fence, conn
	if p.Resources != nil {
		l.choose(p.Resources)
	}
	start, remaining := r.sentAt, l.timeout() // the message may be late, but the server granted the lock after the start
	if p.ExpiresIn != nil {
		start, remaining = conn.helloAt, fromMS(*p.ExpiresIn)
	}
	l.late = time.Until(start.Add(remaining)) < l.timeout()-l.timeout()/maxPassedShare
	if lease, session := l.client.leaseFrom, l.client.config.SessionTimeout; l.request.OnDisconnect != "" {
		l.late = l.late || time.Since(lease) > session/2 // the extension renews it
	}
	if l.late {
		remaining = NoTimeout // until the answer to the extension; the caller does not have the lock before
	}
	l.hold(start, remaining)
	l.late = l.checkExpiry() != nil || l.late // the lease of the session has ended: there is no lock to return
	l.client.finish(r, nil)
}

// choose notes which resources of an AcquireAny were locked. The names have no modes.
func (l *Lock) choose(names []string) {
	choices := map[string]string{}
	for _, resource := range l.resources {
		_, name, _ := strings.Cut(resource, ":")
		choices[name] = resource
	}
	l.resources = nil
	for _, name := range names {
		l.resources = append(l.resources, choices[name])
	}
}

// onReported handles the report that the server still holds the lock. On a connection on which the server has confirmed the lock
// before, it is the answer to a repeated request, whose time does not count from `hello`.
func (l *Lock) onReported(conn *conn, p *payload) {
	isNews := l.confirmedOn != conn
	l.confirmedOn = conn
	if l.err != nil { // by this client's clock, or it is detached
		l.sendRelease()
	} else if isNews && p.ExpiresIn != nil {
		l.hold(conn.helloAt, fromMS(*p.ExpiresIn))
	}
}

// onExtended handles the answer to an extend.
func (l *Lock) onExtended(r *call) {
	if l.err != nil { // by this client's clock
		l.sendRelease()
	} else {
		l.request.TransactionTimeout = r.fields.TransactionTimeout
		l.shortenedBy = nil
		l.hold(r.sentAt, l.timeout())
		if l.client.calls[l.lastExtend.fields.Ref] == l.lastExtend && l.lastExtend != r {
			for _, later := range l.client.calls {
				if later.name == "extend" && later.lock == l && !later.sentAt.IsZero() {
					l.shorten(later)
				}
			}
		}
	}
	l.client.finish(r, l.err)
}

// onEnded handles the end of the lock at the server, as a notification or as the answer to a release or an extend.
func (l *Lock) onEnded(r *call, reason string) {
	if r == nil && l.release != nil && reason == reasonSuccess {
		return // the answer to the release follows
	}
	delete(l.client.locks, l.id)
	isByID := r != nil && r.name == "release" && r != l.release
	if (l.err == ErrReleased || isByID) && reason != reasonSuccess { // before the server received the release
		l.err = l.lost(reason)
	}
	l.end(l.lost(reason))
	released := l.err
	if released == ErrReleased {
		released = nil
	}
	l.client.finish(l.release, released)
	l.client.finish(r, l.err)
}

// onResumed handles the end of the handshake: the server has reported the locks that it holds.
func (l *Lock) onResumed(conn *conn) {
	switch {
	case l.confirmedOn != conn && l.err == ErrDetached:
		delete(l.client.locks, l.id)
	case l.confirmedOn != conn && l.release == nil: // it is lost, but the server may hold it without a session
		l.sendRelease()
		l.end(l.lost(reasonLost))
	case l.confirmedOn == conn && l.watchdog: // the last extension may have been lost
		l.renewAt = time.Now()
		l.setTimer()
	}
}

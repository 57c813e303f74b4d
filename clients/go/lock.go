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
	resources []string // of AcquireAny: the choices, and after the grant those that are locked
	anyOf     *AnyOf
	done      chan struct{} // closed when the request is granted, or has failed

	// Client.mu protects the rest. ID, fence and resources do not change after the grant.
	options       options
	state         lockState
	ref           uint64
	id, fence     int64
	sent          bool
	unanswered    bool          // counted in session.unanswered
	refused       bool          // answered with `unavailable`: must be sent again
	probed        bool          // the reason for its end was asked for
	stillHeld     bool          // lost by this client's clock, and not released at the server
	sentAt        time.Duration // the first time, in this session of the server
	resentAt      time.Duration // the last time
	deadline      time.Duration // when the caller gives up
	connection    int           // the last connection on which the server confirmed the lock
	expiresAt     time.Duration
	sessionEndsAt time.Duration // while disconnected: when the server may release the lock
	renewAt       time.Duration // when the watchdog extends the lock
	release       *call
	err           error // why the request failed, or the lock was lost
	ctx           context.Context
	onEnd         []func()
}

type lockState uint8

const (
	waiting lockState = iota // not sent yet, or sent and not granted yet
	held
	releasing
	ended
)

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
	return l.reason()
}

// reason is Err with the mutex held.
func (l *Lock) reason() error {
	switch {
	case l.err != nil:
		return l.err
	case l.state != held:
		return ErrReleased
	case l.client.now() >= min(l.expiresAt, l.sessionEndsAt):
		return &LostError{ID: l.id, Reason: reasonTransactionTimeout}
	}
	return nil
}

// Context returns a context that is cancelled when the lock is lost or released. Err tells which. The lock
// counts as lost, too, when its transaction timeout has passed on this client's clock. That time is
// counted from when the request, or the last extension, was sent.
func (l *Lock) Context() context.Context {
	l.client.mu.Lock()
	defer l.client.mu.Unlock()
	if l.ctx == nil {
		var cancel context.CancelFunc
		l.ctx, cancel = context.WithCancel(context.Background())
		l.cancelAtEnd(cancel)
	}
	return l.ctx
}

// cancelAtEnd calls cancel when the lock is lost or released. Called with the mutex held.
func (l *Lock) cancelAtEnd(cancel func()) {
	if l.reason() != nil {
		cancel()
		return
	}
	l.onEnd = append(l.onEnd, cancel)
}

// cancelAll cancels the contexts of a lock that has ended.
func (l *Lock) cancelAll() {
	for _, cancel := range l.onEnd {
		cancel()
	}
	l.onEnd = nil
}

// Extend sets the remaining time of the lock to timeout from now, which may be shorter than before.
// An ended lock returns its *LostError, or ErrReleased.
func (l *Lock) Extend(ctx context.Context, timeout time.Duration) error {
	c := l.client
	c.mu.Lock()
	err := l.reason()
	if err == nil {
		err = c.admit(ctx)
	}
	if err == nil {
		err = l.reason() // again: the lock may have ended while the call waited
	}
	if err != nil {
		c.unlock()
		return err
	}
	return c.sendAndWait(ctx, &call{kind: extendCall, lock: l, id: l.id, timeout: timeout})
}

// Release releases the lock and waits for the server's confirmation. If the lock was lost before, Release
// returns the *LostError: other clients may have held the lock meanwhile. If ctx ends first, or if
// no server confirms within ConnectTimeout, the client keeps trying in the background. A second
// Release of a released lock does nothing.
func (l *Lock) Release(ctx context.Context) error {
	l.client.mu.Lock()
	return l.releaseAndUnlock(ctx)
}

func (l *Lock) releaseAndUnlock(ctx context.Context) error {
	c := l.client
	now := c.now()
	if l.stillHeld {
		l.stillHeld = false
		c.session.releaseID(l.id, now)
	}
	if l.state == held {
		c.session.release(l, now)
	}
	if l.state != releasing || l.release.done == nil {
		err := l.err
		c.unlock()
		return err
	}
	release := l.release
	done := release.done
	c.unlock()
	select {
	case <-done:
		return release.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// choose notes which resources of an AcquireAny were locked. The names have no modes.
func (l *Lock) choose(names []string) {
	chosen := map[string]bool{}
	for _, name := range names {
		chosen[name] = true
	}
	var resources []string
	for _, resource := range l.resources {
		if _, name, _ := strings.Cut(resource, ":"); chosen[name] {
			resources = append(resources, resource)
		}
	}
	l.resources = resources
}

// Do acquires a lock, calls fn, and releases the lock, also if fn panics. The context of fn is cancelled
// when ctx is, and when the lock is lost. If the lock was lost, Do returns a *LostError that wraps
// the error of fn; otherwise the error of fn, or that of the release.
func (c *Client) Do(
	ctx context.Context, resources []string, fn func(ctx context.Context, lock *Lock) error, opts ...Option,
) error {
	lock, err := c.Acquire(ctx, resources, opts...)
	if err != nil {
		return err
	}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	c.mu.Lock()
	lock.cancelAtEnd(cancel)
	c.mu.Unlock()
	returned := false
	defer func() {
		if !returned { // fn panics
			lock.releaseSoon()
		}
	}()
	err = fn(inner, lock)
	returned = true
	return lock.finish(ctx, err)
}

// finish releases the lock after fn has returned err, and returns the error of Do.
func (l *Lock) finish(ctx context.Context, err error) error {
	if ctx.Err() != nil { // the caller does not want to wait
		l.releaseSoon()
	} else if released := l.Release(ctx); err == nil {
		err = released
	}
	var lost *LostError
	if reason := l.Err(); errors.As(reason, &lost) && err != reason {
		if errors.Is(err, context.Canceled) && ctx.Err() == nil {
			return reason // fn has returned because of the loss
		}
		return &LostError{ID: lost.ID, Reason: lost.Reason, Err: err}
	}
	return err
}

// releaseSoon releases the lock without waiting for the answer.
func (l *Lock) releaseSoon() {
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	_ = l.Release(cancelled)
}

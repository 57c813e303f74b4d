package genie

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

const defaultAttempts = 10

// Tx is an attempt of a transaction. Its methods may be called from several goroutines.
type Tx struct {
	client *Client
	opts   []Option
	ctx    context.Context // ends with the attempt, and when a lock is lost
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	locks   []*Lock
	wanted  map[string]string // the names that all attempts have asked for, and the resource with the stronger mode
	isEnded bool
}

// Attempts limits how often Client.Transaction calls its function. Default: 10.
func Attempts(n int) Option { return option(func(l *Lock) { l.attempts = n }) }

// Transaction calls fn, which locks what it needs step by step with Tx.Lock, and releases all locks when fn returns or
// panics. The context of fn is cancelled when ctx is, and when a lock of the transaction is lost.
//
// If fn returns an ErrDeadlock, all locks are released, and fn is called again after a random pause. Before that, all names
// that fn has asked for are locked in one request, which cannot deadlock. So fn must be able to start over: keep its effects
// until it has all locks, or undo them.
//
// The error is that of fn. If a lock was lost, it is a *LostError that wraps the error of fn. The options are those of each
// request. Without the option Transaction, the transaction has a new name. Do not use a name that another transaction may have
// at the same time, such as an idempotency key: their locks would not exclude each other.
func (c *Client) Transaction(ctx context.Context, fn func(ctx context.Context, tx *Tx) error, opts ...Option) error {
	l := c.newLock(opts)
	name := cmp.Or(l.request.Transaction, "tx-"+newSecret()[:16])
	tx := &Tx{client: c, opts: append(slices.Clip(opts), Transaction(name)), wanted: map[string]string{}}
	for attempt := 1; ; attempt++ {
		err := tx.attempt(ctx, fn)
		if !errors.Is(err, ErrDeadlock) || attempt >= l.attempts {
			return err
		}
		select {
		case <-time.After(rand.N(maxBackoff(attempt - 1))):
			tx = &Tx{client: c, opts: tx.opts, wanted: tx.wanted}
		case <-ctx.Done():
			return err
		}
	}
}

func (tx *Tx) attempt(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) (err error) {
	tx.ctx, tx.cancel = context.WithCancelCause(ctx)
	defer func() {
		tx.mu.Lock()
		tx.isEnded = true
		tx.mu.Unlock()
		tx.cancel(ErrReleased)
		err = tx.client.endBlock(ctx, tx.locks, err)
	}()
	if all := slices.Sorted(maps.Values(tx.wanted)); len(all) > 0 {
		if _, err := tx.Lock(tx.ctx, all...); err != nil {
			return err
		}
	}
	return fn(tx.ctx, tx)
}

// Lock locks the resources for the rest of the transaction, all at once. If one lock of the transaction has them already, Lock
// returns it at once.
func (tx *Tx) Lock(ctx context.Context, resources ...string) (*Lock, error) {
	resources = withModes(resources)
	tx.mu.Lock()
	for _, resource := range resources {
		if mode, name, _ := strings.Cut(resource, ":"); mode != "shared" || tx.wanted[name] == "" {
			tx.wanted[name] = resource
		}
	}
	locks := tx.locks
	tx.mu.Unlock()
	if err := context.Cause(tx.ctx); err != nil {
		return nil, err
	}
	if held := slices.IndexFunc(locks, func(l *Lock) bool { return l.covers(resources) }); held >= 0 {
		return locks[held], nil
	}
	lock, err := tx.client.Acquire(ctx, resources, tx.opts...)
	if err != nil {
		return nil, err
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.isEnded {
		_, _ = lock.drop()
		return nil, ErrReleased
	}
	tx.locks = append(tx.locks, lock)
	life := lock.lifetime()
	context.AfterFunc(life, func() {
		if lost := context.Cause(life); errors.Is(lost, ErrLockLost) {
			tx.cancel(lost)
		}
	})
	return lock, nil
}

// Fence returns the greatest fencing token of the locks of the transaction: pass it to the data store with each read and write.
func (tx *Tx) Fence() (fence int64) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	for _, l := range tx.locks {
		fence = max(fence, l.fence)
	}
	return fence
}

// covers returns whether the lock is held, and includes the resources.
func (l *Lock) covers(resources []string) bool {
	for _, resource := range resources {
		name, isShared := strings.CutPrefix(resource, "shared:")
		if !slices.Contains(l.resources, resource) && !(isShared && slices.Contains(l.resources, Exclusive(name))) {
			return false
		}
	}
	return l.Err() == nil
}

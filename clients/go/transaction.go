package genie

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
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

	mu       sync.Mutex
	locks    []*Lock
	wanted   map[string]string // the names that all earlier attempts have asked for, and the strongest resource
	asked    map[string]string // the names that this attempt has asked for; units are added up
	reserved map[string]units  // the units that the first request of a repeated attempt has locked, and fn has not asked for yet
	isEnded  bool
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
	tx := &Tx{client: c, opts: append(slices.Clip(opts), Transaction(name)), wanted: map[string]string{}, asked: map[string]string{}}
	for attempt := 1; ; attempt++ {
		err := tx.attempt(ctx, fn)
		if !errors.Is(err, ErrDeadlock) || attempt >= l.attempts {
			return err
		}
		select {
		case <-time.After(rand.N(maxBackoff(attempt - 1))):
			tx = tx.next()
		case <-ctx.Done():
			return err
		}
	}
}

// next returns the next attempt, which first locks what the earlier ones have asked for.
func (tx *Tx) next() *Tx {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	for _, resource := range tx.asked {
		addTo(tx.wanted, resource, most)
	}
	return &Tx{client: tx.client, opts: tx.opts, wanted: tx.wanted, asked: map[string]string{}}
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
		tx.asked, tx.reserved = map[string]string{}, map[string]units{} // fn asks for the same units again
		for _, resource := range all {
			if name, _, asked := split(resource); asked.limit > 0 {
				tx.reserved[name] = asked
			}
		}
	}
	return fn(tx.ctx, tx)
}

// Lock locks the resources for the rest of the transaction, all at once. If one lock of the transaction has them already, Lock
// returns it at once. Each call locks further units. If the transaction ends first, or loses a lock, the request is cancelled.
func (tx *Tx) Lock(ctx context.Context, resources ...string) (*Lock, error) {
	resources = withModes(resources)
	held := tx.ask(resources)
	if err := context.Cause(tx.ctx); err != nil {
		return nil, err
	}
	if held != nil {
		return held, nil
	}
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(tx.ctx, cancel)()
	lock, err := tx.client.Acquire(wait, resources, tx.opts...)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		return nil, context.Cause(tx.ctx)
	}
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

// ask notes what fn asks for, and returns a lock of the transaction that covers it, or nil.
func (tx *Tx) ask(resources []string) *Lock {
	merged := map[string]string{}
	for _, resource := range resources {
		addTo(merged, resource, sum)
	}
	tx.mu.Lock()
	defer tx.mu.Unlock()
	for _, resource := range merged {
		addTo(tx.asked, resource, sum)
	}
	found := slices.IndexFunc(tx.locks, func(l *Lock) bool { return tx.covers(l, merged) })
	if found < 0 {
		return nil
	}
	for name, resource := range merged {
		if left, isReserved := tx.reserved[name]; isReserved {
			_, _, asked := split(resource)
			tx.reserved[name] = units{left.n - asked.n, left.limit}
		}
	}
	return tx.locks[found]
}

// covers returns whether the lock is held, and includes the resources, by name.
func (tx *Tx) covers(l *Lock, resources map[string]string) bool {
	for name, resource := range resources {
		_, _, asked := split(resource)
		left := tx.reserved[name]
		isReserved := l == tx.locks[0] && asked.n <= left.n && left.limit <= asked.limit
		isIncluded := asked.limit == 0 && slices.Contains(l.resources, resource) || asked.limit > 0 && isReserved
		if !isIncluded && !slices.Contains(l.resources, Exclusive(name)) {
			return false
		}
	}
	return l.Err() == nil
}

// units are units of a counted resource: how many, and the limit. The limit 0 stands for another mode.
type units struct{ n, limit int }

func sum(a, b units) units {
	limit := min(a.limit, b.limit)
	return units{min(a.n+b.n, limit), limit}
}

func most(a, b units) units {
	if a.n > b.n || a.n == b.n && a.limit > b.limit {
		return a
	}
	return b
}

// split returns the parts of a resource with a mode.
func split(resource string) (name, mode string, asked units) {
	mode, name, _ = strings.Cut(resource, ":")
	if n, limit, isUnits := strings.Cut(mode, "/"); isUnits {
		asked.n, _ = strconv.Atoi(n)
		asked.limit, _ = strconv.Atoi(limit) // the server rejects what is not a number
	}
	return name, mode, asked
}

// addTo adds a resource to that of the same name. `add` joins units.
func addTo(byName map[string]string, resource string, add func(a, b units) units) {
	name, mode, asked := split(resource)
	other, isPresent := byName[name]
	if !isPresent {
		byName[name] = resource
		return
	}
	_, otherMode, others := split(other)
	switch {
	case asked.limit > 0 && others.limit > 0:
		joined := add(asked, others)
		byName[name] = Units(name, joined.n, joined.limit)
	case mode != otherMode:
		byName[name] = Exclusive(name)
	}
}

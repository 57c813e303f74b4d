// Package genie is the client of Genie, a lock server for distributed transactions.
//
//	client, err := genie.Dial(ctx, genie.Config{Addresses: []string{"lock-1:7077", "lock-2:7077"}})
//	…
//	defer client.Close()
//	err = client.Do(ctx, []string{"exclusive:accounts/2"}, func(ctx context.Context, lock *genie.Lock) error {
//		return transfer(ctx, lock.Fence())
//	})
//
// A Client has one connection to the leader of the servers, for any number of goroutines. If the
// connection is lost, it reconnects: locks stay held, and waiting requests keep their places in the queue.
package genie

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Client is a client of Genie, made by Dial. All methods may be called from several goroutines.
type Client struct {
	config     Config
	secret     string          // of the session
	note       string          // of the requests without a note of their own
	template   Lock            // with the default options
	ctx        context.Context // ends with Close
	cancel     context.CancelFunc
	stopped    chan struct{} // closed when `run` has returned
	closeOnce  sync.Once
	lastNumber atomic.Uint64 // of the calls

	// The goroutine of `run` uses these.
	addresses    []address           // in the order in which they are tried next
	leader       address             // as the last server named it; zero: it is not known
	lastUp       address             // the server of the last connection
	failedRounds int                 // since the server has executed a command
	takeovers    int                 // of the session, in a row
	isEntered    bool                // Dial does not wait any more
	lateLookUps  map[address]*lookUp // lookups too late for the last round

	mu           sync.Mutex
	served       *conn            // the connection whose `hello` was accepted; nil: there is none
	conn         *conn            // the connection whose handshake is complete; nil: there is none
	calls        map[string]*call // the commands without an answer, by ref
	unknownLocks int              // the unanswered releases of locks that this client has not requested
	locks        map[int64]*Lock  // the locks that the server may hold, by id
	watches      map[*Watch]bool  // the open watches
	leaseFrom    time.Time        // the lease of the session: when the last command was sent that the server has answered
	lastFailure  error            // the cause of ErrUnavailable
	closed       error            // why the client is closed; nil: it is open
}

// Option is an option of a request: of Acquire, TryAcquire, AcquireAny, Do, Elect, Client.Transaction and Config.Defaults.
type Option interface{ apply(*Lock) }

type option func(*Lock)

func (o option) apply(l *Lock) { o(l) }

// NoTimeout as a queue timeout means to wait without a limit.
const NoTimeout time.Duration = 1<<63 - 1

// QueueTimeout limits the wait for the lock. Default: 10 s.
func QueueTimeout(d time.Duration) Option {
	return option(func(l *Lock) { l.request.QueueTimeout = toMS(d) })
}

// TransactionTimeout limits how long the lock is held, unless it is extended. Default: 10 s.
func TransactionTimeout(d time.Duration) Option {
	return option(func(l *Lock) { l.request.TransactionTimeout = toMS(d) })
}

// Transaction names the one transaction to which the request belongs, such as "transfer-42". Requests of
// one transaction do not block each other, and deadlocks between transactions are detected.
func Transaction(name string) Option { return option(func(l *Lock) { l.request.Transaction = name }) }

// Priority lets requests of a higher priority be granted first. Default: 0.
func Priority(priority int) Option { return option(func(l *Lock) { l.request.Priority = priority }) }

// Watchdog extends the lock automatically until it is released, so that the transaction timeout only
// limits how long the lock outlives a crash of this process.
func Watchdog() Option { return option(func(l *Lock) { l.watchdog = true }) }

// ReleaseOnDisconnect lets the server release the lock when the session of this client ends: when the
// client is closed, or has no connection for SessionTimeout. Otherwise the lock then stays held until its
// transaction timeout. Such a lock counts as lost if the server has not answered any command that was sent
// during the last SessionTimeout.
func ReleaseOnDisconnect() Option {
	return option(func(l *Lock) { l.request.OnDisconnect = "release" })
}

// Note is a text of at most 256 characters that operators see. Default: PROGRAM PID@HOST; "" sends none.
func Note(note string) Option { return option(func(l *Lock) { l.request.Note = note }) }

// Traceparent calls a function with the context of each request, and sends its result: the span that makes the request, in the
// format of W3C Trace Context. Operators, and clients that the request blocks, see it. "" sends none.
func Traceparent(of func(context.Context) string) Option {
	return option(func(l *Lock) { l.trace = of })
}

// Exclusive returns the resource that locks a name exclusively.
func Exclusive(name string) string { return "exclusive:" + name }

// Shared returns the resource that shares a name with other shared locks.
func Shared(name string) string { return "shared:" + name }

// Units returns the resource that locks n units of a name, of which at most limit are in use at once: "2/10:licences".
// The limit is not declared elsewhere. The server rejects a request unless 1 <= n <= limit <= 1,000,000.
func Units(name string, n, limit int) string { return fmt.Sprintf("%d/%d:%s", n, limit, name) }

// Subtree returns the resource that locks all names exclusively that begin with prefix, existing and future ones. The prefix
// ends with a slash, which is added if it is missing; the empty prefix stands for all names. Shared("accounts/**") is the
// shared lock.
func Subtree(prefix string) string {
	if prefix != "" && !strings.HasSuffix(prefix, "/") {
		prefix += "/"
	}
	return Exclusive(prefix + "**")
}

// Dial connects to the leader of the servers. It tries until ConnectTimeout, and then fails with ErrUnavailable. If the
// servers reject the token or the namespace, it fails at once with a *RejectedError. See Config.Lazy.
func Dial(ctx context.Context, config Config) (*Client, error) {
	addresses, err := config.resolve()
	if err != nil {
		return nil, err
	}
	c := &Client{
		config: config, secret: newSecret(), stopped: make(chan struct{}), addresses: addresses,
		calls: map[string]*call{}, locks: map[int64]*Lock{}, watches: map[*Watch]bool{}, lateLookUps: map[address]*lookUp{},
		isEntered: config.Lazy, lastFailure: errors.New("no server has answered"),
		template: Lock{attempts: defaultAttempts, request: fields{
			QueueTimeout: toMS(defaultTimeout), TransactionTimeout: toMS(defaultTimeout), Note: defaultNote(),
		}},
	}
	for _, option := range config.Defaults {
		option.apply(&c.template)
	}
	c.note, c.template.request.Note = c.template.request.Note, ""
	if err := (&fields{Token: config.Token, Namespace: config.Namespace, Note: c.note}).check(nil); err != nil {
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	connected := &call{name: "ping", fields: &fields{Ref: pingRef}, done: make(chan struct{})} // of the handshake
	c.calls[pingRef] = connected
	go c.run()
	if config.Lazy {
		return c, nil
	}
	if _, err := c.wait(ctx, connected, config.ConnectTimeout); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close ends the session and the connection. Waiting calls fail with ErrClosed, and their requests are
// cancelled. Locks with ReleaseOnDisconnect are released. The others stay held at the server until their
// transaction timeout, of which Close warns, but count as lost here: see Shutdown. Close always returns nil.
func (c *Client) Close() error {
	c.closeOnce.Do(func() {
		c.mu.Lock()
		var kept []string
		for _, l := range c.locks {
			if l.request.OnDisconnect != "" { // the server ends it before the answer to bye arrives
				l.end(l.lostByClose(ErrClosed))
			} else if l.err == nil {
				kept = append(kept, fmt.Sprint(l.id, l.resources))
			}
		}
		c.closed = ErrClosed
		c.abandonRequests(ErrClosed)
		conn, bye := c.served, c.sendBackground("bye", &fields{}, nil)
		if len(kept) > 0 {
			c.warn("the client is closed and leaves locks held", "locks", kept)
		}
		c.mu.Unlock()
		if conn != nil {
			_, _ = c.wait(conn.ctx, bye, min(3*time.Second, c.config.ResponseTimeout))
		}
		c.cancel()
		<-c.stopped
	})
	return nil
}

// Shutdown lets no further calls begin, waits until all locks are released, or until ctx ends, releases the locks that are still
// held, which count as lost here, and closes the client. It returns the error of ctx if ctx has ended, and ErrUnavailable if the
// server has not confirmed all releases.
func (c *Client) Shutdown(ctx context.Context) error {
	c.mu.Lock()
	c.closed = ErrClosed
	c.abandonRequests(ErrClosed)
	locks := slices.Collect(maps.Values(c.locks))
	c.mu.Unlock()
	defer c.Close()
	for _, l := range locks {
		select {
		case <-l.Done():
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	for _, l := range locks {
		l.sendRelease()
		l.end(l.lostByClose(ErrClosed))
	}
	calls := slices.Collect(maps.Values(c.calls))
	c.mu.Unlock()
	end := time.Now().Add(c.config.ResponseTimeout)
	for _, r := range calls {
		if r.name == "release" {
			if _, err := c.wait(context.Background(), r, time.Until(end)); errors.Is(err, ErrUnavailable) {
				return err
			}
		}
	}
	return ctx.Err()
}

// Acquire waits until all of the resources can be locked at once. A resource is "exclusive:NAME",
// "shared:NAME", or a NAME without a colon, which is exclusive; Units and Subtree return further ones. If ctx ends first, the
// request is cancelled.
func (c *Client) Acquire(ctx context.Context, resources []string, opts ...Option) (*Lock, error) {
	return c.acquire(ctx, &fields{Resources: withModes(resources)}, opts)
}

// TryAcquire locks the resources without waiting for other clients. If they cannot be locked now, the
// error is an ErrQueueTimeout: a *QueueTimeoutError with the requests that hold them.
func (c *Client) TryAcquire(ctx context.Context, resources []string, opts ...Option) (*Lock, error) {
	return c.Acquire(ctx, resources, append(opts[:len(opts):len(opts)], QueueTimeout(0))...)
}

// AnyOf are the resources from which AcquireAny chooses.
type AnyOf struct {
	Resources []string
	Weights   []*big.Int // of each resource; nil: each has the weight 1. See Weights.
	Target    *big.Int   // the sum of weights to reach
}

// Weights converts integers to the weights of AnyOf.
func Weights(weights ...int64) []*big.Int {
	list := make([]*big.Int, len(weights))
	for i, weight := range weights {
		list[i] = big.NewInt(weight)
	}
	return list
}

// AcquireAny locks free resources, in the given order, until their weights reach the target. Lock.Resources returns them.
// It never waits for other clients: if the free resources are not enough, the error is an *InsufficientError.
func (c *Client) AcquireAny(ctx context.Context, choices AnyOf, opts ...Option) (*Lock, error) {
	f := &fields{AnyOf: withModes(choices.Resources), Target: choices.Target.String()}
	for _, weight := range choices.Weights {
		f.Weights = append(f.Weights, weight.String())
	}
	return c.acquire(ctx, f, append(opts[:len(opts):len(opts)], QueueTimeout(0)))
}

// withModes returns the resources as on the wire.
func withModes(resources []string) []string {
	list := make([]string, len(resources))
	for i, resource := range resources {
		if list[i] = resource; !strings.Contains(resource, ":") {
			list[i] = Exclusive(resource)
		}
	}
	return list
}

// newLock returns a lock with the default options and these.
func (c *Client) newLock(opts []Option) *Lock {
	l := c.template
	l.client = c
	for _, option := range opts {
		option.apply(&l)
	}
	return &l
}

func (c *Client) acquire(ctx context.Context, f *fields, opts []Option) (*Lock, error) {
	l := c.newLock(opts)
	l.resources = append(f.Resources, f.AnyOf...)
	l.request.Resources, l.request.AnyOf, l.request.Weights, l.request.Target = f.Resources, f.AnyOf, f.Weights, f.Target
	if l.trace != nil {
		l.request.Traceparent = l.trace(ctx)
	}
	limit, timeout := NoTimeout, l.timeout()
	if queueTimeout := *l.request.QueueTimeout; queueTimeout < maxTimeoutMS {
		limit = fromMS(queueTimeout) + c.config.ResponseTimeout
	}
	if _, err := c.do(ctx, "request", &l.request, l, limit); err != nil {
		return nil, err
	}
	if l.late {
		if err := l.Extend(ctx, timeout); err != nil { // it is unknown how long the lock is held
			l.drop()
			return nil, err
		}
	}
	return l, nil
}

// Do acquires a lock, calls fn, and releases the lock, also if fn panics. The context of fn is cancelled
// when ctx is, and when the lock is lost. The error is that of fn; if the lock was lost, a *LostError that wraps it. If fn
// succeeded, but the release is not confirmed, Do logs a warning and returns nil: the client keeps releasing in the
// background.
func (c *Client) Do(
	ctx context.Context, resources []string, fn func(ctx context.Context, lock *Lock) error, opts ...Option,
) (err error) {
	lock, err := c.Acquire(ctx, resources, opts...)
	if err != nil {
		return err
	}
	inner, cancel := lock.Context(ctx)
	defer func() {
		cancel()
		err = c.endBlock(ctx, []*Lock{lock}, err)
	}()
	return fn(inner, lock)
}

// endBlock releases the locks of a function that has returned an error or nil, and returns the error for its caller. If ctx has
// ended, it does not wait for the answers.
func (c *Client) endBlock(ctx context.Context, locks []*Lock, err error) error {
	releases := make([]*call, len(locks))
	for i, l := range locks {
		releases[i], _ = l.drop()
	}
	end := time.Now().Add(c.config.ResponseTimeout)
	for i, release := range releases {
		if release == nil {
			continue
		}
		_, failure := c.wait(ctx, release, time.Until(end))
		if failure != nil && ctx.Err() == nil && !errors.Is(failure, ErrLockLost) {
			c.config.Logger.Warn("genie: the release of a lock is not confirmed; it is repeated until the server confirms it",
				"id", locks[i].id, "resources", locks[i].resources, "error", failure)
		}
	}
	for _, l := range locks {
		var lost *LostError
		if errors.As(l.Err(), &lost) && !errors.Is(err, lost) {
			if errors.Is(err, context.Canceled) && ctx.Err() == nil {
				err = nil // the function has returned because of the loss
			}
			return &LostError{lost.ID, lost.Reason, err}
		}
	}
	return err
}

// Elect waits until this client is the leader of all that call Elect with the same name, and calls fn. The leader
// remains the leader until fn returns, or until it loses the lock: then the context of fn is cancelled, and Elect returns
// a *LostError. The client extends the lock until then.
func (c *Client) Elect(
	ctx context.Context, name string, fn func(ctx context.Context, lock *Lock) error, opts ...Option,
) error {
	opts = append([]Option{QueueTimeout(NoTimeout), Watchdog()}, opts...)
	return c.Do(ctx, []string{Exclusive(name)}, fn, opts...)
}

// Leader returns the present leader of an election, or nil if there is none: its ID, Note, Fence, and since when it leads.
func (c *Client) Leader(ctx context.Context, name string) (*Request, error) {
	inspection, err := c.Inspect(ctx, Query{Resource: name, Only: "holders", Limit: 1})
	if err != nil || len(inspection.Holders) == 0 {
		return nil, err
	}
	return &inspection.Holders[0], nil
}

// ReleaseID releases a lock, or cancels a waiting request, of any client. If it had ended otherwise before, the error is a
// *LostError with the reason, or a *RejectedError with the code "unknown-id".
func (c *Client) ReleaseID(ctx context.Context, id int64) error {
	err := c.callByID(ctx, "release", &fields{ID: id})
	if lost := (*LostError)(nil); errors.As(err, &lost) && lost.Reason == reasonSuccess {
		return nil
	}
	return err
}

// ExtendID sets the remaining time of a lock of any client to timeout from now. It returns the errors of ReleaseID, and a
// *LostError also for a lock that was released.
func (c *Client) ExtendID(ctx context.Context, id int64, timeout time.Duration) error {
	return c.callByID(ctx, "extend", &fields{ID: id, TransactionTimeout: toMS(timeout)})
}

func (c *Client) callByID(ctx context.Context, name string, f *fields) error {
	c.mu.Lock()
	l := c.locks[f.ID] // of this client: no notification tells it what has changed
	if l != nil && l.checkExpiry() != nil {
		l = nil
	}
	var query *call
	if name == "release" && l == nil && c.conn != nil && c.hasRequests() { // it may be a waiting request of this client
		query = c.sendBackground("inspect", &fields{ID: f.ID, Only: "queue"}, nil)
	}
	c.mu.Unlock()
	r := c.newCall(name, f, l)
	r.query = query
	answer, err := c.execute(ctx, r, c.config.ResponseTimeout)
	if err == nil && answer != nil && answer.Reason != "" {
		err = &LostError{ID: f.ID, Reason: answer.Reason}
	}
	return err
}

// Query selects the requests that Inspect lists: all that match every field that is not zero.
type Query struct {
	Resource    string // a name without a mode
	Transaction string
	ID          int64
	Limit       int    // at most 1,000; default: 100
	Only        string // "holders" or "queue"
}

// Inspection lists held locks and waiting requests, as they were at one moment.
type Inspection struct {
	Holders      []Request `json:"holders"`
	HoldersTotal int       `json:"holdersTotal"` // of all that match, also beyond the limit
	Queue        []Request `json:"queue"`
	QueueTotal   int       `json:"queueTotal"`
}

// Request is a held lock or a waiting request, as Inspect lists it.
type Request struct {
	ID             int64         `json:"id"`
	Resources      []string      `json:"resources"` // the first ten, exclusive ones first
	ResourcesTotal int           `json:"resourcesTotal"`
	Priority       float64       `json:"priority"`
	Since          time.Time     `json:"since"`     // of the grant; of a waiting request: of its arrival
	ExpiresIn      time.Duration `json:"expiresIn"` // until it times out; NoTimeout: it does not
	Transaction    string        `json:"transactionName,omitempty"`
	Note           string        `json:"note,omitempty"`
	Traceparent    string        `json:"traceparent,omitempty"`
	Fence          int64         `json:"fence,omitempty"`    // of a held lock
	Blockers       []Blocker     `json:"blockers,omitempty"` // of a waiting request: the first ten
	BlockersTotal  int           `json:"blockersTotal,omitempty"`
}

// Inspect lists held locks and waiting requests.
func (c *Client) Inspect(ctx context.Context, query Query) (*Inspection, error) {
	answer, err := c.do(ctx, "inspect", &fields{
		Resource: query.Resource, Transaction: query.Transaction, ID: query.ID, Limit: query.Limit, Only: query.Only,
	}, nil, c.config.ResponseTimeout)
	if err != nil {
		return nil, err
	}
	return &answer.Inspection, nil
}

// Ping checks whether the server executes commands.
func (c *Client) Ping(ctx context.Context) error {
	_, err := c.do(ctx, "ping", &fields{}, nil, c.config.ResponseTimeout)
	return err
}

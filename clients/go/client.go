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
	"fmt"
	"math/big"
	"strings"
	"sync"
	"time"
)

// Client is a client of Genie. All methods may be called from several goroutines.
type Client struct {
	config    Config
	addresses []address // in the order of the next round of attempts; used by the goroutine of `run`
	leader    *address  // named by the last follower; used by the goroutine of `run`
	wait      backoff   // between rounds
	hello     []byte
	start     time.Time
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	stopped   chan struct{} // closed when no goroutine of the client runs any more

	mu          sync.Mutex
	session     *session
	conn        *conn // the connection whose handshake is complete; nil: there is none
	connectedAt time.Duration
	lastFailure string
	timer       *time.Timer
	timerAt     time.Duration
	closing     chan struct{} // closed when Close has finished; nil: Close was not called
}

// Option is an option of Acquire, TryAcquire, AcquireAny and Do.
type Option func(*options)

type options struct {
	queueTimeout, transactionTimeout time.Duration
	transaction, note                string
	priority                         int
	watchdog, releaseOnDisconnect    bool
}

// NoTimeout as a queue timeout means to wait without a limit.
const NoTimeout time.Duration = 1<<63 - 1

// QueueTimeout limits the wait for the lock. Default: 10 s.
func QueueTimeout(d time.Duration) Option { return func(o *options) { o.queueTimeout = d } }

// TransactionTimeout limits how long the lock is held, unless it is extended. Default: 10 s.
func TransactionTimeout(d time.Duration) Option { return func(o *options) { o.transactionTimeout = d } }

// Transaction names the one transaction to which the request belongs, such as "transfer-42". Requests of
// one transaction do not block each other, and deadlocks between transactions are detected.
func Transaction(name string) Option { return func(o *options) { o.transaction = name } }

// Priority lets requests of a higher priority be granted first. Default: 0.
func Priority(priority int) Option { return func(o *options) { o.priority = priority } }

// Watchdog extends the lock automatically until it is released, so that the transaction timeout only
// limits how long the lock outlives a crash of this process.
func Watchdog() Option { return func(o *options) { o.watchdog = true } }

// ReleaseOnDisconnect lets the server release the lock when the session of this client ends: when the
// client is closed, or has no connection for SessionTimeout. Otherwise the lock then stays
// held until its transaction timeout.
func ReleaseOnDisconnect() Option { return func(o *options) { o.releaseOnDisconnect = true } }

// Note is a text of at most 256 characters that operators see.
func Note(note string) Option { return func(o *options) { o.note = note } }

// Exclusive returns the resource that locks a name exclusively.
func Exclusive(name string) string { return "exclusive:" + name }

// Shared returns the resource that shares a name with other shared locks.
func Shared(name string) string { return "shared:" + name }

// Dial connects to the leader of the servers. It fails with ErrUnavailable if no server answers, or if no leader is
// found within ConnectTimeout, and with a *RejectedError if the servers reject the token or the namespace.
func Dial(ctx context.Context, config Config) (*Client, error) {
	addresses, err := config.resolve()
	if err != nil {
		return nil, err
	}
	secret, err := newSecret()
	if err != nil {
		return nil, err
	}
	c := &Client{
		config: config, addresses: addresses, start: time.Now(), stopped: make(chan struct{}),
		lastFailure: "no answer", timerAt: never,
	}
	c.hello = appendHello(nil, secret, &c.config)
	c.session = newSession(&c.config)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.timer = time.AfterFunc(time.Hour, c.onTimer)
	limited, cancel := context.WithTimeout(ctx, config.ConnectTimeout)
	defer cancel()
	conn, err := c.connectFirst(limited)
	if err != nil {
		c.timer.Stop()
		c.cancel()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	go c.run(conn)
	return c, nil
}

// Close ends the session and the connection. Waiting calls fail with ErrClosed, and their requests are
// cancelled. Locks with ReleaseOnDisconnect are released. The others stay held at the server until their
// transaction timeout, but count as lost here. Close always returns nil.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closing != nil {
		c.mu.Unlock()
		<-c.closing
		return nil
	}
	c.closing = make(chan struct{})
	defer close(c.closing)
	bye := &call{kind: byeCall, done: make(chan struct{}), abandoned: true}
	said := bye.done
	if c.session.closed == nil {
		c.session.closed = ErrClosed
		now := c.now()
		for _, l := range c.session.locks {
			if l.state == waiting {
				l.err = ErrClosed
				c.session.abandon(l, now)
				close(l.done)
			}
		}
		if c.session.phase == up {
			c.session.send(bye, now)
		} else {
			close(said)
		}
	} else {
		close(said)
	}
	c.unlock()
	timeout := time.NewTimer(min(3*time.Second, c.config.ConnectTimeout))
	select {
	case <-said:
	case <-timeout.C:
	}
	timeout.Stop()
	c.cancel()
	c.mu.Lock()
	if c.conn != nil {
		c.conn.Close()
	}
	c.unlock()
	<-c.stopped
	c.mu.Lock()
	c.session.shut(ErrClosed)
	c.timer.Stop()
	c.unlock()
	return nil
}

// Acquire waits until all of the resources can be locked at once. A resource is "exclusive:NAME",
// "shared:NAME", or a NAME without a colon, which is exclusive. If ctx ends first, the request is cancelled.
func (c *Client) Acquire(ctx context.Context, resources []string, opts ...Option) (*Lock, error) {
	return c.acquire(ctx, resources, nil, nil, opts)
}

// TryAcquire locks the resources without waiting for other clients. If they cannot be locked now, the
// error is an ErrQueueTimeout: a *QueueTimeoutError with the requests that hold them.
func (c *Client) TryAcquire(ctx context.Context, resources []string, opts ...Option) (*Lock, error) {
	return c.acquire(ctx, resources, nil, func(o *options) { o.queueTimeout = 0 }, opts)
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
func (c *Client) AcquireAny(ctx context.Context, any AnyOf, opts ...Option) (*Lock, error) {
	if any.Target == nil {
		return nil, &RejectedError{"bad-request", "AnyOf.Target is missing"}
	}
	for _, weight := range any.Weights {
		if weight == nil {
			return nil, &RejectedError{"bad-request", "a weight is nil"}
		}
	}
	return c.acquire(ctx, any.Resources, &any, func(o *options) { o.queueTimeout = 0 }, opts)
}

func (c *Client) acquire(
	ctx context.Context, resources []string, any *AnyOf, last Option, opts []Option,
) (*Lock, error) {
	l := &Lock{client: c, anyOf: any, done: make(chan struct{}), sessionEndsAt: never}
	l.options.queueTimeout, l.options.transactionTimeout = defaultTimeout, defaultTimeout
	for _, option := range opts {
		option(&l.options)
	}
	if last != nil {
		last(&l.options)
	}
	var err error
	if l.resources, err = checkRequest(resources, &l.options); err != nil {
		return nil, err
	}
	c.mu.Lock()
	if err := c.admit(ctx); err != nil {
		c.unlock()
		return nil, err
	}
	c.session.request(l, c.now())
	c.unlock()
	select {
	case <-l.done:
	case <-ctx.Done():
		c.mu.Lock()
		c.session.abandon(l, c.now())
		c.unlock()
		return nil, ctx.Err()
	}
	if c.mu.Lock(); l.err != nil {
		defer c.mu.Unlock()
		return nil, l.err
	}
	c.mu.Unlock()
	return l, nil
}

// checkRequest returns the resources as on the wire. It rejects what the server could not answer by its ref.
func checkRequest(resources []string, o *options) ([]string, error) {
	if err := checkTexts(o.transaction, o.note); err != nil {
		return nil, err
	}
	if err := checkTexts(resources...); err != nil {
		return nil, err
	}
	list := make([]string, len(resources))
	size := 1024 + 6*(len(o.transaction)+len(o.note))
	for i, resource := range resources {
		if mode, _, found := strings.Cut(resource, ":"); !found {
			resource = Exclusive(resource)
		} else if mode != "exclusive" && mode != "shared" {
			return nil, &RejectedError{"bad-request", fmt.Sprintf(
				"%q: a resource is shared:NAME, exclusive:NAME or a NAME without a colon", resource)}
		}
		list[i] = resource
		size += len(resource) + 3
	}
	if len(list) == 0 || size > maxRequestLine {
		return nil, &RejectedError{"bad-request", fmt.Sprintf(
			"a request must have at least one resource, and at most %d bytes", maxRequestLine)}
	}
	return list, nil
}

// Query selects the requests that Inspect lists: all that match every field that is not zero.
type Query struct {
	Resource    string `json:"resource,omitempty"` // a name without a mode
	Transaction string `json:"transactionName,omitempty"`
	ID          int64  `json:"id,omitempty"`
	Limit       int    `json:"limit,omitempty"` // at most 1,000; default: 100
	Only        string `json:"only,omitempty"`  // "holders" or "queue"
}

// Inspection lists held locks and waiting requests, as they were at one moment.
type Inspection struct {
	Holders, Queue           []Request
	HoldersTotal, QueueTotal int // of all that match, also beyond the limit
}

// Request is a held lock or a waiting request, as Inspect lists it.
type Request struct {
	ID             int64
	Resources      []string // the first ten, exclusive ones first
	ResourcesTotal int
	Priority       float64
	Since          time.Time     // of the grant; of a waiting request: of its arrival
	ExpiresIn      time.Duration // until it times out; NoTimeout: it does not
	Transaction    string
	Note           string
	Fence          int64     // of a held lock
	Blockers       []Blocker // of a waiting request: the first ten
	BlockersTotal  int
}

// Inspect lists held locks and waiting requests.
func (c *Client) Inspect(ctx context.Context, query Query) (*Inspection, error) {
	if err := checkTexts(query.Resource, query.Transaction, query.Only); err != nil {
		return nil, err
	}
	c.mu.Lock()
	if err := c.admit(ctx); err != nil {
		c.unlock()
		return nil, err
	}
	r := &call{kind: inspectCall, query: &query}
	err := c.sendAndWait(ctx, r)
	return r.result, err
}

// Ping checks whether the server executes commands.
func (c *Client) Ping(ctx context.Context) error {
	c.mu.Lock()
	if err := c.admit(ctx); err != nil {
		c.unlock()
		return err
	}
	return c.sendAndWait(ctx, &call{kind: pingCall})
}

func (m *inspected) inspection() *Inspection {
	return &Inspection{requests(m.Holders), requests(m.Queue), m.HoldersTotal, m.QueueTotal}
}

func requests(rows []inspectedRow) []Request {
	list := make([]Request, len(rows))
	for i, row := range rows {
		list[i] = Request{
			row.ID, row.Resources, row.ResourcesTotal, row.Priority, unixMS(row.Since), NoTimeout,
			row.TransactionName, row.Note, row.Fence, blockers(row.Blockers), row.BlockersTotal,
		}
		if row.ExpiresIn != nil {
			list[i].ExpiresIn = fromMS(*row.ExpiresIn)
		}
	}
	return list
}

// sendAndWait sends a call and waits for its answer. Called with the mutex held, which it releases.
func (c *Client) sendAndWait(ctx context.Context, r *call) error {
	now := c.now()
	done := make(chan struct{})
	r.done, r.deadline = done, now+c.config.ConnectTimeout
	c.session.send(r, now)
	c.unlock()
	select {
	case <-done:
		return r.err
	case <-ctx.Done():
		c.mu.Lock()
		c.session.drop(r)
		c.unlock()
		return ctx.Err()
	}
}

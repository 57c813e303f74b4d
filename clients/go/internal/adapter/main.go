// Command adapter drives the client for the conformance kit: calls arrive as JSON lines on standard
// input, answers and events leave on standard output. conformance/README.md specifies them.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"sync"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
)

type object = map[string]any

type requestCall struct {
	Call               int64
	Do                 string
	Addresses          []string
	Resources          []string
	AnyOf              []string
	Target             string
	Weights            []string
	Lock               int64
	Watch              int64
	Cancelled          int64 `json:"-"` // the `target` of `cancel`
	TransactionTimeout float64
	Prefix             string
	Paused             bool
	Resource           string
	ID                 int64
	TransactionName    string
	Limit              int
	Only               string
	Options            struct {
		SessionTimeout, ConnectTimeout   float64
		ResponseTimeout, MaxUnavailable  float64
		Token, Namespace                 string
		QueueTimeout, TransactionTimeout *float64
		Priority                         int
		OnDisconnect, TransactionName    string
		Note                             string
		Watchdog                         bool
	}
}

type adapter struct {
	mu      sync.Mutex
	output  *bufio.Writer
	client  *genie.Client
	number  int64
	locks   map[int64]*genie.Lock
	watches map[int64]*watch
	open    map[int64]context.CancelFunc
}

type watch struct {
	watch  *genie.Watch
	resume chan struct{}
	ended  chan struct{}
}

func main() {
	a := &adapter{
		output: bufio.NewWriter(os.Stdout), locks: map[int64]*genie.Lock{},
		watches: map[int64]*watch{}, open: map[int64]context.CancelFunc{},
	}
	input := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := input.ReadBytes('\n')
		if err != nil {
			return
		}
		var call requestCall
		var target struct{ Target json.RawMessage }
		if err := json.Unmarshal(line, &target); err != nil {
			panic(err)
		}
		if err := json.Unmarshal(line, &call); err != nil && call.Do != "cancel" {
			var wrongType *json.UnmarshalTypeError // `target` of cancel is a number
			if !errors.As(err, &wrongType) || wrongType.Field != "target" {
				panic(err)
			}
		}
		if call.Do == "exit" {
			a.write(object{"call": call.Call, "ok": object{}})
			return
		}
		if call.Do == "cancel" {
			_ = json.Unmarshal(target.Target, &call.Cancelled)
		}
		ctx, cancel := context.WithCancel(context.Background())
		a.mu.Lock()
		a.open[call.Call] = cancel
		a.mu.Unlock()
		go a.execute(ctx, &call)
	}
}

func (a *adapter) write(message object) {
	line, err := json.Marshal(message)
	if err != nil {
		panic(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	_, _ = a.output.Write(append(line, '\n'))
	a.output.Flush()
}

func (a *adapter) execute(ctx context.Context, call *requestCall) {
	ok, err := a.do(ctx, call)
	a.mu.Lock()
	a.open[call.Call]()
	delete(a.open, call.Call)
	a.mu.Unlock()
	if err != nil {
		a.write(object{"call": call.Call, "error": describe(err)})
	} else if ok == nil {
		a.write(object{"call": call.Call, "ok": object{}})
	} else {
		a.write(object{"call": call.Call, "ok": ok})
	}
	if lock, granted := ok["lock"].(int64); granted {
		go a.reportLoss(lock)
	}
}

func (a *adapter) do(ctx context.Context, call *requestCall) (object, error) {
	a.mu.Lock()
	client, lock, watch := a.client, a.locks[call.Lock], a.watches[call.Watch]
	a.mu.Unlock()
	if client == nil && call.Do != "connect" && call.Do != "close" && call.Do != "cancel" && lock == nil && watch == nil {
		return nil, genie.ErrClosed
	}
	switch call.Do {
	case "connect":
		return nil, a.connect(ctx, call)
	case "acquire":
		return a.added(client.Acquire(ctx, call.Resources, options(call)...))
	case "tryAcquire":
		lock, err := client.TryAcquire(ctx, call.Resources, options(call)...)
		if errors.Is(err, genie.ErrQueueTimeout) {
			return object{"lock": nil}, nil
		}
		return a.added(lock, err)
	case "acquireAny":
		return a.added(client.AcquireAny(ctx, anyOf(call), options(call)...))
	case "release":
		return nil, lock.Release(ctx)
	case "extend":
		return nil, lock.Extend(ctx, duration(call.TransactionTimeout))
	case "ping":
		return nil, client.Ping(ctx)
	case "inspect":
		inspection, err := client.Inspect(ctx, genie.Query{
			Resource: call.Resource, Transaction: call.TransactionName, ID: call.ID, Limit: call.Limit, Only: call.Only,
		})
		if err != nil {
			return nil, err
		}
		return object{
			"holders": rows(inspection.Holders), "holdersTotal": inspection.HoldersTotal,
			"queue": rows(inspection.Queue), "queueTotal": inspection.QueueTotal,
		}, nil
	case "watch":
		return a.watch(client, call)
	case "resume":
		close(watch.resume)
	case "unwatch":
		_ = watch.watch.Close()
		<-watch.ended
	case "cancel":
		a.mu.Lock()
		if cancel := a.open[call.Cancelled]; cancel != nil {
			cancel()
		}
		a.mu.Unlock()
	case "close":
		a.mu.Lock()
		a.client = nil
		a.mu.Unlock()
		if client != nil {
			return nil, client.Close()
		}
	default:
		return nil, fmt.Errorf("unknown call %q", call.Do)
	}
	return nil, nil
}

func (a *adapter) connect(ctx context.Context, call *requestCall) error {
	client, err := genie.Dial(ctx, genie.Config{
		Addresses: call.Addresses, Token: call.Options.Token, Namespace: call.Options.Namespace,
		SessionTimeout:  duration(call.Options.SessionTimeout),
		ConnectTimeout:  duration(call.Options.ConnectTimeout * float64(len(call.Addresses))),
		ResponseTimeout: duration(cmp.Or(call.Options.ResponseTimeout, call.Options.MaxUnavailable, 20_000)),
		Logger:          slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err == nil {
		a.mu.Lock()
		a.client = client
		a.mu.Unlock()
	}
	return err
}

// added numbers a lock.
func (a *adapter) added(lock *genie.Lock, err error) (object, error) {
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	a.number++
	number := a.number
	a.locks[number] = lock
	a.mu.Unlock()
	return object{"lock": number, "id": lock.ID(), "fence": lock.Fence(), "resources": lock.Resources()}, nil
}

func (a *adapter) reportLoss(number int64) {
	a.mu.Lock()
	lock := a.locks[number]
	a.mu.Unlock()
	ctx, cancel := lock.Context(context.Background())
	defer cancel()
	<-ctx.Done()
	if err := context.Cause(ctx); errors.Is(err, genie.ErrLockLost) && !errors.Is(err, genie.ErrClosed) {
		a.write(object{"event": "lost", "lock": number, "type": describe(err)["type"]})
	}
}

func (a *adapter) watch(client *genie.Client, call *requestCall) (object, error) {
	w := &watch{resume: make(chan struct{}), ended: make(chan struct{})}
	var err error
	if w.watch, err = client.Watch(call.Prefix); err != nil {
		return nil, err
	}
	a.mu.Lock()
	a.number++
	number := a.number
	a.watches[number] = w
	a.mu.Unlock()
	if !call.Paused {
		close(w.resume)
	}
	go a.reportChanges(number, w)
	return object{"watch": number}, nil
}

func (a *adapter) reportChanges(number int64, w *watch) {
	defer close(w.ended)
	<-w.resume
	for {
		change, err := w.watch.Next(context.Background())
		if err != nil {
			return
		}
		if change.State == "resync" { // the following changes are differences
			continue
		}
		a.write(object{"event": "watch", "watch": number, "change": object{
			"state": change.State, "resource": change.Resource, "mode": change.Mode, "id": change.ID,
		}})
	}
}

func options(call *requestCall) []genie.Option {
	o := call.Options
	list := []genie.Option{
		genie.Priority(o.Priority), genie.Transaction(o.TransactionName), genie.Note(o.Note),
	}
	if o.QueueTimeout != nil {
		list = append(list, genie.QueueTimeout(duration(*o.QueueTimeout)))
	}
	if o.TransactionTimeout != nil {
		list = append(list, genie.TransactionTimeout(duration(*o.TransactionTimeout)))
	}
	if o.OnDisconnect == "release" {
		list = append(list, genie.ReleaseOnDisconnect())
	}
	if o.Watchdog {
		list = append(list, genie.Watchdog())
	}
	return list
}

func anyOf(call *requestCall) genie.AnyOf {
	number := func(text string) *big.Int {
		n, ok := new(big.Int).SetString(text, 10)
		if !ok {
			panic(text)
		}
		return n
	}
	any := genie.AnyOf{Resources: call.AnyOf, Target: number(call.Target)}
	for _, weight := range call.Weights {
		any.Weights = append(any.Weights, number(weight))
	}
	return any
}

func rows(requests []genie.Request) []object {
	list := []object{}
	for _, request := range requests {
		list = append(list, object{"id": request.ID, "resources": request.Resources})
	}
	return list
}

// describe returns an error as the kit expects it.
func describe(err error) object {
	result := object{"message": err.Error(), "type": "unexpected"}
	var (
		queueTimeout *genie.QueueTimeoutError
		deadlock     *genie.DeadlockError
		insufficient *genie.InsufficientError
		lost         *genie.LostError
		ended        *genie.EndedError
		rejected     *genie.RejectedError
	)
	switch {
	case errors.Is(err, genie.ErrClosed):
		result["type"] = "closed"
	case errors.As(err, &queueTimeout):
		list := []object{}
		for _, blocker := range queueTimeout.Blockers {
			list = append(list, object{"id": blocker.ID, "resource": blocker.Resource, "units": blocker.Units, "of": blocker.Of})
		}
		result["type"], result["blockers"] = "queue-timeout", list
	case errors.As(err, &deadlock):
		result["type"], result["cycle"] = "deadlock", deadlock.Cycle
	case errors.As(err, &insufficient):
		result["type"] = "insufficient"
		result["free"], result["locked"] = insufficient.Free.String(), insufficient.Locked.String()
	case errors.As(err, &lost):
		result["type"] = lost.Reason
	case errors.As(err, &ended):
		result["type"] = ended.Reason
	case errors.As(err, &rejected):
		result["type"] = rejected.Code
	case errors.Is(err, genie.ErrUnavailable):
		result["type"] = "unavailable"
	case errors.Is(err, context.Canceled):
		result["type"] = "cancelled"
	}
	return result
}

func duration(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// Command bank moves money between accounts that only locks protect.
//
// Several processes, each with several clerks (goroutines), read two balances, pause, and write them
// back in separate steps. At the end the sum of all balances must be unchanged.
//
//	genie serve &
//	go run ./examples/bank                  # the sum is kept
//	go run ./examples/bank -without-locks   # the same work, and a sum that is wrong
//
// There are four kinds of clerks. Some lock both accounts at once, which cannot deadlock. Some lock the
// second account while they hold the first, in a transaction, which starts over after a deadlock. Some pause for longer than their transaction timeout between
// their two writes: they lose their lock with half a transfer done. Fencing tokens make that safe, and
// `compensate` undoes the half. And some hold locks for long that the server releases when their session
// ends: their client must know that before another clerk has the lock.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
)

const (
	accounts           = 10
	openingBalance     = 1_000_000 // cents
	largestTransfer    = 10_000
	processes          = 3
	clerksPerProcess   = 5
	transactionTimeout = 250 * time.Millisecond // a transfer takes a few milliseconds
	queueTimeout       = 60 * time.Second
	maxPause           = 2 * time.Millisecond
	transfersPerPause  = 20 // a slow clerk exceeds its transaction timeout in every 20th transfer

	// A patient clerk holds its locks for long in every 20th transfer, with locks that end with its session.
	patience         = 1500 * time.Millisecond
	patientTimeout   = 30 * time.Second
	sessionTimeout   = 500 * time.Millisecond
	tooSlow, patient = 2, 3 // the kinds of clerks
)

// counters count what happened to the clerks of a process.
type counters struct {
	Transfers, Deadlocks, LostLocks, Retries int64
	Mistakes                                 int64 // a clerk believed in a lock after another one had it
}

type change struct{ account, amount int }

type clerk struct {
	number   int
	store    store
	client   *genie.Client // nil: without locks
	counters *counters
	random   *rand.Rand
}

func (c *clerk) kind() int { return c.number % 5 }

// work makes random transfers until stop is closed. A transfer that was begun is repeated until it succeeds.
func (c *clerk) work(stop <-chan struct{}) error {
	for transfers := 0; ; transfers++ {
		select {
		case <-stop:
			return nil
		default:
		}
		source := c.random.Intn(accounts)
		target := (source + 1 + c.random.Intn(accounts-1)) % accounts
		amount := 1 + c.random.Intn(largestTransfer)
		pauses := transfers%transfersPerPause == 0
		for {
			done, err := c.transfer([]change{{source, -amount}, {target, amount}}, pauses)
			if err != nil {
				return err
			} else if done {
				break
			}
			pauses = false
			atomic.AddInt64(&c.counters.Retries, 1)
		}
		atomic.AddInt64(&c.counters.Transfers, 1)
	}
}

// transfer attempts a transfer. It returns false if the transfer failed and all its changes were undone.
func (c *clerk) transfer(changes []change, pauses bool) (bool, error) {
	var written []change
	err := c.locked(changes, func(ctx context.Context, fences map[int]int64) error {
		return c.apply(ctx, changes, fences, &written, pauses)
	})
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, genie.ErrLockLost), errors.Is(err, errStaleFence):
		atomic.AddInt64(&c.counters.LostLocks, 1)
		return false, c.compensate(written)
	case canRetry(err):
		return false, c.compensate(written)
	}
	return false, err
}

func canRetry(err error) bool {
	return errors.Is(err, genie.ErrQueueTimeout) || errors.Is(err, genie.ErrUnavailable) ||
		errors.Is(err, genie.ErrLockLost) || errors.Is(err, genie.ErrDeadlock) || errors.Is(err, errStaleFence)
}

// apply reads all balances, pauses, and writes them one by one; written gets each change that the store accepted.
func (c *clerk) apply(ctx context.Context, changes []change, fences map[int]int64, written *[]change, pauses bool) error {
	balances := map[int]int{}
	for _, change := range changes {
		balance, err := c.store.read(change.account, fences[change.account])
		if err != nil {
			return err
		}
		balances[change.account] = balance
	}
	pause := time.Duration(c.random.Int63n(int64(maxPause)))
	if pauses && c.kind() == patient {
		pause = patience
	}
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
	for i, change := range changes {
		if ctx.Err() != nil { // the lock is lost: do not begin another write
			return ctx.Err()
		}
		err := c.store.write(change.account, balances[change.account]+change.amount, fences[change.account])
		if err != nil {
			return err
		}
		*written = append(*written, change)
		if pauses && c.kind() == tooSlow && i == 0 {
			time.Sleep(transactionTimeout * 3 / 2) // does not look at ctx: only the fence prevents the second write
			if err := c.store.write(changes[1].account, balances[changes[1].account]+changes[1].amount,
				fences[changes[1].account]); err != nil {
				return err
			}
			*written = append(*written, changes[1])
			return nil
		}
	}
	return nil
}

// compensate undoes the written part of a transfer that lost its locks: it locks the accounts again and
// subtracts the amounts. The old balances would be wrong, because others have changed them since.
func (c *clerk) compensate(written []change) error {
	var rest []change
	for _, done := range written {
		rest = append(rest, change{done.account, -done.amount})
	}
	for len(rest) > 0 {
		var undone []change
		err := c.locked(rest, func(ctx context.Context, fences map[int]int64) error {
			return c.apply(ctx, rest, fences, &undone, false)
		})
		if err != nil && !canRetry(err) && !errors.Is(err, context.Canceled) {
			return err
		}
		rest = rest[len(undone):]
	}
	return nil
}

// locked calls function while the accounts are locked, with the fencing token of each account.
func (c *clerk) locked(changes []change, function func(context.Context, map[int]int64) error) error {
	fences := map[int]int64{}
	if c.client == nil {
		return function(context.Background(), fences)
	}
	opts := []genie.Option{genie.QueueTimeout(queueTimeout), genie.TransactionTimeout(transactionTimeout)}
	if c.kind() == patient {
		opts = append(opts, genie.TransactionTimeout(patientTimeout), genie.ReleaseOnDisconnect())
	}
	if c.kind()%3 != 1 { // all at once
		var resources []string
		for _, change := range changes {
			resources = append(resources, resource(change.account))
		}
		return c.client.Do(context.Background(), resources, func(ctx context.Context, lock *genie.Lock) error {
			for _, change := range changes {
				fences[change.account] = lock.Fence()
			}
			err := function(ctx, fences)
			if errors.Is(err, errStaleFence) && lock.Err() == nil {
				atomic.AddInt64(&c.counters.Mistakes, 1)
			}
			return err
		}, opts...)
	}
	attempts := 0 // step by step
	return c.client.Transaction(context.Background(), func(ctx context.Context, tx *genie.Tx) error {
		if attempts++; attempts > 1 {
			atomic.AddInt64(&c.counters.Deadlocks, 1)
		}
		for _, change := range changes {
			lock, err := tx.Lock(ctx, resource(change.account))
			if err != nil {
				return err
			}
			fences[change.account] = lock.Fence()
		}
		return function(ctx, fences)
	}, opts...)
}

func resource(account int) string { return fmt.Sprint("exclusive:accounts/", account) }

// runProcess runs the clerks of one process until its standard input ends, and prints the counters.
func runProcess(number int, path string, withoutLocks bool) error {
	counters := &counters{}
	var client *genie.Client
	if !withoutLocks {
		var err error
		if client, err = genie.Dial(context.Background(), genie.Config{
			ConnectTimeout: 30 * time.Second, SessionTimeout: sessionTimeout, ResponseTimeout: 30 * time.Second,
		}); err != nil {
			return err
		}
	}
	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	errs := make(chan error, clerksPerProcess)
	for i := 0; i < clerksPerProcess; i++ {
		c := &clerk{
			number: number*clerksPerProcess + i, store: store(path), client: client, counters: counters,
			random: rand.New(rand.NewSource(time.Now().UnixNano() + int64(i))),
		}
		go func() { errs <- c.work(stop) }()
	}
	var failure error
	for i := 0; i < clerksPerProcess; i++ {
		if err := <-errs; err != nil {
			failure = err
		}
	}
	if client != nil {
		client.Close()
		if stacks := clientGoroutines(); failure == nil && stacks != "" {
			failure = errors.New("goroutines of the client are left: " + stacks)
		}
	}
	text, _ := json.Marshal(counters)
	fmt.Println(string(text))
	return failure
}

// clientGoroutines returns the stacks of goroutines that the closed client should have ended.
func clientGoroutines() string {
	var left string
	for i := 0; i < 100; i++ {
		stacks := make([]byte, 1<<20)
		left = string(stacks[:runtime.Stack(stacks, true)])
		if !strings.Contains(left, "clients/go.(*Client)") {
			return ""
		}
		time.Sleep(10 * time.Millisecond)
	}
	return left
}

// bank runs the processes and compares the sums.
func bank(length time.Duration, withoutLocks bool) error {
	folder, err := os.MkdirTemp("", "bank")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	store := store(folder)
	for account := 0; account < accounts; account++ {
		if err := store.create(account, openingBalance); err != nil {
			return err
		}
	}
	var group sync.WaitGroup
	var total counters
	errs := make(chan error, processes)
	var inputs []io.Closer
	for i := 0; i < processes; i++ {
		command := exec.Command(os.Args[0], "-process", fmt.Sprint(i), "-store", folder, fmt.Sprint("-without-locks=", withoutLocks))
		command.Stderr = os.Stderr
		input, err := command.StdinPipe()
		if err != nil {
			return err
		}
		inputs = append(inputs, input)
		group.Add(1)
		go func() {
			defer group.Done()
			output, err := command.Output()
			var own counters
			if err == nil {
				err = json.Unmarshal(output, &own)
			}
			atomic.AddInt64(&total.Transfers, own.Transfers)
			atomic.AddInt64(&total.Deadlocks, own.Deadlocks)
			atomic.AddInt64(&total.LostLocks, own.LostLocks)
			atomic.AddInt64(&total.Retries, own.Retries)
			atomic.AddInt64(&total.Mistakes, own.Mistakes)
			errs <- err
		}()
	}
	time.Sleep(length)
	for _, input := range inputs {
		input.Close()
	}
	ended := make(chan struct{})
	go func() { group.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(2 * time.Minute):
		return errors.New("a clerk is stuck")
	}
	for i := 0; i < processes; i++ {
		if err := <-errs; err != nil {
			return err
		}
	}
	sum, err := store.sum()
	if err != nil {
		return err
	}
	fmt.Printf("transfers %d, deadlocks %d, lost locks %d, retries %d, mistakes %d\n",
		total.Transfers, total.Deadlocks, total.LostLocks, total.Retries, total.Mistakes)
	fmt.Printf("sum before %d, after %d, difference %d\n", accounts*openingBalance, sum, sum-accounts*openingBalance)
	if sum != accounts*openingBalance && !withoutLocks {
		return errors.New("the sum is wrong")
	}
	if total.Mistakes > 0 && !withoutLocks {
		return errors.New("a clerk believed in a lock after another one had it")
	}
	return nil
}

func main() {
	log.SetFlags(0)
	process := flag.Int("process", -1, "the number of a process of the bank (for its own use)")
	path := flag.String("store", "", "the folder of the accounts (for its own use)")
	length := flag.Duration("for", 5*time.Second, "duration of the run")
	withoutLocks := flag.Bool("without-locks", false, "show what happens without locks")
	flag.Parse()
	var err error
	switch {
	case *process >= 0:
		err = runProcess(*process, *path, *withoutLocks)
	default:
		err = bank(*length, *withoutLocks)
	}
	if err != nil {
		log.Fatalf("bank: %v", err)
	}
}

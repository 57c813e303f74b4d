package genie_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"math/big"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
)

// TestTheReadmeContainsTheseExamples compares the README with this file and the first program, so that its code compiles.
func TestTheReadmeContainsTheseExamples(t *testing.T) {
	normalized := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(text), "\n")
		for i, line := range lines {
			lines[i] = strings.TrimSpace(line)
		}
		return strings.Join(lines, "\n")
	}
	code := normalized("example_test.go") + normalized("examples/first/main.go")
	blocks := strings.Split(normalized("README.md"), "```go\n")[1:]
	if len(blocks) < 8 {
		t.Error("the README has", len(blocks), "examples")
	}
	for _, block := range blocks {
		if block, _, _ = strings.Cut(block, "```"); !strings.Contains(code, block) {
			t.Errorf("this is not in example_test.go:\n%s", block)
		}
	}
}

func transfer(context.Context, int64) error { return nil }

func ExampleDial() {
	ctx := context.Background()
	err := func() error {
		client, err := genie.Dial(ctx, genie.Config{Addresses: []string{"lock-1:7077", "lock-2:7077"}})
		if err != nil {
			return err
		}
		defer client.Close()

		return client.Do(ctx, []string{"exclusive:accounts/2", "shared:rates"}, func(ctx context.Context, lock *genie.Lock) error {
			return transfer(ctx, lock.Fence()) // ctx is cancelled when the lock is lost
		})
	}()
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleClient_Acquire() {
	var client *genie.Client
	ctx := context.Background()
	lock, err := client.Acquire(ctx, []string{genie.Shared("reports/2026")}, genie.QueueTimeout(5*time.Second), genie.Watchdog())
	var timeout *genie.QueueTimeoutError
	if errors.As(err, &timeout) {
		fmt.Println("blocked by", timeout.Blockers)
	}
	if err != nil {
		return
	}
	defer lock.Release(ctx)
}

func ExampleClient_AcquireAny() {
	var client *genie.Client
	lock, err := client.AcquireAny(context.Background(), genie.AnyOf{
		Resources: []string{"token/1", "token/2", "token/3"},
		Weights:   genie.Weights(50, 20, 20),
		Target:    big.NewInt(35),
	}, genie.Transaction("transfer-42"))
	if err == nil {
		fmt.Println(lock.Resources())
	}
}

func ExampleClient_Watch() {
	var client *genie.Client
	watch, err := client.Watch("token/")
	if err != nil {
		log.Fatal(err)
	}
	defer watch.Close()
	for {
		change, err := watch.Next(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(change.Resource, change.State)
	}
}

func ExampleClient_Transaction() {
	var (
		client *genie.Client
		db     *sql.DB
		ctx    = context.Background()
	)
	err := client.Transaction(ctx, func(ctx context.Context, tx *genie.Tx) error {
		if _, err := tx.Lock(ctx, "accounts/2"); err != nil {
			return err
		}
		target, err := targetOf(ctx, db, 2, tx.Fence()) // what else to lock is known only now
		if err != nil {
			return err
		}
		if _, err := tx.Lock(ctx, "accounts/"+target); err != nil {
			return err
		}
		return pay(ctx, db, 2, target, tx.Fence())
	})
	if err != nil {
		log.Print(err)
	}
}

func targetOf(context.Context, *sql.DB, int, int64) (string, error) { return "13", nil }

func pay(context.Context, *sql.DB, int, string, int64) error { return nil }

// The data store rejects a write whose fencing token is older than that of the last access.
func writeBalance(ctx context.Context, db *sql.DB, id, balance, fence int64) error {
	result, err := db.ExecContext(ctx,
		`UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND (fence IS NULL OR fence <= $2)`, balance, fence, id)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n == 1 {
		return err
	}
	return errors.New("another client has used the account under a newer lock")
}

func ExampleConfig_lazy() {
	client, err := genie.Dial(context.Background(), genie.Config{
		Lazy:     true, // the service starts while Genie is away
		Defaults: []genie.Option{genie.QueueTimeout(2 * time.Second), genie.Note("billing " + os.Getenv("POD_NAME"))},
		OnEvent:  func(e genie.Event) { log.Print("genie: ", e.State, " ", e.Address) },
	})
	if err != nil {
		log.Fatal(err) // the configuration is wrong
	}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	http.Handle("POST /transfers", transfers(client, nil))
	go http.ListenAndServe(":8080", nil)
	<-stop.Done()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = client.Shutdown(ctx) // waits for running work, and gives back what is still locked
}

// transfers answers one of three outcomes: done, not done, or unknown.
func transfers(client *genie.Client, work func(ctx context.Context, tx *genie.Tx, key string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		begun := false
		err := client.Transaction(r.Context(), func(ctx context.Context, tx *genie.Tx) error {
			if _, err := tx.Lock(ctx, "accounts/2", "accounts/13"); err != nil {
				return err
			}
			begun = true // from here on the work may have an effect, although it returns an error
			return work(ctx, tx, r.Header.Get("Idempotency-Key"))
		})
		switch {
		case err == nil:
			w.WriteHeader(http.StatusNoContent)
		case !begun: // nothing was done: the caller may repeat it
			w.Header().Set("Retry-After", "1")
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default: // unknown: the caller asks with the same key whether it was done
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
}

func ExampleClient_Elect() {
	var client *genie.Client
	ctx := context.Background()
	for ctx.Err() == nil { // a candidate again after each leadership
		err := client.Elect(ctx, "leader/reports", func(ctx context.Context, lock *genie.Lock) error {
			<-ctx.Done() // lead until the leadership is lost
			return ctx.Err()
		}, genie.ReleaseOnDisconnect())
		log.Print("no longer the leader: ", err)
	}
	leader, err := client.Leader(ctx, "leader/reports")
	if err == nil && leader != nil {
		fmt.Println(leader.Note, "leads since", leader.Since)
	}
}

func ExampleLock_Detach() {
	var (
		first, second *genie.Client
		ctx           = context.Background()
	)
	// In the first service: it hands the lock over, together with the job.
	lock, err := first.Acquire(ctx, []string{"orders/42"}, genie.TransactionTimeout(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	id, err := lock.Detach()
	if err != nil {
		log.Fatal(err)
	}
	// In the second service, which has received the id:
	if err := second.ExtendID(ctx, id, time.Minute); err != nil {
		log.Fatal(err) // the lock is lost
	}
	defer second.ReleaseID(ctx, id)
}

func ExampleTraceparent() {
	spanContext := func(context.Context) (traceID, spanID string) { return } // trace.SpanContextFromContext of OpenTelemetry
	traceparent := genie.Traceparent(func(ctx context.Context) string {
		traceID, spanID := spanContext(ctx)
		if traceID == "" {
			return ""
		}
		return "00-" + traceID + "-" + spanID + "-01"
	})
	config := genie.Config{Defaults: []genie.Option{traceparent}}
	_, _ = genie.Dial(context.Background(), config)
}
